"""Texts as the benchmarks feed them: token ids, with the word each token belongs to, and token scores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from whyformer.benchmarks.configurations import RANDOM, Configuration, random_scores
from whyformer.benchmarks.study import Batch, Scores, Study, Unusable, usable
from whyformer.datasets.samples import Text
from whyformer.errors import InputError
from whyformer.evaluate.forwards import padded
from whyformer.explanation.result import Explanation
from whyformer.inputs.prepare import longest_text


@dataclass(frozen=True)
class Encoded:
    """One text as the model sees it.

    Attributes:
        ids: with special tokens; words: word of each token, None at special ones.
        spans: (start, end) characters of each token in the text, (0, 0) at special ones.
        count: words of the whole text, also those that truncation cut off.
    """

    ids: tuple[int, ...]
    words: tuple[int | None, ...]
    spans: tuple[tuple[int, int], ...]
    count: int

    @property
    def content(self) -> NDArray[np.bool_]:
        """``[N]`` True at tokens that are not special."""
        return np.array([word is not None for word in self.words])

    @property
    def seen(self) -> list[int]:
        """The words that were not cut off."""
        return sorted({word for word in self.words if word is not None})

    def only(self, kept: Iterable[int]) -> list[int]:
        """Ids of these words alone, with the special tokens."""
        wanted = {None, *kept}
        return [i for i, word in zip(self.ids, self.words, strict=True) if word in wanted]


def encode(text: Text, tokenizer: Any, longest: int) -> Encoded:
    """Tokens of one text, cut off after ``longest``; words are the data set's own where it has them."""
    if not getattr(tokenizer, "is_fast", False):
        raise InputError("this evaluation needs a fast tokenizer (one that can tell which word a token belongs to)")
    made = tokenizer(
        text.text if text.words is None else list(text.words),
        is_split_into_words=text.words is not None,
        truncation=True,
        max_length=longest,
        return_offsets_mapping=True,
    )
    words = made.word_ids(0)
    if all(w is None for w in words):
        raise InputError(f"{text.id}: the text holds no tokens the tokenizer knows")
    count = len(text.words) if text.words is not None else max(w for w in words if w is not None) + 1
    spans = tuple((int(a), int(b)) for a, b in made["offset_mapping"])
    return Encoded(tuple(made["input_ids"]), tuple(words), spans, count)


def fill_id(tokenizer: Any, name: str = "unk") -> int:
    """Id of [UNK], [MASK] or [PAD]."""
    found = getattr(tokenizer, f"{name}_token_id", None)
    if not isinstance(found, int):
        raise InputError(f"the tokenizer has no {name} token to put in place of others")
    return found


@dataclass(frozen=True)
class Texts(Batch):
    """Some texts as the model sees them."""

    encoded: Sequence[Encoded]
    baseline: ClassVar = "unk"

    def explanations(self, configuration: Configuration, targets: Sequence[int]) -> list[Explanation | Unusable]:
        """Of all the texts, each for its own target; scores of padding are behind those of the tokens."""

        def join(rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
            ids, mask = padded(rows, self.study.forwards.pad)
            return {"input_ids": ids, "attention_mask": mask}

        return self.explain(configuration, [e.ids for e in self.encoded], targets, join)

    def scores(self, configuration: Configuration, targets: Sequence[int]) -> list[Scores]:
        """``[N]`` of each text, 0 at special tokens; or why there is none."""
        if configuration.kind == RANDOM:
            drawn = [
                random_scores(s.id, (len(e.ids),), self.study.seed)
                for s, e in zip(self.samples, self.encoded, strict=True)
            ]
            return [np.where(e.content, d, 0.0) for d, e in zip(drawn, self.encoded, strict=True)]
        made: list[Scores] = []
        for one, encoded in zip(self.explanations(configuration, targets), self.encoded, strict=True):
            if isinstance(one, Unusable):
                made.append(one)
                continue
            scores = one.scores[0].double().numpy()[: len(encoded.ids)]
            judged = usable(scores[encoded.content] if encoded.content.sum() > 1 else scores)
            made.append(judged if isinstance(judged, Unusable) else scores)
        return made

    def features(self, index: int, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        """The scores of what can be taken out: the tokens that are not special."""
        return scores[self.encoded[index].content]

    def count(self, index: int) -> int:
        """How many of these there are."""
        return int(self.encoded[index].content.sum())

    def covered(self, index: int, features: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """``[N]`` True at these tokens, special ones counted."""
        at = self.encoded[index].content
        at[at] = features
        return at

    def run(self, jobs: Iterable[tuple[int, NDArray[np.bool_], str]]) -> NDArray[np.float64]:
        """Logits ``[n, C]`` of texts with some tokens replaced: (its number, ``[N]`` True there, by what)."""
        rows = [
            np.where(gone, fill_id(self.study.processor, by), self.encoded[index].ids).tolist()
            for index, gone, by in jobs
        ]
        return self.study.forwards.ids(rows)

    def without(self, index: int, removed: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Logits ``[S, C]`` of one text with each subset of its content tokens ``[S, n]`` [UNK]."""
        return self.run((index, self.covered(index, gone), self.baseline) for gone in removed)


def read_texts(study: Study, samples: Sequence[Text]) -> Texts:
    limits = [study.options.get("longest"), longest_text(study.model, study.processor)]
    longest = min([n for n in limits if n] or [512])
    encoded = [encode(s, study.processor, longest) for s in samples]
    return Texts(study, samples, study.forwards.ids([e.ids for e in encoded]), encoded)

"""Texts as the benchmarks feed them: token ids, with the word each token belongs to, and token scores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from whyformer.benchmarks.configurations import random_scores
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

    ids: NDArray[np.int64]
    words: tuple[int | None, ...]
    spans: tuple[tuple[int, int], ...]
    count: int

    @property
    def content(self) -> NDArray[np.bool_]:
        """``[N]`` True at tokens that are not special."""
        return np.array([word is not None for word in self.words])


def encode(text: Text, tokenizer: Any, longest: int) -> Encoded:
    """Tokens of one text, cut off after ``longest``; words are the data set's own where it has them."""
    if not getattr(tokenizer, "is_fast", False):
        raise InputError("this evaluation needs a fast tokenizer (one that can tell which word a token belongs to)")
    made = tokenizer(
        text.text if text.words is None else list(text.words), is_split_into_words=text.words is not None,
        truncation=True, max_length=longest, return_offsets_mapping=True,
    )  # fmt: skip
    words = made.word_ids(0)
    if all(w is None for w in words):
        raise InputError(f"{text.id}: the text holds no tokens the tokenizer knows")
    count = len(text.words) if text.words is not None else max(w for w in words if w is not None) + 1
    spans = tuple((int(a), int(b)) for a, b in made["offset_mapping"])
    return Encoded(np.array(made["input_ids"]), tuple(words), spans, count)


@dataclass(frozen=True)
class Texts(Batch):
    """Some texts as the model sees them; what can be taken out are the tokens that are not special."""

    encoded: Sequence[Encoded]
    baseline = "unk"

    def inputs(self, which: Sequence[int]) -> dict[str, Tensor]:
        ids, mask = padded([self.encoded[i].ids for i in which], self.study.forwards.pad)
        return {"input_ids": ids, "attention_mask": mask}

    def drawn(self, index: int) -> NDArray[np.float64]:
        encoded = self.encoded[index]
        drawn = random_scores(self.samples[index].id, (len(encoded.ids),), self.study.seed)
        return np.where(encoded.content, drawn, 0.0)

    def truth(self, index: int) -> Scores:
        """The flags of the human rationale, a word's at each of its tokens."""
        flags, words = self.samples[index].rationale, self.encoded[index].words
        return np.array([0.0 if word is None else float(flags[word]) for word in words])

    def read(self, index: int, explanation: Explanation) -> Scores:
        content = self.encoded[index].content
        scores = explanation.scores[0].double().numpy()[: len(content)]
        judged = usable(self.features(index, scores) if content.sum() > 1 else scores)
        return judged if isinstance(judged, Unusable) else scores

    def features(self, index: int, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        return scores[self.encoded[index].content]

    def count(self, index: int) -> int:
        return int(self.encoded[index].content.sum())

    def covered(self, index: int, features: NDArray[np.bool_]) -> NDArray[np.bool_]:
        content = self.encoded[index].content
        made = np.zeros((len(features), content.size), dtype=bool)
        made[:, content] = features
        return made

    def run(self, jobs: Iterable[tuple[int, NDArray[np.bool_], str]]) -> NDArray[np.float64]:
        """Baselines are tokens ("unk", "mask", "pad") that stand where others were, or "delete"."""
        rows = []
        for index, gone, by in jobs:
            ids = self.encoded[index].ids
            rows.append(ids[~gone] if by == "delete" else np.where(gone, self._fill(by), ids))
        return self.study.forwards.ids(rows)

    def _fill(self, name: str) -> int:
        found = getattr(self.study.processor, f"{name}_token_id", None)
        if not isinstance(found, int):
            raise InputError(f"the tokenizer has no {name} token to put in place of others")
        return found


def read_texts(study: Study, samples: Sequence[Text]) -> Texts:
    limits = [study.options.get("longest"), longest_text(study.model, study.processor)]
    longest = min([n for n in limits if n] or [512])
    encoded = [encode(s, study.processor, longest) for s in samples]
    return Texts(study, samples, study.forwards.ids([e.ids for e in encoded]), encoded)

"""Texts as token ids, with the word each token belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from whyformer.datasets.samples import Text
from whyformer.errors import InputError


@dataclass(frozen=True)
class Encoded:
    """One text as the model sees it.

    Attributes:
        ids: with special tokens; special: True at these; words: word of each token, None at special ones.
        spans: (start, end) characters of each token in the text, (0, 0) at special ones.
        count: words of the whole text, also those that truncation cut off.
    """

    ids: tuple[int, ...]
    special: tuple[bool, ...]
    words: tuple[int | None, ...]
    spans: tuple[tuple[int, int], ...]
    count: int

    def without_words(self, gone: set[int]) -> list[int]:
        """Ids with all tokens of some words taken out; special tokens stay."""
        return [i for i, w in zip(self.ids, self.words, strict=True) if w is None or w not in gone]

    def only_words(self, kept: set[int]) -> list[int]:
        """Ids of these words alone, with the special tokens."""
        return [i for i, w in zip(self.ids, self.words, strict=True) if w is None or w in kept]

    def replaced(self, at: NDArray[np.bool_], fill: int) -> list[int]:
        """Ids with some tokens replaced."""
        return [fill if r else i for i, r in zip(self.ids, at, strict=True)]


def encode(text: Text, tokenizer: Any, longest: int) -> Encoded:
    """Tokens of one text, cut off after ``longest``; words are the data set's own where it has them."""
    if not getattr(tokenizer, "is_fast", False):
        raise InputError("this evaluation needs a fast tokenizer (one that can tell which word a token belongs to)")
    split = text.words is not None
    made = tokenizer(
        list(text.words or ()) if split else text.text,
        is_split_into_words=split,
        truncation=True,
        max_length=longest,
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
    )
    words = made.word_ids(0)
    if all(w is None for w in words):
        raise InputError(f"{text.id}: the text holds no tokens the tokenizer knows")
    count = len(text.words) if text.words is not None else max(w for w in words if w is not None) + 1
    spans = tuple((int(a), int(b)) for a, b in made["offset_mapping"])
    return Encoded(tuple(made["input_ids"]), tuple(w is None for w in words), tuple(words), spans, count)


def longest_text(model: nn.Module, tokenizer: Any, wanted: int | None = None) -> int:
    """The most tokens a text may have: what is wanted, within what model and tokenizer take."""
    limits = [
        getattr(getattr(model, "config", None), "max_position_embeddings", None),
        getattr(tokenizer, "model_max_length", None),
        wanted,
    ]
    return min([int(n) for n in limits if n and 0 < n < 10**9] or [512])


def fill_id(tokenizer: Any, name: str = "unk") -> int:
    """Id of [UNK], [MASK] or [PAD]."""
    found = getattr(tokenizer, f"{name}_token_id", None)
    if not isinstance(found, int):
        raise InputError(f"the tokenizer has no {name} token to put in place of others")
    return found


def word_sums(scores: Sequence[float], encoded: Encoded) -> NDArray[np.float64]:
    """Score of each word as the sum over its tokens; 0 for a word that was cut off."""
    result = np.zeros(encoded.count)
    for score, word in zip(scores, encoded.words, strict=False):
        if word is not None:
            result[word] += score
    return result

"""Pairs of texts that a model reads together: a premise and a hypothesis, a question and a paragraph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whyformer.errors import InputError

BETWEEN = " | "
"""What stands between the two texts of a pair where they are shown as one."""

Places = list[list[tuple[int, int]]]


def both(text: Any, pair: Any, truncate: bool) -> tuple[list[str], list[str]]:
    """The first and the second text of each sample.

    Raises:
        InputError: no texts, unlike numbers of them, or they are to be cut: which of them is not known.
    """
    first, second = ([one] if isinstance(one, str) else one for one in (text, pair))
    for one in (first, second):
        if not (isinstance(one, Sequence) and one and all(isinstance(each, str) for each in one)):
            raise InputError("text and text_pair are a text each, or lists of as many texts")
    if len(first) != len(second):
        raise InputError(f"{len(first)} texts and {len(second)} second ones: give one of each for a sample")
    if truncate:
        raise InputError("a pair of texts is not cut, for either of them could be: shorten them, without truncate=True")
    return list(first), list(second)


def read_together(
    texts: list[str], pairs: list[str], places: Places | None, encoded: Any
) -> tuple[list[str], Places | None]:
    """Each pair as one text, with the places of its tokens in it."""
    joined = [a + BETWEEN + b for a, b in zip(texts, pairs, strict=True)]
    if places is None:
        return joined, None
    moved = []
    for i, row in enumerate(places):
        by = (0, len(texts[i]) + len(BETWEEN))
        own = encoded.sequence_ids(i)
        moved.append([(a, b) if k is None else (a + by[k], b + by[k]) for (a, b), k in zip(row, own, strict=True)])
    return joined, moved

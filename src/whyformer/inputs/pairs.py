"""Pairs of texts that a model reads as one input, such as premise and hypothesis or question and paragraph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whyformer.errors import InputError

BETWEEN = " | "
"""Separator between the two texts of a pair when they are shown as one."""

Places = list[list[tuple[int, int]]]


def text_lists(text: Any, pair: Any) -> tuple[list[str], list[str]]:
    """Return the first and the second texts of the samples as lists.

    Raises:
        InputError: not texts, or unequal numbers of them.
    """
    first, second = ([texts] if isinstance(texts, str) else texts for texts in (text, pair))
    for texts in (first, second):
        if not (isinstance(texts, Sequence) and texts and all(isinstance(t, str) for t in texts)):
            raise InputError("text and text_pair must be one text each, or lists of equally many texts")
    if len(first) != len(second):
        raise InputError(f"text has {len(first)} texts and text_pair has {len(second)}: pass one of each per sample")
    return list(first), list(second)


def join_pairs(
    texts: list[str], pairs: list[str], places: Places | None, encoded: Any
) -> tuple[list[str], Places | None]:
    """Join each pair to one text; return (texts, (start, end) of each token in them)."""
    joined = [a + BETWEEN + b for a, b in zip(texts, pairs, strict=True)]
    if places is None:
        return joined, None
    moved = []
    for i, row in enumerate(places):
        by = (0, len(texts[i]) + len(BETWEEN))
        sides = encoded.sequence_ids(i)
        moved.append([(a, b) if k is None else (a + by[k], b + by[k]) for (a, b), k in zip(row, sides, strict=True)])
    return joined, moved

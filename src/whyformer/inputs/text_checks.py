"""Checks of texts, the part of a text that remains after truncation, and its unknown tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from whyformer.errors import InputError
from whyformer.inputs.pairs import BETWEEN

Offsets = list[list[tuple[int, int]]]


def check_texts(texts: list[str], name: str = "text") -> None:
    """Raise for empty texts and for lone surrogates, which are not valid text.

    Args:
        texts: a text of each sample.
        name: "text", or "text_pair" for the second texts of pairs.
    """
    for i, text in enumerate(texts):
        named = f"the {name}" if len(texts) == 1 else f"{name} number {i}"
        if not text.strip():
            raise InputError(f"{named} is empty")
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise InputError(f"{named} contains lone surrogates, which are not valid UTF-8 text")


def parts_read(texts: list[str], lengths: list[int], offsets: Offsets, encoded: Any) -> tuple[Any, Any]:
    """Return which parts of texts were not truncated, as the fields ``extent`` and ``skipped`` of
    :class:`~whyformer.explanation.features.Features`; (None, None) if no text was.

    Args:
        texts: the texts, or pairs that are joined to one text.
        lengths: number of characters of the first text of each pair, or of the text.
        offsets: (start, end) of each token in the texts.
        encoded: the output of the tokenizer.
    """
    if not any(encoding.overflowing for encoding in encoded.encodings):
        return None, None
    extents: list[tuple[int, int]] = []
    skipped: list[list[tuple[int, int]]] = []
    for i, (text, length, places) in enumerate(zip(texts, lengths, offsets, strict=True)):
        if not encoded.encodings[i].overflowing:
            extents.append((0, len(text)))
            skipped.append([])
            continue
        sides = encoded.sequence_ids(i)
        tokens = [[p for p, k in zip(places, sides, strict=True) if k == side and p[0] < p[1]] for side in (0, 1)]
        (first, last), *second = [(min(a for a, _ in side), max(b for _, b in side)) for side in tokens if side]
        gaps = [gap for begin, end in second for gap in ((last, length), (length + len(BETWEEN), begin))]
        extents.append((first, max([last, *(end for _, end in second)])))
        skipped.append([(a, b) for a, b in gaps if text[a:b].strip()])
    return extents, skipped if any(skipped) else None


def unknown(ids: Tensor, special: Tensor | None, tokenizer: Any) -> list[list[int]] | None:
    """Return the positions of each row's unknown tokens ([UNK]); None if there are none."""
    unk = getattr(tokenizer, "unk_token_id", None)
    if not isinstance(unk, int) or ids.dim() != 2:
        return None
    matches = ids == unk if special is None else (ids == unk) & ~special
    return [row.nonzero().flatten().tolist() for row in matches] if bool(matches.any()) else None

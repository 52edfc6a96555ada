"""Checks of texts, the part of a text that remains after truncation, and its unknown tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from whyformer.errors import InputError


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


def extent(texts: list[str], offsets: list[list[tuple[int, int]]], encoded: Any) -> list[tuple[int, int]] | None:
    """Return (start, end) of the part of each text that was not truncated; None if no text was."""
    if not any(encoding.overflowing for encoding in encoded.encodings):
        return None
    parts = []
    for text, places, encoding in zip(texts, offsets, encoded.encodings, strict=True):
        starts, ends = zip(*((a, b) for a, b in places if a < b), strict=True)
        parts.append((min(starts), max(ends)) if encoding.overflowing else (0, len(text)))
    return parts


def unknown(ids: Tensor, special: Tensor | None, tokenizer: Any) -> list[list[int]] | None:
    """Return the positions of each row's unknown tokens ([UNK]); None if there are none."""
    unk = getattr(tokenizer, "unk_token_id", None)
    if not isinstance(unk, int) or ids.dim() != 2:
        return None
    matches = ids == unk if special is None else (ids == unk) & ~special
    return [row.nonzero().flatten().tolist() for row in matches] if bool(matches.any()) else None

"""What a tokenizer kept of a text: the part that was not cut off, and the tokens that stand for nothing it knows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from whyformer.errors import InputError


def check_texts(texts: list[str]) -> None:
    """Refuse what is empty or no text at all, such as half of a character."""
    for i, text in enumerate(texts):
        name = "the text" if len(texts) == 1 else f"text number {i}"
        if not text.strip():
            raise InputError(f"{name} is empty")
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise InputError(f"{name} holds bytes that are no UTF-8 text (lone surrogates)")


def extent(texts: list[str], offsets: list[list[tuple[int, int]]], encoded: Any) -> list[tuple[int, int]] | None:
    """The part of each text that was not cut off, or None where nothing was."""
    if not any(encoding.overflowing for encoding in encoded.encodings):
        return None
    found = []
    for text, own, encoding in zip(texts, offsets, encoded.encodings, strict=True):
        begins, ends = zip(*((a, b) for a, b in own if a < b), strict=True)
        found.append((min(begins), max(ends)) if encoding.overflowing else (0, len(text)))
    return found


def unknown(ids: Tensor, special: Tensor | None, tokenizer: Any) -> list[list[int]] | None:
    """Places of the tokens that stand for what the tokenizer has no token for."""
    own = getattr(tokenizer, "unk_token_id", None)
    if not isinstance(own, int) or ids.dim() != 2:
        return None
    found = ids == own if special is None else (ids == own) & ~special
    return [row.nonzero().flatten().tolist() for row in found] if bool(found.any()) else None

"""The text of each token: what it adds to the text before it, spaces and special tokens included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_BEFORE = 6  # tokens that are decoded with each one: spaces and characters of several tokens depend on those before


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token, so that together they are the whole text.

    A character of several tokens (bytes) stands in the last of them, and the others are empty. Without a tokenizer the
    numbers themselves.
    """
    if tokenizer is None:
        return [f"{' ' if i else ''}{number}" for i, number in enumerate(ids)]
    found = []
    for i in range(len(ids)):
        low = max(0, i - _BEFORE)
        before, whole = _decoded(tokenizer, ids[low:i]), _decoded(tokenizer, ids[low : i + 1])
        shared = next((k for k, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(before))
        found.append(whole[min(shared, len(whole)) :])
    return found


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    text = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False) if ids else ""
    return str(text).rstrip("\ufffd")

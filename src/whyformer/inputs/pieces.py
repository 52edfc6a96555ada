"""The text that each token adds to the text before it, spaces and special tokens included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whyformer.explanation.units import UNFINISHED

_BEFORE = 6  # preceding tokens decoded with each token: spaces and multi-token characters depend on them


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the text of each token; joined, they are the whole text.

    A character that several tokens (bytes) encode belongs to the last of them, and the others are empty; at the end of
    the text it may be unfinished (U+FFFD). Without a tokenizer, the text is the id.
    """
    if tokenizer is None:
        return [f"{' ' if i else ''}{number}" for i, number in enumerate(ids)]
    texts = []
    for i in range(len(ids)):
        low = max(0, i - _BEFORE)
        before, whole = _decoded(tokenizer, ids[low:i]).rstrip(UNFINISHED), _decoded(tokenizer, ids[low : i + 1])
        whole = whole.rstrip(UNFINISHED) if i + 1 < len(ids) else whole
        shared = next((k for k, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(before))
        texts.append(whole[min(shared, len(whole)) :])
    return texts


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    text = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False) if ids else ""
    return str(text)

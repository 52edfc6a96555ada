"""Texts: checks, pairs that a model reads as one input, the part left after truncation, and the text of each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from whyformer.errors import InputError
from whyformer.explanation.units import UNFINISHED

BETWEEN = " | "
"""Separator between the two texts of a pair, such as premise and hypothesis, when they are shown as one."""

Offsets = list[list[tuple[int, int]]]
_BEFORE = 6  # preceding tokens decoded with each token: spaces and multi-token characters depend on them


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
    texts: list[str], pairs: list[str], places: Offsets | None, encoded: Any
) -> tuple[list[str], Offsets | None]:
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
        before, after = _decoded(tokenizer, ids[low:i]).rstrip(UNFINISHED), _decoded(tokenizer, ids[low : i + 1])
        after = after.rstrip(UNFINISHED) if i + 1 < len(ids) else after
        shared = next((k for k, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
        texts.append(after[min(shared, len(after)) :])
    return texts


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    text = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False) if ids else ""
    return str(text)

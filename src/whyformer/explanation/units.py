"""Group tokens into words, sentences and turns of a conversation.

For every method, the score of a unit is the sum of its tokens' scores.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whyformer.explanation.features import Features

UNITS = ("token", "word", "sentence", "turn")
UNFINISHED = "\ufffd"  # the replacement character, for a character of which some bytes are missing
# Scripts written without spaces between words: each token is a word.
_UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "IDEOGRAPHIC", "THAI", "LAO", "KHMER", "MYANMAR")
# Vowels of Thai and Lao that are letters and belong to the consonant before or after them, and Japanese voicing marks.
_AFTER_A_LETTER, _BEFORE_A_LETTER = "ะาำๅະາຳﾞﾟ", "เแโใไເແໂໃໄ"
_HALVES_OF_FLAGS = "".join(map(chr, range(0x1F1E6, 0x1F200)))
# After a sentence mark and a space, or a line break. A full stop after a number is not an end: it may number an item.
_SENTENCE = re.compile(r"(?<![\s\d][.])(?<=[.!?…])[\"')\]]*\s+|\n+|(?<=[。！？])")


def unit_scores(scores: Any, units: Iterable[Iterable[int]]) -> list[Any]:
    """Sum scores ``[..., N]`` over the tokens of each unit, to ``[...]`` for each.

    Args:
        scores: an array or a tensor.
        units: token indices of each unit.
    """
    return [scores[..., list(places)].sum(-1) for places in units]


def word_groups(text: str, offsets: list[tuple[int, int]]) -> list[tuple[int, int, list[int]]]:
    """Return (begin, end, token indices) of each word; begin and end are character offsets."""
    groups: list[tuple[int, int, list[int]]] = []
    for place, (begin, end) in enumerate(offsets):
        # Byte-level tokenizers count the space before a word as part of its token.
        while begin < end and text[begin].isspace():
            begin += 1
        if begin >= end:
            continue
        if groups and _continues(text, groups[-1][1], begin):
            first, last, places = groups.pop()
            groups.append((first, max(last, end), [*places, place]))
        else:
            groups.append((begin, end, [place]))
    return groups


def shown_groups(features: Features, tokens: int, sample: int) -> list[tuple[int, int, list[int]]]:
    """Return :func:`word_groups` of a sample without its special tokens.

    Without offsets or a text, each token is a word with the character offsets (0, 0).

    Args:
        features: features of the batch.
        tokens: number of tokens.
        sample: index of the sample.
    """
    special = frozenset(features.special[sample] if features.special is not None else ())
    if features.offsets is None or features.texts is None:
        return [(0, 0, [i]) for i in range(tokens) if i not in special]
    groups = word_groups(features.texts[sample], features.offsets[sample])
    groups = [(begin, end, [i for i in places if i not in special]) for begin, end, places in groups]
    return [group for group in groups if group[2]]


def _continues(text: str, end: int, begin: int) -> bool:
    """Return True if a token that begins at ``begin`` continues the word that ends at ``end``."""
    if begin != end:
        return begin < end
    last, after = text[end - 1], text[begin]
    stacks = unicodedata.name(last, "").endswith(("VIRAMA", "COENG"))  # they write the next consonant below
    if _extends(after) or last == "\u200d" or last in _BEFORE_A_LETTER or (stacks and after.isalnum()):
        return True
    base = next((text[i] for i in range(end - 1, -1, -1) if not _extends(text[i])), last)
    if after in _HALVES_OF_FLAGS:
        return (end - len(text[:end].rstrip(_HALVES_OF_FLAGS))) % 2 == 1
    return base.isalnum() and after.isalnum() and not (_unspaced(base) or _unspaced(after))


def _extends(character: str) -> bool:
    """Return True if a character belongs to the one before it: a combining mark, a skin tone of an emoji, a vowel that
    is written after its consonant, or an invisible character other than the zero-width space."""
    kind = unicodedata.category(character)
    invisible = kind == "Cf" and character != "\u200b"
    return kind[0] == "M" or invisible or "\U0001f3fb" <= character <= "\U0001f3ff" or character in _AFTER_A_LETTER


def _unspaced(character: str) -> bool:
    return unicodedata.name(character, "").startswith(_UNSPACED)


def words_of(pieces: Sequence[str], breaks: Collection[int]) -> list[tuple[int, int]]:
    """Return the half-open token range of each word; whitespace belongs to the word before it.

    Args:
        pieces: text of each token.
        breaks: indices of tokens that always begin a word.
    """
    text, offsets = joined(pieces)
    starts = {places[0] for _, _, places in word_groups(text, offsets)} | set(breaks)
    return ranges(starts, len(pieces))


def sentences_of(pieces: Sequence[str], breaks: Collection[int]) -> list[tuple[int, int]]:
    """Return the half-open token range of each sentence or line; see :func:`words_of`."""
    text, offsets = joined(pieces)
    ends = sorted({match.end() for match in _SENTENCE.finditer(text)})
    starts, next_end = set(breaks), 0
    for token, (begin, end) in enumerate(offsets):
        while begin < end and text[begin].isspace():
            begin += 1
        while next_end < len(ends) and ends[next_end] <= begin < end:
            starts.add(token)
            next_end += 1
    return ranges(starts, len(pieces))


def joined(pieces: Sequence[str]) -> tuple[str, list[tuple[int, int]]]:
    """Join the texts of tokens, and return the text with the (start, end) offsets of each token.

    A token without text is a byte of the character that the next tokens complete, and has its offsets. At the end of
    the text, the character is unfinished (U+FFFD).
    """
    text, offsets, cursor = "".join(pieces), [], 0
    text += UNFINISHED if pieces and not pieces[-1] else ""
    for piece in pieces:
        offsets.append((cursor, min(cursor + (len(piece) or 1), len(text))))
        cursor += len(piece)
    return text, offsets


def ranges(starts: Collection[int], count: int) -> list[tuple[int, int]]:
    """Return the half-open ranges that begin at 0 and at each of ``starts``, and end at ``count``."""
    bounds = [*sorted({0, *starts}), count]
    return [(a, b) for a, b in pairwise(bounds) if a < b]

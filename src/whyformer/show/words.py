"""What is written beside a map: words made of tokens, names of targets, and text that is safe to print."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from whyformer.explanation.result import Explanation

# Scripts written without spaces between words: a token there stays by itself.
_UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "IDEOGRAPHIC", "THAI", "LAO", "KHMER", "MYANMAR")
_BIDI_CONTROLS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_PADDING = ("[PAD]", "<pad>", "<PAD>", "<|endoftext|>", "<|pad|>")


@dataclass(frozen=True)
class Word:
    """A stretch of the sentence that is coloured as one.

    Attributes:
        text: as it stands in the sentence, or the token where the sentence is not known.
        score: the score of its tokens with the largest magnitude, with its sign.
        parts: (token, score) of each of its tokens.
        gap: what stands between the word before and this one.
    """

    text: str
    score: float
    parts: tuple[tuple[str, float], ...]
    gap: str


def array(tensor: Any) -> np.ndarray[Any, Any]:
    """A tensor of any floating type as a float64 array (numpy knows no bfloat16)."""
    result: np.ndarray[Any, Any] = tensor.detach().double().cpu().numpy()
    return result


def words(e: Explanation, sample: int = 0) -> tuple[list[Word], str]:
    """(words of a sample in order, text after the last one); tokens become words where the offsets allow it.

    Without offsets or sentence each token is a word of its own, and padding at the end is left out.
    """
    scores = array(e.scores[sample]).tolist()
    tokens = e.tokens[sample] if e.tokens is not None else [str(i) for i in range(len(scores))]
    if e.offsets is None or e.texts is None:
        count = len(tokens)
        while count and tokens[count - 1] in _PADDING and scores[count - 1] == 0:
            count -= 1
        pairs = list(zip(tokens, scores, strict=True))[:count]
        return [Word(t, s, ((t, s),), " " if i else "") for i, (t, s) in enumerate(pairs)], ""
    return _merge(e.texts[sample], tokens, e.offsets[sample], scores)


def _merge(text: str, tokens: list[str], offsets: list[tuple[int, int]], scores: list[float]) -> tuple[list[Word], str]:
    groups: list[tuple[int, int, list[tuple[str, float]]]] = []
    for token, (begin, end), score in zip(tokens, offsets, scores, strict=True):
        # Byte-level tokenizers count the space before a word as part of its token.
        while begin < end and text[begin].isspace():
            begin += 1
        if begin >= end:
            continue
        if groups and _continues(text, groups[-1][1], begin):
            first, last, parts = groups.pop()
            groups.append((first, max(last, end), [*parts, (token, score)]))
        else:
            groups.append((begin, end, [(token, score)]))
    made, cursor = [], 0
    for begin, end, parts in groups:
        strongest = max((s for _, s in parts), key=abs)
        made.append(Word(text[begin:end], strongest, tuple(parts), text[cursor:begin]))
        cursor = end
    return made, text[cursor:]


def _continues(text: str, end: int, begin: int) -> bool:
    """Whether a token that begins at ``begin`` belongs to the word that ended at ``end``."""
    if begin != end:
        return begin < end
    before, after = text[end - 1], text[begin]
    if unicodedata.category(after).startswith("M") or after == "\u200d" or before == "\u200d":
        return True
    return before.isalnum() and after.isalnum() and not (_unspaced(before) or _unspaced(after))


def _unspaced(character: str) -> bool:
    return unicodedata.name(character, "").startswith(_UNSPACED)


def right_to_left(text: str) -> bool:
    """Whether the first character with a direction runs from right to left (Hebrew, Arabic ...)."""
    for character in text:
        kind = unicodedata.bidirectional(character)
        if kind in ("L", "R", "AL"):
            return kind != "L"
    return False


def visible(text: str, keep: str = "") -> str:
    r"""Text in which control characters, lone surrogates and overrides of direction are written out, as ``\x1b``.

    So a token can neither move the cursor nor reorder what stands around it. Text with nothing to see at all, such as
    a zero-width space, is written out too. ``keep`` names characters left as they are.
    """
    shown = "".join(c if c in keep or not _hidden(c) else _escape(c) for c in text)
    if text and all(unicodedata.category(c) in ("Cf", "Mn", "Me") for c in shown):
        return "".join(map(_escape, shown))
    return shown


def _hidden(character: str) -> bool:
    return character in _BIDI_CONTROLS or unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def target_name(e: Explanation, sample: int = 0) -> str:
    """What is explained, in words: the class's name, "class 7" where it has none, "any class" for maps of no class."""
    if e.diagnostics.get("class_specific") is False:
        return "any class"
    index = int(e.target[sample])
    name = e.target_names[sample] if e.target_names is not None else e.label(index)
    return visible(f"class {name}" if name == str(index) and index not in (e.labels or {}) else name)


def probability(e: Explanation, sample: int = 0) -> float | None:
    """Probability of the target's class; None for a target that is no class, and for class-agnostic maps."""
    index = int(e.target[sample])
    named = e.target_names is None or e.target_names[sample] == e.label(index)
    if index < 0 or not named or e.diagnostics.get("class_specific") is False:
        return None
    return float(e.probabilities()[sample, index])


def heading(e: Explanation, sample: int = 0) -> str:
    """Name of the target and its probability, such as ``tabby 83.1%``."""
    share = probability(e, sample)
    return target_name(e, sample) + ("" if share is None else f"  {100 * share:.1f}%")


def short(text: str, limit: int) -> str:
    """Text cut to at most ``limit`` characters, with an ellipsis."""
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


def figure_of(number: float) -> str:
    """A score in four significant digits."""
    return "0" if number == 0 else f"{number:.4g}"

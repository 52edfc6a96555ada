"""What is written beside a map: words made of tokens, names of targets, and text that is safe to print."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from whyformer.errors import InputError
from whyformer.explanation.units import shown_groups, unit_scores
from whyformer.explanation.warnings import counted, of_input, unread_parts
from whyformer.show import colours
from whyformer.show.colours import array, has_sign

if TYPE_CHECKING:
    from whyformer.explanation.result import Explanation

_BIDI_CONTROLS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
PART = "part of several inputs"
"""The name among the diagnostics of [which of several inputs this is, its share of all |scores|], while it is drawn."""
_PADDING = ("[PAD]", "<pad>", "<PAD>", "<|endoftext|>", "<|pad|>")


@dataclass(frozen=True)
class Word:
    """A stretch of the sentence that is coloured as one.

    Attributes:
        text: as it stands in the sentence, or the token where the sentence is not known.
        score: the sum of its tokens' scores.
        unit: the score on the scale of the map, -1 to 1.
        parts: (token, score) of each of its tokens. places: their places in the sequence of tokens.
        gap: what stands between the word before and this one.
        signed: whether the map's scores have a sign; unknown: whether the model has no token for it ([UNK]).
    """

    text: str
    score: float
    unit: float
    parts: tuple[tuple[str, float], ...]
    places: tuple[int, ...]
    gap: str
    signed: bool = True
    unknown: bool = False

    @property
    def claim(self) -> str:
        """What its colour says: "for", "against" or "mattered"."""
        return "mattered" if not self.signed else "against" if self.unit < 0 else "for"

    @property
    def value(self) -> str:
        """The score, in words."""
        return figure_of(self.score)

    @property
    def sum(self) -> str:
        """Its tokens with their scores; nothing for a word of one token."""
        return " + ".join(f"{t} ({figure_of(s)})" for t, s in self.parts) if len(self.parts) > 1 else ""

    @property
    def tip(self) -> str:
        """What is said of it where the pointer rests on it."""
        return f"{self.value} · {self.sum or self.text}{' · unknown to the model' if self.unknown else ''}"


@dataclass(frozen=True)
class Unread:
    """A part of a text that was cut off before the model saw it; ``said`` is how long it is, in words."""

    text: str
    said: str
    before: bool


def words(e: Explanation, sample: int = 0) -> tuple[list[Word], str]:
    """(words of a sample in order, text after the last one); tokens become words where the offsets allow it.

    Neither what the model did not read (:func:`unread`) nor special tokens (:func:`folded`) are among them. Without
    offsets or sentence each token is a word of its own, and padding at the end is left out.
    """
    scores = array(e.scores[sample])
    odd = frozenset(e.features.unknown[sample] if e.features.unknown is not None else ())
    tokens = e.tokens[sample] if e.tokens is not None else [str(i) for i in range(len(scores))]
    offsets = [(0, 0)] * len(tokens) if e.offsets is None else e.offsets[sample]
    if not len(tokens) == len(offsets) == len(scores):
        raise InputError(f"{len(tokens)} tokens, {len(offsets)} offsets and {len(scores)} scores do not fit together")
    scale = colours.scale_of(e, sample)

    def word(text: str, places: list[int], gap: str) -> Word:
        parts, score = tuple((tokens[i], float(scores[i])) for i in places), float(unit_scores(scores, [places])[0])
        unit = float(scale.unit(np.array(score)))
        return Word(text, score, unit, parts, tuple(places), gap, scale.signed, not odd.isdisjoint(places))

    groups = shown_groups(e.features, len(scores), sample)
    if e.offsets is None or e.texts is None:
        while groups and tokens[at := groups[-1][2][0]] in _PADDING and scores[at] == 0:
            groups.pop()
        return [word(tokens[own[0]], own, " " if i else "") for i, (_, _, own) in enumerate(groups)], ""
    text, made = e.texts[sample], []
    cursor, stop = (0, len(text)) if e.features.extent is None else e.features.extent[sample]
    for begin, end, places in groups:
        made.append(word(text[begin:end], places, text[cursor:begin]))
        cursor = end
    return made, text[cursor:stop]


def folded(e: Explanation, sample: int = 0) -> Word | None:
    """What the special tokens of a sample, and others that belong to no word (line breaks), hold together, as
    ``special tokens 12 %``: Σ |score| of them, of that of all tokens. None where they hold nothing.

    The score is their sum, so that with those of all words it makes the sum of all tokens. No share is given where the
    scores hold a 1 for the token at which the target is read (:attr:`whyformer.methods.registry.Method.identity`).
    """
    scores = array(e.scores[sample])
    in_words = {i for _, _, places in shown_groups(e.features, len(scores), sample) for i in places}
    places = [i for i in range(len(scores)) if i not in in_words and scores[i]]
    if e.level != "token" or not places:
        return None
    special = frozenset(e.special[sample] if e.special is not None else ())
    said = "special tokens" if special.issuperset(places) else "tokens outside of words"
    share = float(np.abs(scores[places]).sum() / np.abs(scores).sum())
    said = share_of(said, share, e.diagnostics.get("identity") is True)
    names = e.tokens[sample] if e.tokens is not None else [str(i) for i in range(len(scores))]
    parts = tuple((names[i], float(scores[i])) for i in places)
    return Word(said, float(scores[places].sum()), 0.0, parts, tuple(places), " ", has_sign(e))


def share_of(name: str, share: float, left_out: bool = False) -> str:
    """``special tokens 12 %``: how much of all |score| some tokens hold; "left out" where no share is given."""
    return f"{name} left out" if left_out else f"{name} {100 * share:.0f} %" if share >= 0.01 else f"{name} < 1 %"


def unread(e: Explanation, sample: int = 0) -> list[Unread]:
    """What was cut off before the model saw it; it has no score, which is not the same as a score of 0."""
    if e.texts is None or e.features.extent is None:
        return []
    text, (begin, end) = e.texts[sample], e.features.extent[sample]
    parts = unread_parts(text, begin, end)
    return [Unread(p, f"{counted(p, text)} the model did not read", text[:begin] == p) for p in parts]


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


def agnostic(e: Explanation) -> bool:
    """Whether the map is the same whatever class is asked for."""
    return e.diagnostics.get("class_specific") is False


def measured(e: Explanation) -> dict[str, Any] | None:
    """How far the map of one sample may be believed, where that was measured and noted in it (Trust.noted_in)."""
    found = e.diagnostics.get("trust")
    return found[0] if found else None


def claims(e: Explanation) -> tuple[str, str]:
    """What the colours at the two ends of a map's colour bar say, in words."""
    low, high = ends(e)
    if not low:
        return "", f"{high} (no sign)"
    return low, high if agnostic(e) else f"{high} {target_name(e)}"


def ends(e: Explanation) -> tuple[str, str]:
    """:func:`claims` without the class, where a heading names it."""
    if colours.scale_of(e).signed:
        return ("below 0", "above 0") if agnostic(e) else ("against", "for")
    return "", "mattered"


def notes(explanations: Iterable[Explanation]) -> list[str]:
    """What is to be known of the inputs of some explanations, each once: what was done to them, what was not read.

    And that maps are drawn smoothed.
    """
    said = []
    for e in explanations:
        if sigma := e.diagnostics.get("smoothed"):
            said.append(f"note: maps of single pixels are smoothed here (σ {sigma:.3g}); smooth=0 draws each")
        done = e.diagnostics.get("input") or [[]]
        said += [f"note: {line}" for line in done[0]] + [f"warning: {line}" for line in of_input(e.features, 0)]
    return [visible(line) for line in dict.fromkeys(said)]


def doubts(e: Explanation) -> list[str]:
    """What speaks against the map of one sample itself: its warnings without those that are about the input."""
    found = measured(e)
    known = of_input(e.features, 0)
    return [line for line in (found["warnings"] if found else e.warnings) if line not in known]


def made_by(e: Explanation) -> str:
    """The method that made the map: where ``auto`` was asked for, the one that it took."""
    taken = e.diagnostics.get("auto")
    found = taken.get("method") if isinstance(taken, Mapping) else None
    return found if isinstance(found, str) else e.method


def method_name(e: Explanation) -> str:
    """The method as it is written above a map: ``gae``, or ``attnlrp (share=0.8) · chosen automatically``. Of a model
    of several inputs, which input this is and what it holds of all scores: ``gae · pixel_values 63 %``."""
    name = e.method
    if made_by(e) != e.method:
        named = e.diagnostics["auto"].get("name")
        name = f"{named if isinstance(named, str) else made_by(e)} · chosen automatically"
    return f"{name} · {e.input} {100 * e.diagnostics[PART][1]:.0f} %" if is_part(e) else name


def is_part(e: Explanation) -> bool:
    """Whether this is of one of several inputs of a model."""
    return PART in e.diagnostics


def is_further(e: Explanation) -> bool:
    """Whether this is of a further input of a model, whose first one is shown before it."""
    return is_part(e) and e.diagnostics[PART][0] > 0


def asides(e: Explanation) -> list[str]:
    """What a reader of one map is to know of how it was made: what ``affinity`` does."""
    spread = e.diagnostics.get("affinity")
    return [spread] if isinstance(spread, str) else []


def remarks(explanations: Iterable[Explanation]) -> list[str]:
    """What was measured of several explanations and their warnings, each once, safe to print, with the map's name."""
    shown = list(explanations)
    said = []
    for e in shown:
        found, name = measured(e), f"{method_name(e)}, {target_name(e)}: " if len(shown) > 1 else ""
        said += [f"note: {method_name(e) + ': ' if len(shown) > 1 else ''}{line}" for line in asides(e)]
        if found:
            said.append(f"{name}measured for {followed(e, found)}: {found['verdict']}")
        said += [f"warning: {line if found else name + line}" for line in doubts(e)]
    return [visible(line) for line in dict.fromkeys(said)]


def target_name(e: Explanation, sample: int = 0) -> str:
    """What is explained, in words: the class's name, "class 7" where it has none, "any class" for maps of no class."""
    if agnostic(e):
        return "any output" if e.numeric else "any class"
    index = int(e.target[sample])
    name = e.target_names[sample] if e.target_names is not None else e.label(index)
    return visible(f"class {name}" if name == str(index) and index not in (e.labels or {}) else name)


def values(e: Explanation, sample: int = 0) -> list[tuple[str, float]]:
    """(name, value) of what the model gives where that is numbers and no classes: a regression, a target of one's own.

    The number that is explained has the target's name.
    """
    if not e.numeric:
        return []
    names = {i: e.label(i) for i in range(e.logits.shape[-1])}
    if e.target_names is not None and int(e.target[sample]) in names:
        names[int(e.target[sample])] = e.target_names[sample]
    return [(visible(name), float(e.logits[sample, i])) for i, name in names.items()]


def value(e: Explanation, sample: int = 0) -> float | None:
    """The number that is explained; None for a class, and for a target that is none of the model's outputs."""
    index = int(e.target[sample])
    return float(e.logits[sample, index]) if e.numeric and 0 <= index < e.logits.shape[-1] else None


def followed(e: Explanation, found: Mapping[str, Any]) -> str:
    """What was followed when a map was measured: a class, or the number that a regression gives."""
    if value(e) is None or e.target_names is None:
        return e.label(found["followed"])
    return e.target_names[0]


def probability(e: Explanation, sample: int = 0) -> float | None:
    """Probability of the target's class; None for a target that is no class, and for class-agnostic maps."""
    index = int(e.target[sample])
    named = e.target_names is None or e.target_names[sample] == e.label(index)
    return e.probability(index, sample) if named and not agnostic(e) else None


def heading(e: Explanation, sample: int = 0, limit: int | None = None) -> str:
    """The question that a map answers, ``Why “tabby”? 83.1 %``, with the probability of the class, or the value of a
    number: ``Why “the output”? 0.339``. A map of no class is named as it is, ``any class``.

    Args:
        limit: so many characters at most: the name is cut, never the figure.
    """
    share, number = probability(e, sample), None if agnostic(e) else value(e, sample)
    after = "" if number is None else f" {figure_of(number)}"
    after = after if share is None else f" {100 * share:.1f} %"
    name = target_name(e, sample)
    if agnostic(e):
        return name if limit is None else short(name, limit)
    return f"Why “{name if limit is None else short(name, max(4, limit - len('Why “”?' + after)))}”?{after}"


def short(text: str, limit: int) -> str:
    """Text cut to at most ``limit`` characters, with an ellipsis."""
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


def figure_of(number: float) -> str:
    """A score in four significant digits."""
    return "0" if number == 0 else f"{number:.4g}"

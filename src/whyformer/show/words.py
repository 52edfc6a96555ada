"""Text beside the map of a single sample: words merged from tokens, names of methods and targets, notes; all of it safe
to print."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whyformer.errors import InputError
from whyformer.explanation.display import actual_method
from whyformer.explanation.units import shown_groups, unit_scores
from whyformer.explanation.warnings import counted, of_input, unread_parts
from whyformer.show import colours
from whyformer.show.colours import array, has_sign

if TYPE_CHECKING:
    from whyformer.explanation.result import Explanation

_BIDI_CONTROLS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
ISOLATE = "\u2068\u2069"
"""Characters around a name that may run from right to left, so that it does not reorder the text around it."""
OPPOSITE = "opposite for"
"""Key of ``diagnostics`` while a text is drawn: the explanations of other targets whose scores are the negatives."""
INPUT_SHARE = "part of several inputs"
"""Key of ``diagnostics`` while several inputs are drawn: [number of the input, its share of all |scores|]."""
_UNREAD = "the model did not read"
_RUN = 4
_PADDING = ("[PAD]", "<pad>", "<PAD>", "<|endoftext|>", "<|pad|>")


@dataclass(frozen=True)
class Word:
    """A part of a text that has one score and one colour.

    Attributes:
        text: the word as the text has it, or the token where the text is not known.
        score: sum of its tokens' scores.
        unit: score on the scale of the map, -1 to 1.
        parts: (token, score) of each of its tokens. places: their positions in the sequence of tokens.
        gap: text between the previous word and this one.
        signed: True if scores of the map have a sign. unknown: True if the model has no token for the word ([UNK]).
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
    def hue(self) -> str:
        """The name of its colour in :data:`whyformer.show.colours.HUES`."""
        return colours.hue_of(self.unit, self.signed)

    @property
    def value(self) -> str:
        """The score in four significant digits."""
        return format_score(self.score)

    @property
    def sum(self) -> str:
        """Its tokens with their scores; empty for a word of one token."""
        return " + ".join(f"{t} ({format_score(s)})" for t, s in self.parts) if len(self.parts) > 1 else ""

    @property
    def tooltip(self) -> str:
        """Score and tokens, shown where the pointer rests on the word."""
        return f"{self.value} · {self.sum or self.text}{' · unknown to the model' if self.unknown else ''}"


@dataclass(frozen=True)
class TruncatedText:
    """A part of a text that was cut off before the model read it; ``label`` says how long it is."""

    text: str
    label: str
    before: bool


def words(e: Explanation) -> tuple[list[Word], str]:
    """Return (words of a single sample in order, text after the last word), with tokens merged into words.

    Truncated text (:func:`truncated_parts`) and special tokens (:func:`special_tokens`) are left out. Without offsets
    or text each token is a word, and padding at the end is left out.
    """
    scores = array(e.scores[0])
    unknown = frozenset(e.features.unknown[0] if e.features.unknown is not None else ())
    tokens = e.tokens[0] if e.tokens is not None else [str(i) for i in range(len(scores))]
    offsets = [(0, 0)] * len(tokens) if e.offsets is None else e.offsets[0]
    if not len(tokens) == len(offsets) == len(scores):
        raise InputError(f"{len(tokens)} tokens, {len(offsets)} offsets and {len(scores)} scores do not fit together")
    scale = colours.scale_of(e)

    def word(text: str, places: list[int], gap: str) -> Word:
        parts, score = tuple((tokens[i], float(scores[i])) for i in places), float(unit_scores(scores, [places])[0])
        unit = float(scale.unit(np.array(score)))
        return Word(text, score, unit, parts, tuple(places), gap, scale.signed, not unknown.isdisjoint(places))

    groups = shown_groups(e.features, len(scores), 0)
    if e.offsets is None or e.texts is None:
        while groups and tokens[at := groups[-1][2][0]] in _PADDING and scores[at] == 0:
            groups.pop()
        return _without_runs([word(tokens[p[0]], p, " " if i else "") for i, (_, _, p) in enumerate(groups)]), ""
    text, merged = e.texts[0], []
    cursor, stop = (0, len(text)) if e.features.extent is None else e.features.extent[0]
    for begin, end, places in groups:
        merged.append(word(text[begin:end], places, _gap(e, cursor, begin)))
        cursor = end
    return _without_runs(merged), text[cursor:stop]


def _without_runs(all_words: list[Word]) -> list[Word]:
    """Return the words with each run of at least four equal words of score 0 as one word, ``<image> ×196``: those that
    hold the place of a picture."""
    merged = list[Word]()
    for text, group in groupby(all_words, key=lambda word: None if word.score else word.text):
        run = list(group)
        if text is None or len(run) < _RUN:
            merged += run
        else:
            places = tuple(i for word in run for i in word.places)
            merged.append(replace(run[0], text=f"{text} ×{len(run)}", places=places))
    return merged


def _gap(e: Explanation, begin: int, end: int) -> str:
    """Return the text between two words, with the length of a truncated part in its place."""
    assert e.texts is not None
    text, gap = e.texts[0], ""
    for a, b in [] if e.features.skipped is None else e.features.skipped[0]:
        if begin <= a and b <= end:
            gap, begin = f"{gap}{text[begin:a]} [{counted(text[a:b], text)} {_UNREAD}]", b
    return gap + text[begin:end]


def special_tokens(e: Explanation) -> Word | None:
    """Return special tokens, and others outside of words (line breaks), as one word; None if their scores are 0.

    Its text is their share of Σ |score|, ``special tokens 12 %``, and its score their sum: with the scores of all
    words it adds up to the sum over all tokens. The share is left out if the scores include a 1 for the token at which
    the target is read (:attr:`whyformer.methods.registry.Method.identity`).
    """
    scores = array(e.scores[0])
    in_words = {i for _, _, places in shown_groups(e.features, len(scores), 0) for i in places}
    places = [i for i in range(len(scores)) if i not in in_words and scores[i]]
    if e.level != "token" or not places:
        return None
    special = frozenset(e.special[0] if e.special is not None else ())
    name = "special tokens" if special.issuperset(places) else "tokens outside of words"
    share = float(np.abs(scores[places]).sum() / np.abs(scores).sum())
    text = share_of(name, share, e.diagnostics.get("identity") is True)
    names = e.tokens[0] if e.tokens is not None else [str(i) for i in range(len(scores))]
    parts = tuple((names[i], float(scores[i])) for i in places)
    return Word(text, float(scores[places].sum()), 0.0, parts, tuple(places), " ", has_sign(e))


def share_of(name: str, share: float, left_out: bool = False) -> str:
    """Format the share of Σ |score| on some tokens, ``special tokens 12 %``, or that they are left out."""
    return f"{name} left out" if left_out else f"{name} {100 * share:.0f} %" if share >= 0.01 else f"{name} < 1 %"


def truncated_parts(e: Explanation) -> list[TruncatedText]:
    """Return the parts of a text that the model did not read; they have no score, not a score of 0."""
    if e.texts is None or e.features.extent is None:
        return []
    text, (begin, end) = e.texts[0], e.features.extent[0]
    parts = unread_parts(text, begin, end)
    return [TruncatedText(p, f"{counted(p, text)} {_UNREAD}", text[:begin] == p) for p in parts]


def right_to_left(text: str) -> bool:
    """Return True if the first character with a direction runs from right to left (Hebrew, Arabic ...)."""
    for character in text:
        kind = unicodedata.bidirectional(character)
        if kind in ("L", "R", "AL"):
            return kind != "L"
    return False


def visible(text: str, keep: str = "") -> str:
    r"""Escape control characters, lone surrogates and direction overrides, as ``\x1b``.

    A token can then neither move the cursor nor reorder the text around it. Text without any visible character, such
    as a zero-width space, is escaped as well. Characters in ``keep`` are left as they are.
    """
    escaped = "".join(c if c in keep or not _hidden(c) else _escape(c) for c in text)
    if text and all(unicodedata.category(c) in ("Cf", "Mn", "Me") for c in escaped):
        return "".join(map(_escape, escaped))
    return escaped


def _hidden(character: str) -> bool:
    return character in _BIDI_CONTROLS or unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def position_name(e: Explanation, index: int) -> str:
    """Return the name of a patch or pixel: ``patch in row 0, column 3``."""
    shape = e.grid if e.level == "patch" else tuple(e.scores.shape[1:])
    if shape is None:
        return f"{e.level} {index}"
    return f"{e.level} in row {index // shape[1]}, column {index % shape[1]}"


def agnostic(e: Explanation) -> bool:
    """Return True if the map is the same for every class."""
    return e.diagnostics.get("class_specific") is False


def trust_figures(e: Explanation) -> dict[str, Any] | None:
    """Return the figures of ``whyformer.trust`` for a single sample; None if it was not run (``Trust.noted_in``)."""
    figures = e.diagnostics.get("trust")
    return figures[0] if figures else None


def legend_labels(e: Explanation) -> tuple[str, str]:
    """Return the meanings of the colours at both ends of the colour bar: ``("against", "for tabby")``."""
    low, high = bar_labels(e)
    if not low:
        return "", f"{high} (no sign)"
    return low, high if agnostic(e) else f"{high} {target_name(e)}"


def bar_labels(e: Explanation) -> tuple[str, str]:
    """:func:`legend_labels` without the class, where a heading names it."""
    if colours.scale_of(e).signed:
        return ("below 0", "above 0") if agnostic(e) else ("against", "for")
    return "", "mattered"


def input_notes(explanations: Iterable[Explanation]) -> list[str]:
    """Return notes on the inputs of explanations without repeats: processing, truncation, smoothing of the maps."""
    lines = []
    for e in explanations:
        if sigma := e.diagnostics.get("smoothed"):
            lines.append(f"note: maps of single pixels are smoothed here (σ {sigma:.3g}); smooth=0 turns this off")
        processing = e.diagnostics.get("input") or [[]]
        lines += [f"note: {line}" for line in processing[0]] + [f"warning: {line}" for line in of_input(e.features, 0)]
    return [visible(line) for line in dict.fromkeys(lines)]


def notes(explanations: Iterable[Explanation]) -> list[str]:
    """Return all lines below drawings of explanations: :func:`input_notes` and :func:`remarks`."""
    explanations = list(explanations)
    return [*input_notes(explanations), *remarks(explanations)]


def warnings_of(e: Explanation) -> list[str]:
    """Return the warnings of a single sample without those about its input."""
    figures = trust_figures(e)
    about_input = of_input(e.features, 0)
    return [line for line in (figures["warnings"] if figures else e.warnings) if line not in about_input]


def method_name(e: Explanation) -> str:
    """Return the title of the method: ``gae``, or ``attnlrp (share=0.8) · chosen automatically``. For one of several
    inputs its name and its share of all |scores| follow: ``gae · pixel_values 63 %``."""
    name = e.method
    if actual_method(e) != e.method:
        named = e.diagnostics["auto"].get("name")
        name = f"{named if isinstance(named, str) else actual_method(e)} · chosen automatically"
    return f"{name} · {input_share(e)}" if is_part(e) else name


def input_share(e: Explanation) -> str:
    """Return the name of one of several inputs with its share of all |scores|: ``pixel_values 63 %``."""
    return f"{e.input} {100 * e.diagnostics[INPUT_SHARE][1]:.0f} %"


def with_opposites(name: str, e: Explanation) -> str:
    """Return the name of a method, and for which targets its scores are the opposite: ``gae · opposite for “bad”``."""
    return " · opposite for ".join([name, *(f"“{target_name(other)}”" for other in opposites(e))])


def opposites(e: Explanation) -> list[Explanation]:
    """Return the explanations of other targets that are not drawn, because their scores are the negatives of these."""
    return list(e.diagnostics.get(OPPOSITE, ()))


def is_part(e: Explanation) -> bool:
    """Return True if this is the part of an explanation for one of several inputs."""
    return INPUT_SHARE in e.diagnostics


def is_further(e: Explanation) -> bool:
    """Return True if this is for the second or a later input of a model."""
    return is_part(e) and e.diagnostics[INPUT_SHARE][0] > 0


def method_notes(e: Explanation) -> list[str]:
    """Return notes on how the map was computed: the smoothing by ``affinity``."""
    spread = e.diagnostics.get("affinity")
    return [spread] if isinstance(spread, str) else []


def remarks(explanations: Iterable[Explanation]) -> list[str]:
    """Return notes, results of ``whyformer.trust`` and warnings of explanations without repeats, safe to print.

    Of several explanations each line names its map.
    """
    maps = [map_ for e in explanations for map_ in (e, *opposites(e))]
    lines = []
    for e in maps:
        figures, name = trust_figures(e), f"{method_name(e)}, {target_name(e)}: " if len(maps) > 1 else ""
        lines += [f"note: {method_name(e) + ': ' if len(maps) > 1 else ''}{line}" for line in method_notes(e)]
        if figures:
            measured = measured_target(e, figures)
            subject = "" if name and measured == target_name(e) else f"measured for {measured}: "
            lines.append(f"{name}{subject}{figures['verdict']}")
        lines += [f"warning: {line if figures else name + line}" for line in warnings_of(e)]
    return [visible(line) for line in dict.fromkeys(lines)]


def target_name(e: Explanation) -> str:
    """Return the name of the target: of its class, "class 7" without a label, "any class" for class-agnostic maps."""
    if agnostic(e):
        return "any output" if e.numeric else "any class"
    index = int(e.target[0])
    name = e.target_names[0] if e.target_names is not None else e.label(index)
    return visible(f"class {name}" if name == str(index) and index not in (e.labels or {}) else name)


def values(e: Explanation) -> list[tuple[str, float]]:
    """Return (name, value) of each output of a regression model; empty for a classifier.

    The output that is explained has the target's name.
    """
    if not e.numeric:
        return []
    names = {i: e.label(i) for i in range(e.logits.shape[-1])}
    if e.target_names is not None and int(e.target[0]) in names:
        names[int(e.target[0])] = e.target_names[0]
    return [(visible(name), float(e.logits[0, i])) for i, name in names.items()]


def predictions(e: Explanation, k: int = 5) -> list[tuple[str, str, float | None]]:
    """Return (name, formatted number, probability) of the k likeliest classes, or of the first k outputs of a
    regression, which have no probability."""
    if e.numeric:
        return [(name, format_score(number), None) for name, number in values(e)[:k]]
    best = [(visible(name), share) for _, name, _, share in e.top(0, k)]
    return [(name, percent(share), share) for name, share in best if share is not None]


def value(e: Explanation) -> float | None:
    """Return the output that is explained; None for a class, and for a target that is not an output of the model."""
    index = int(e.target[0])
    return float(e.logits[0, index]) if e.numeric and 0 <= index < e.logits.shape[-1] else None


def model_title(name: str) -> str:
    """Return the name of a model in a file that others may read: of the path of a folder its last part."""
    return visible(Path(name).name if Path(name).is_absolute() else name)


def measured_target(e: Explanation, figures: Mapping[str, Any]) -> str:
    """Return the name of the class, or of the regression output, that ``whyformer.trust`` measured."""
    if value(e) is None or e.target_names is None:
        return e.label(figures["followed"])
    return e.target_names[0]


def probability(e: Explanation) -> float | None:
    """Return the probability of the target's class; None for targets that are not a class and class-agnostic maps."""
    index = int(e.target[0])
    named = e.target_names is None or e.target_names[0] == e.label(index)
    return e.probability(index) if named and not agnostic(e) else None


def heading(e: Explanation, limit: int | None = None) -> str:
    """Return the question that a map answers with the probability of the class, ``Why “tabby”? 83.1 %``, or the
    value of an output, ``Why “the output”? 0.339``. For a class-agnostic map return ``any class``.

    Args:
        limit: largest number of characters; the name is cut, never the number.
    """
    share, number = probability(e), None if agnostic(e) else value(e)
    after = "" if number is None else f" {format_score(number)}"
    after = after if share is None else f" {percent(share)}"
    name = target_name(e)
    if agnostic(e):
        return name if limit is None else short(name, limit)
    name = name if limit is None else short(name, max(4, limit - len("Why “”?" + after)))
    if any(unicodedata.bidirectional(character) in ("R", "AL") for character in name):
        name = name.join(ISOLATE)
    return f"Why “{name}”?{after}"


def short(text: str, limit: int) -> str:
    """Cut text to at most ``limit`` characters, with an ellipsis."""
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


def percent(share: float) -> str:
    """Format a share (0 to 1), ``83.1 %``."""
    return f"{100 * share:.1f} %"


def format_score(number: float) -> str:
    """Format a score in four significant digits."""
    return "0" if number == 0 else f"{number:.4g}"

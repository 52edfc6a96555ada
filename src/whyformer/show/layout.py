"""Layout of several explanations: a section for each input, a row for each method, a column for each target."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

from whyformer.errors import InputError, check_type
from whyformer.explanation.display import format_settings
from whyformer.show import colours, words
from whyformer.show.words import agnostic, method_name, target_name, visible

if TYPE_CHECKING:
    from whyformer.explanation.result import Explanation


@dataclass(frozen=True)
class Section:
    """Explanations of an input; ``cells[row][column]`` is a single sample, or None.

    Attributes:
        methods: titles of the rows: the method, with the settings in which rows of the same method differ.
        targets: titles of the columns. A class-agnostic map is in one of them only.
    """

    methods: list[str]
    targets: list[str]
    cells: list[list[Explanation | None]]

    @property
    def explanations(self) -> list[Explanation]:
        """All explanations, row by row."""
        return [e for row in self.cells for e in row if e is not None]

    @property
    def first(self) -> Explanation:
        return self.explanations[0]

    @property
    def heads(self) -> list[Explanation]:
        """For each column an explanation that names its class, or else the first."""
        columns = ([e for e in column if e is not None] for column in zip(*self.cells, strict=True))
        return [next((e for e in column if not agnostic(e)), column[0]) for column in columns]

    @property
    def columns(self) -> list[tuple[Explanation, list[tuple[str, Explanation]]]]:
        """For each class (an explanation that names it, [(row title, explanation)]); class-agnostic maps last."""
        named = list(zip(self.methods, self.cells, strict=True))
        columns = [[(m, e) for m, row in named if (e := row[k]) is not None] for k in range(len(self.targets))]
        specific = [[(words.with_opposites(m, e), e) for m, e in rows if not agnostic(e)] for rows in columns]
        rest = [(m, e) for m, row in named for e in row if e is not None and agnostic(e)]
        return [(rows[0][1], rows) for rows in (*specific, rest) if rows]

    def by_column(self) -> list[Section]:
        """Return a section with a single column for each class (:attr:`columns`)."""
        return [
            Section([name for name, _ in rows], [target_name(named)], [[e] for _, e in rows])
            for named, rows in self.columns
        ]


def sections(
    explanations: Explanation | Iterable[Explanation],
    smooth: float | None = None,
    *,
    tolerance: float = 0.05,
) -> list[Section]:
    """Group explanations by input, method and target, each in order of appearance.

    Args:
        tolerance: difference, in parts of the largest score of each map, up to which two maps of a text count as
            opposite and are drawn once. Below 0.05, the colours of lines that are scaled separately look opposite.
    """
    groups: dict[Hashable, list[Explanation]] = {}
    for sample in samples(explanations):
        for e in by_input(sample, smooth):
            groups.setdefault((e.input if words.is_part(e) else None, input_of(e)), []).append(e)
    if not groups:
        raise InputError("there is no explanation to show")
    return [_section(group, tolerance) for group in groups.values()]


def samples(explanations: Explanation | Iterable[Explanation]) -> list[Explanation]:
    """Return the single samples of one explanation, or of several."""
    # an Explanation is iterable over its samples, too
    several: Any = [explanations] if hasattr(explanations, "scores") else explanations
    check_type("explanations", several, Iterable, "an Explanation, or a list of them")
    return [sample for e in several for sample in _checked(e)]


def _checked(e: Any) -> Any:
    if not hasattr(e, "scores"):
        raise InputError(f"this draws explanations, the results of whyformer.explain, not a {type(e).__name__}")
    return e


def prepared_samples(
    explanations: Explanation | Iterable[Explanation], smooth: float | None = None
) -> list[Explanation]:
    """Return the single samples of one explanation or several, each ready to draw (:func:`prepared`)."""
    return [prepared(sample, smooth) for sample in samples(explanations)]


def prepared_sample(e: Explanation, sample: int, smooth: float | None = None) -> Explanation:
    """Return a sample of an explanation, ready to draw (:func:`prepared`)."""
    return prepared(_checked(e)[sample], smooth)


def by_input(e: Explanation, smooth: float | None = None) -> list[Explanation]:
    """Return an explanation for each input of the model, ready to draw (:func:`prepared`), in the order of the inputs.

    Of several inputs each has its share of all |scores| in ``diagnostics``, which
    :func:`whyformer.show.words.method_name` shows, and a common scale: an input whose strongest word or patch is
    weaker than that of another is paler.

    Args:
        e: of a single sample.
    """
    if not e.parts:
        return [prepared(e, smooth)]
    parts = [e.part(name) for name in e.inputs]
    sizes = [float(part.scores.abs().sum()) for part in parts]
    strongest = [colours.strongest(part) for part in parts]
    automatic = {"auto": e.diagnostics["auto"]} if "auto" in e.diagnostics else {}
    drawn = []
    for number, (part, size, part_strongest) in enumerate(zip(parts, sizes, strongest, strict=True)):
        share = size / (sum(sizes) or 1.0)
        paler = max(strongest) / part_strongest if part_strongest else 1.0
        more = {words.INPUT_SHARE: [number, share], colours.PALER: paler}
        drawn.append(prepared(replace(part, diagnostics={**automatic, **part.diagnostics, **more}), smooth))
    return drawn


def prepared(e: Explanation, smooth: float | None = None) -> Explanation:
    """Prepare an explanation for drawing: name the segments of a sound, unroll a video, smooth scores of pixels.

    Args:
        smooth: see :class:`~whyformer.show.look.Look`. Smoothed scores are not smoothed twice.
    """
    if e.rate is not None and e.tokens is None:
        return e.over_time()
    e = smoothed(e, smooth) if e.level == "pixel" else e
    return e.unrolled() if e.frames is not None else e


def smoothed(e: Explanation, sigma: float | None = None) -> Explanation:
    """Convolve signed scores of pixels with a Gaussian: speckles of both signs are not readable.

    ``e.diagnostics["smoothed"]`` is σ: ``sigma``, or 1/64 of the shorter side (0 below 64 pixels).
    """
    from whyformer.explanation import views

    if "smoothed" in e.diagnostics or not colours.has_sign(e):
        return e
    shorter = min(e.scores.shape[-2:])
    sigma = (shorter / 64 if shorter >= 64 else 0.0) if sigma is None else float(sigma)
    scores = e.scores if sigma == 0 else views.gaussian_blur(e.scores, sigma)
    return replace(e, scores=scores, diagnostics={**e.diagnostics, "smoothed": sigma})


def input_of(e: Explanation) -> Hashable:
    """Return the identity of the input: the text, or the bytes of the picture or sound."""
    if e.texts is not None:
        return e.texts[0]
    if e.pictures is not None:
        return e.pictures.numpy().tobytes()
    if e.sounds is not None:
        return e.sounds.numpy().tobytes()
    if e.originals is not None and e.originals[0] is not None:
        return e.originals[0].tobytes()
    return tuple(e.tokens[0]) if e.tokens is not None else tuple(e.logits[0].tolist())


def method_names(explanations: Sequence[Explanation]) -> list[str]:
    """Return the title of each method, followed by the settings in which explanations of that method differ."""
    names = []
    for e in explanations:
        twins = [other.settings for other in explanations if other.method == e.method]
        differing = {k: v for k, v in e.settings.items() if any(str(twin.get(k)) != str(v) for twin in twins)}
        names.append(visible(f"{method_name(e)} ({format_settings(differing)})" if differing else method_name(e)))
    return names


def _section(group: list[Explanation], tolerance: float) -> Section:
    """Return rows by method and settings, columns by target; class-agnostic maps start at the first column."""
    rows: dict[tuple[str, str], list[Explanation]] = {}
    for e in group:
        rows.setdefault((e.method, json.dumps(e.settings, sort_keys=True, default=str)), []).append(e)
    targets = list(dict.fromkeys(target_name(e) for e in group if not agnostic(e)))
    cells: list[list[Explanation | None]] = []
    for row in rows.values():
        if agnostic(row[0]):
            cells.append(list(_distinct(row)))
            continue
        by_target: dict[str, Explanation] = {}
        for e in row:
            column = target_name(e)
            while column in by_target:  # same method, settings and target: both are shown
                column += " "
            by_target[column] = e
            targets += [] if column in targets else [column]
        maps = [by_target.get(t) for t in targets]
        cells.append(_without_opposites(maps, tolerance) if row[0].level == "token" else maps)
    wide = max(len(targets), *map(len, cells))
    targets += ["any class"] * (wide - len(targets))
    cells = [row + [None] * (wide - len(row)) for row in cells]
    return Section(method_names([row[0] for row in rows.values()]), targets, cells)


def _without_opposites(maps: Sequence[Explanation | None], tolerance: float) -> list[Explanation | None]:
    """Return the maps of a text with None instead of those whose scores are the negatives of an earlier map, as for the
    second of two classes; the earlier map holds them (:func:`whyformer.show.words.opposites`)."""
    remaining = list(maps)
    for i, j in combinations(range(len(remaining)), 2):
        first, e = remaining[i], remaining[j]
        if first is not None and e is not None and _opposite(first, e, tolerance):
            others = {words.OPPOSITE: [*words.opposites(first), e]}
            remaining[i] = replace(first, diagnostics={**first.diagnostics, **others})
            remaining[j] = None
    return remaining


def _opposite(e: Explanation, other: Explanation, tolerance: float) -> bool:
    """Return True if the scores, each divided by their largest, are each other's negatives up to a tolerance."""
    first, second = e.scores.double(), other.scores.double()
    if first.shape != second.shape or not bool(first.any()) or not bool(second.any()):
        return False
    return float((first / first.abs().max() + second / second.abs().max()).abs().max()) <= tolerance


def _distinct(maps: Sequence[Explanation]) -> list[Explanation]:
    """Return maps with different scores: a class-agnostic map was computed once for each class."""
    distinct: list[Explanation] = []
    for e in maps:
        twins = (other.scores for other in distinct if other.scores.shape == e.scores.shape)
        if not any(bool((e.scores == scores).all()) for scores in twins):
            distinct.append(e)
    return distinct

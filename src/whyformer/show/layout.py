"""Which explanation goes where when several are shown: one section an input, one row a method, one column a target."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from whyformer.errors import InputError
from whyformer.show import colours, words
from whyformer.show.words import agnostic, method_name, target_name, visible

if TYPE_CHECKING:
    from whyformer.explanation.result import Explanation


@dataclass(frozen=True)
class Section:
    """Explanations of one input; ``cells[row][column]`` is a single sample, or None where there is none.

    Attributes:
        methods: what the rows are called: the method, with the settings in which rows of one method differ.
        targets: what the columns are called. A map of no class is in one of them only.
    """

    methods: list[str]
    targets: list[str]
    cells: list[list[Explanation | None]]

    @property
    def first(self) -> Explanation:
        return next(e for row in self.cells for e in row if e is not None)

    @property
    def heads(self) -> list[Explanation]:
        """For each column an explanation that names its class, if there is one."""
        columns = ([e for e in column if e is not None] for column in zip(*self.cells, strict=True))
        return [next((e for e in column if not agnostic(e)), column[0]) for column in columns]

    @property
    def columns(self) -> list[tuple[Explanation, list[tuple[str, Explanation]]]]:
        """For each class (an explanation that names it; name and explanation of each row), then all of no class."""
        named = list(zip(self.methods, self.cells, strict=True))
        found = []
        for column in range(len(self.targets)):
            rows = [(m, e) for m, row in named if (e := row[column]) is not None and not agnostic(e)]
            found += [(rows[0][1], rows)] if rows else []
        rest = [(m, e) for m, row in named for e in row if e is not None and agnostic(e)]
        return found + ([(rest[0][1], rest)] if rest else [])


def sections(
    explanations: Explanation | Iterable[Explanation], smooth: float | None = None, *, alike: bool = False
) -> list[Section]:
    """Sort explanations (of any number of samples and inputs) by input, method and target, each in order of appearance.

    Args:
        alike: leave out a model's further inputs that are of another kind than the first (pictures beside a text).
    """
    groups: dict[Hashable, list[Explanation]] = {}
    for sample in samples(explanations):
        for e in by_input(sample, smooth):
            if not alike or (e.level == "token") == (sample.level == "token"):
                groups.setdefault((e.input if words.is_part(e) else None, input_of(e)), []).append(e)
    if not groups:
        raise InputError("there is no explanation to show")
    return [_section(group) for group in groups.values()]


def samples(explanations: Explanation | Iterable[Explanation]) -> list[Explanation]:
    """The single samples of one explanation, or of several."""
    # an Explanation is itself iterable (over its samples), so ask what makes it one
    found: Any = [explanations] if hasattr(explanations, "scores") else explanations
    return [sample for e in found for sample in e]


def listed(explanations: Explanation | Iterable[Explanation], smooth: float | None = None) -> list[Explanation]:
    """The single samples of one explanation or several, each as it is drawn (:func:`laid_out`)."""
    return [laid_out(sample, smooth) for sample in samples(explanations)]


def by_input(e: Explanation, smooth: float | None = None) -> list[Explanation]:
    """The explanations of each input of the model as they are drawn (:func:`laid_out`), that of the first one first.
    Where there are several, each is called by its input, with the share of all |scores| that it holds:
    :func:`whyformer.show.words.method_name`.

    Args:
        e: of one sample.
    """
    if not e.parts:
        return [laid_out(e, smooth)]
    parts = [e.part(name) for name in e.inputs]
    sizes = [float(part.scores.abs().sum()) for part in parts]
    shares = [size / (sum(sizes) or 1.0) for size in sizes]
    return [
        laid_out(replace(part, diagnostics={**part.diagnostics, words.PART: [number, share]}), smooth)
        for number, (part, share) in enumerate(zip(parts, shares, strict=True))
    ]


def laid_out(e: Explanation, smooth: float | None = None) -> Explanation:
    """As it is drawn: a sound by stretches that have a name, a video as its frames side by side, pixels smoothed.

    Args:
        smooth: see :class:`~whyformer.show.look.Look`. What has been smoothed is left as it is.
    """
    if e.rate is not None and e.tokens is None:
        return e.over_time()
    e = smoothed(e, smooth) if e.level == "pixel" else e
    return e.unrolled() if e.frames is not None else e


def smoothed(e: Explanation, sigma: float | None = None) -> Explanation:
    """Scores of single pixels with a sign, convolved with a Gaussian, because speckles of both signs show nothing.

    ``e.diagnostics["smoothed"]`` holds σ, which is ``sigma`` or 1/64 of the shorter side (0 below 64 pixels).
    """
    from whyformer.explanation import views

    if "smoothed" in e.diagnostics or not colours.has_sign(e):
        return e
    shorter = min(e.scores.shape[-2:])
    sigma = (shorter / 64 if shorter >= 64 else 0.0) if sigma is None else float(sigma)
    scores = e.scores if sigma == 0 else views.gaussian_blur(e.scores, sigma)
    return replace(e, scores=scores, diagnostics={**e.diagnostics, "smoothed": sigma})


def input_of(e: Explanation) -> Hashable:
    """What two explanations of one input have in common: the text, or the picture as the model saw it."""
    if e.texts is not None:
        return e.texts[0]
    if e.pictures is not None:
        return e.pictures.numpy().tobytes()
    if e.sounds is not None:
        return e.sounds.numpy().tobytes()
    if e.originals is not None:
        return e.originals[0].tobytes()
    return tuple(e.tokens[0]) if e.tokens is not None else tuple(e.logits[0].tolist())


def method_names(explanations: Sequence[Explanation]) -> list[str]:
    """Their methods, followed by the settings in which those of one method differ."""
    names = []
    for e in explanations:
        twins = [other.settings for other in explanations if other.method == e.method]
        differing = {k: v for k, v in e.settings.items() if any(str(twin.get(k)) != str(v) for twin in twins)}
        names.append(visible(f"{method_name(e)} ({written(differing)})" if differing else method_name(e)))
    return names


def written(settings: Mapping[str, Any]) -> str:
    """Settings as they would be written in a call."""
    return ", ".join(f"{k}={v}" for k, v in settings.items())


def _section(group: list[Explanation]) -> Section:
    """Rows by method and settings, columns by target; maps of no class stand once, from the first column on."""
    rows: dict[tuple[str, str], list[Explanation]] = {}
    for e in group:
        rows.setdefault((e.method, json.dumps(e.settings, sort_keys=True, default=str)), []).append(e)
    targets = list(dict.fromkeys(target_name(e) for e in group if not agnostic(e)))
    cells: list[list[Explanation | None]] = []
    for row in rows.values():
        if agnostic(row[0]):
            cells.append(list(_different(row)))
            continue
        by_target: dict[str, Explanation] = {}
        for e in row:
            column = target_name(e)
            while column in by_target:  # two explanations of one method, settings and target: both are shown
                column += " "
            by_target[column] = e
            targets += [] if column in targets else [column]
        cells.append([by_target.get(t) for t in targets])
    wide = max(len(targets), *map(len, cells))
    targets += ["any class"] * (wide - len(targets))
    cells = [row + [None] * (wide - len(row)) for row in cells]
    return Section(method_names([row[0] for row in rows.values()]), targets, cells)


def _different(maps: Sequence[Explanation]) -> list[Explanation]:
    """Those whose scores differ: a map of no class was made once for each class that was asked for."""
    found: list[Explanation] = []
    for e in maps:
        if not any(e.scores.shape == one.scores.shape and bool((e.scores == one.scores).all()) for one in found):
            found.append(e)
    return found

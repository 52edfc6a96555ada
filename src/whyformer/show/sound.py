"""Figures of sounds: the waveform, and below it a strip of scores over time for each method."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from whyformer.show import colours
from whyformer.show.colours import array
from whyformer.show.layout import Section
from whyformer.show.paper import Paper
from whyformer.show.typeface import fitted
from whyformer.show.words import heading, legend_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from whyformer.explanation.result import Explanation

_WIDTH, _LEFT, _RIGHT = 9.0, 1.7, 0.75  # inches: width of the page, left and right of the waveform
_HEAD, _WAVE, _STRIP, _AXIS, _GAP = 0.36, 0.8, 0.3, 0.4, 0.12
_POINTS = 1200  # columns of the wave's outline


def draw(paper: Paper, y: float, parts: list[Section]) -> tuple[float, float]:
    """Draw each sound under each target below the height y: the waveform, then a strip with a colour bar for each
    method, in seconds. Return the width, and the height below it."""
    for part in parts:
        for named, rows in part.columns:
            y = _column(paper, y, part, named, rows)
    return _WIDTH, y + 0.2


def _column(paper: Paper, y: float, part: Section, named: Explanation, rows: list[tuple[str, Explanation]]) -> float:
    """Draw a sound under one target, and return the height below it."""
    wide = _WIDTH - _LEFT - _RIGHT
    question = fitted(partial(heading, named), _WIDTH - 0.3, 10.5, "bold")
    paper.write(question, 0.15, y + _HEAD / 2, 10.5, weight="bold", va="center")
    y += _HEAD
    length = rows[0][1].scores.shape[1] / (rows[0][1].rate or 1)
    _wave(paper.axes(_LEFT, y, wide, _WAVE), part.first, length)
    y += _WAVE
    for i, (name, e) in enumerate(rows):
        y += _GAP
        scale = colours.scale_of(e)
        paper.write(fitted(name, _LEFT - 0.2, 8), 0.15, y + _STRIP / 2, 8, va="center", color=colours.SOFT)
        axes = paper.axes(_LEFT, y, wide, _STRIP)
        axes.set_axis_on()
        painted = colours.paint(scale.unit(array(e.scores[0])), scale.signed, None)[None]
        axes.imshow(painted, aspect="auto", interpolation="nearest", extent=(0, painted.shape[1] / e.rate, 0, 1))
        axes.set_xlim(0, length)
        axes.set_yticks([])
        axes.tick_params(length=2, pad=2, width=0.4, labelsize=6.5, labelbottom=i == len(rows) - 1)
        paper.bar(scale, None, (_LEFT + wide + 0.08, y, 0.08, _STRIP))
        y += _STRIP
    low, high = legend_labels(rows[0][1])
    favour, against = colours.HUES["for"], colours.HUES["against"]
    text = f"seconds · {f'{against.name}: {low}, {favour.name}: {high}' if low else high}"
    paper.write(fitted(text, _WIDTH - _LEFT, 6.5), _LEFT, y + 0.24, 6.5, va="top", color=colours.SOFT)
    return y + _AXIS


def _wave(axes: Axes, e: Explanation, length: float) -> None:
    """Draw the outline of the waveform: minimum and maximum of each of its segments."""
    assert e.sounds is not None
    wave: Any = array(e.sounds[0])
    rate, lasts = e.features.sampling_rate or len(wave) / length, (e.features.durations or [length])[0]
    wave = wave[: max(1, round(lasts * rate))]
    cuts = np.array_split(wave, min(_POINTS, len(wave)))
    times = np.linspace(0, lasts, len(cuts))
    axes.fill_between(times, [c.min() for c in cuts], [c.max() for c in cuts], color="#5b6b7b", linewidth=0.4)
    axes.set_xlim(0, length)

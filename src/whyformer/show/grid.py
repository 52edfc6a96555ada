"""A generated text as a figure: rows are what was written, columns the tokens before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from whyformer.show import answers, colours
from whyformer.show.paper import Paper, measure
from whyformer.show.words import short

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from whyformer.explanation.generation import Generation

_CELL, _SIZE, _LONGEST = 0.17, 7.0, 18  # inches, points, characters
_MOST = 90  # columns; beyond that words, then sentences


def claim(g: Generation) -> str:
    """What the colours of the matrix mean."""
    return f"{colours.legend(answers.signed(g), 'what was written')}; weak rows are paler"


def figure(g: Generation, most: int = _MOST, bare: bool = False) -> Figure:
    """The matrix, each row on the scale of its step; in words, or sentences, where there are too many tokens to read.

    Args:
        most: columns, beyond which words are merged.
        bare: without title, legend and remarks, for a page that writes them beside it.
    """
    g = answers.readable(g, most)
    names = [short(answers.shown(piece).strip() or "␣", _LONGEST) for piece in g.pieces]
    shown = len(names) - 1 if len(names) > 1 else len(names)  # nothing is made from the last one
    left = max(measure(name, _SIZE) for name in names[g.start :]) + 0.25
    top = max(measure(name, _SIZE) for name in names[:shown]) + (0.15 if bare else 0.5)
    wide, high = shown * _CELL, len(g) * _CELL
    lines, said = ([], "") if bare else (answers.remarks(g), claim(g))
    if bare:
        paper = Paper(left + wide + 0.1, top + high + 0.1)
    else:
        paper = Paper(max(left + wide, left + measure(said, 6.5), 3.8) + 0.2, top + high + 0.35 + 0.14 * len(lines))
        paper.write(short(answers.title(g), 90), 0.1, 0.1, 8.5, va="top", weight="bold")
    unit, signed = answers.unit(g)[:, :shown], answers.signed(g)
    painted = colours.paint(unit, signed)
    later = np.arange(shown)[None] >= g.start + np.arange(len(g))[:, None]
    painted[later] = 0.94
    axes = paper.axes(left, top, wide, high)
    axes.imshow(painted, interpolation="none", aspect="auto")
    for j, name in enumerate(names[:shown]):
        style = {"color": colours.SOFT} if j < g.start else {}
        paper.write(name, left + (j + 0.5) * _CELL, top - 0.05, _SIZE, va="bottom", ha="center", rotation=90, **style)
    for t, name in enumerate(names[g.start :]):
        paper.write(name, left - 0.06, top + (t + 0.5) * _CELL, _SIZE, va="center", ha="right")
    if said:
        paper.write(said, left, top + high + 0.08, 6.5, va="top", color=colours.SOFT)
    for i, line in enumerate(lines):
        paper.write(short(line, 140), 0.1, top + high + 0.28 + 0.14 * i, 6.5, va="top", color=colours.WARN)
    return paper.figure

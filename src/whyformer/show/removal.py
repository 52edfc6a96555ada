"""A perturbation strip as a figure: two rows of pictures, with the probability of the class under each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whyformer.show.image import write
from whyformer.show.words import short, visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from whyformer.evaluate.strip import Strip

ROWS = ("highest\nfirst", "lowest\nfirst")
_CELL, _LEFT, _TOP, _FOOT, _GAP = 1.15, 0.5, 0.5, 0.36, 0.05  # inches


def strip(made: Strip) -> Figure:
    """The picture with more and more removed, from left to right: the highest scores first, then the lowest first.

    Under each picture stands the probability of the class, with a bar, and in red what the model says instead.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    orders, steps, high, wide, _ = made.pictures.shape
    ratio = min(3.0, max(1 / 3, high / wide))
    tall = _CELL * ratio
    width, height = _LEFT + steps * (_CELL + _GAP), _TOP + orders * (tall + _FOOT)
    drawing = Figure(figsize=(width, height), facecolor="white")
    title = f"{made.target}: probability as pixels are removed by {made.method} (replaced by {made.ground})"
    write(drawing, short(visible(title), int(width * 11)), 0.06 / width, 1 - 0.06 / height, size=9, va="top")
    for row in range(orders):
        bottom = height - _TOP - row * (tall + _FOOT) - tall
        middle = (bottom + tall / 2) / height
        write(drawing, ROWS[row], 0.25 / width, middle, size=8, rotation=90, ha="center", va="center")
        for column, fraction in enumerate(made.fractions):
            x = _LEFT + column * (_CELL + _GAP)
            middle = (x + _CELL / 2) / width
            axes = drawing.add_axes((x / width, bottom / height, _CELL / width, tall / height))
            axes.set_axis_off()
            axes.imshow(made.pictures[row, column], interpolation="antialiased")
            if row == 0:
                text = f"{100 * fraction:.3g} % removed" if column else "unchanged"
                write(drawing, text, middle, (bottom + tall + 0.04) / height, size=7, ha="center", va="bottom")
            share, said = float(made.probabilities[row, column]), made.predicted[row][column]
            for filled, colour in ((1.0, "#e4e4e4"), (share, "#de5e0c")):
                corner = (x / width, (bottom - 0.08) / height)
                size = (filled * _CELL / width, 0.05 / height)
                drawing.add_artist(Rectangle(corner, *size, color=colour, linewidth=0))
            label = f"{100 * share:.1f}%"
            write(drawing, label, x / width, (bottom - 0.11) / height, size=7, ha="left", va="top")
            if said != made.target:
                room = short(visible(said), 13)
                edge = (x + _CELL) / width
                write(drawing, room, edge, (bottom - 0.11) / height, size=7, ha="right", va="top", color="#b00020")
    return drawing

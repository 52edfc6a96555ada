"""Galleries of pictures that maximize units of a model."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from whyformer.errors import InputError, check_count
from whyformer.show.paper import Paper
from whyformer.show.typeface import fitted, measure
from whyformer.show.words import format_score

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from whyformer.maximize import Maximized

_PAGE, _GAP, _TOP = 7.2, 0.06, 0.2


def gallery(found: Iterable[Maximized], columns: int | None = None) -> Figure:
    """Return a figure with a picture for each unit, in order, below its name and activation.

    Args:
        found: results of :func:`whyformer.maximize_activation`.
        columns: number of pictures side by side; by default about the number of rows.
    """
    maxima = list(found)
    if not all(hasattr(maximum, "pixels") for maximum in maxima):
        raise InputError("gallery draws the results of whyformer.maximize_activation: pass a list of them")
    if not maxima:
        raise InputError("there is no picture to show")
    if columns is None:
        columns = math.ceil(math.sqrt(len(maxima)))
    check_count("columns", columns)
    columns = min(columns, len(maxima))
    wide = min(1.9, max(0.7, _PAGE / columns - _GAP))
    high = wide * max(m.pixels.shape[0] / m.pixels.shape[1] for m in maxima)
    paper = Paper()
    for i, maximum in enumerate(maxima):
        x, y = _GAP + i % columns * (wide + _GAP), _TOP + i // columns * (high + _TOP)
        paper.picture(np.asarray(maximum.pixels), x, y, wide, high)
        value = format_score(float(f"{maximum.activation:.3g}"))
        label = f"{fitted(maximum.unit, wide - measure(value, 5.5) - 0.08, 5.5)}  {value}"
        paper.write(label, x + wide / 2, y - 0.04, 5.5, ha="center", va="bottom")
    rows = math.ceil(len(maxima) / columns)
    return paper.finished(_GAP + columns * (wide + _GAP), _GAP + rows * (high + _TOP))

"""Several pictures that units of a model answer to, side by side in one figure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from whyformer.errors import InputError
from whyformer.show.paper import Paper
from whyformer.show.typeface import printable
from whyformer.show.words import figure_of, short

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PAGE, _GAP, _TOP = 7.2, 0.06, 0.2


class Maximum(Protocol):
    """What :func:`whyformer.maximize_activation` returns."""

    @property
    def shown(self) -> Any:
        """uint8 ``[H, W, 3]``."""

    @property
    def unit(self) -> str:
        """What was maximised."""

    @property
    def activation(self) -> float:
        """Of the picture."""


def gallery(found: Iterable[Maximum], columns: int | None = None) -> Figure:
    """A picture for each unit, in order, under its name and its activation.

    Args:
        found: outcomes of :func:`whyformer.maximize_activation`.
        columns: pictures side by side; about as many as rows by default.
    """
    shown = list(found)
    if not shown:
        raise InputError("there is no picture to show")
    if columns is None:
        columns = math.ceil(math.sqrt(len(shown)))
    if isinstance(columns, bool) or not isinstance(columns, int) or columns < 1:
        raise InputError(f"columns must be a whole number of at least 1, not {columns!r}")
    columns = min(columns, len(shown))
    wide = min(1.9, max(0.7, _PAGE / columns - _GAP))
    high = wide * max(one.shown.shape[0] / one.shown.shape[1] for one in shown)
    rows = math.ceil(len(shown) / columns)
    paper = Paper(_GAP + columns * (wide + _GAP), _GAP + rows * (high + _TOP))
    for i, one in enumerate(shown):
        x, y = _GAP + i % columns * (wide + _GAP), _TOP + i // columns * (high + _TOP)
        paper.picture(np.asarray(one.shown), x, y, wide, high)
        label = short(printable(one.unit), max(8, int(wide * 19) - 8))
        value = figure_of(float(f"{one.activation:.3g}"))
        paper.write(f"{label}  {value}", x + wide / 2, y - 0.04, 5.5, ha="center", va="bottom")
    return paper.figure

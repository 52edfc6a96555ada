"""A map on matplotlib axes of the caller."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from whyformer.errors import check_count
from whyformer.show import colours
from whyformer.show.bars import draw_rows, strongest
from whyformer.show.layout import by_input
from whyformer.show.look import Look
from whyformer.show.painting import drawable, overlay
from whyformer.show.typeface import families, fitted, printable
from whyformer.show.words import heading, input_share

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from whyformer.explanation.result import Explanation


def plot(e: Explanation, ax: Axes | None = None, sample: int = 0, k: int = 10, **look: Any) -> Axes:
    """Draw the map of one sample on axes, see :meth:`whyformer.Explanation.plot`."""
    check_count("k", k)
    style = Look.of(look)
    if ax is None:
        from matplotlib import pyplot

        ax = pyplot.gca()
    e, *others = by_input(e[sample], style.smooth)
    wide = ax.get_window_extent().width / ax.figure.dpi
    lines = [fitted(partial(heading, e), wide, 10)]
    if others:
        lines.append(f"{input_share(e)} · not drawn: {', '.join(map(input_share, others))}")
    ax.set_title("\n".join(map(printable, lines)), fontsize=10, parse_math=False, family=families())
    if drawable(e):
        ax.imshow(overlay(e, **look), interpolation="antialiased")
        ax.set_axis_off()
        return ax
    draw_rows(ax, strongest(e)[:k], colours.scale_of(e).signed)
    return ax

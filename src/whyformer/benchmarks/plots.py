"""The picture of a benchmark's curves, as PNG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from whyformer.errors import MissingExtra

if TYPE_CHECKING:
    from whyformer.benchmarks.report import Curves

# Okabe and Ito's colours, told apart by colour-blind readers too, then greys for what is left
_COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#8B6914",
    "#F0E442",
    "#7F7F7F",
    "#000000",
)
_STYLES = ("-", "--", "-.", ":")


def curves_png(panels: Sequence[Curves]) -> bytes:
    """One panel beside the other; the floor is dotted grey, the ceiling dashed grey."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("the picture of the curves needs matplotlib: pip install matplotlib") from error
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(6.4 * columns, 4.6 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    labels = list(dict.fromkeys(label for p in panels for label in p.lines if label not in ("random", "ground_truth")))
    for panel, axis in zip(panels, axes, strict=False):
        for label, (x, y) in panel.lines.items():
            number = labels.index(label) if label in labels else -1
            colour = "#555555" if number < 0 else _COLOURS[number % len(_COLOURS)]
            if panel.points:
                axis.scatter(x, y, s=10, color=colour, alpha=0.7, label=label, linewidths=0)
                continue
            style = {"random": ":", "ground_truth": "--"}.get(label, _STYLES[number // len(_COLOURS) % len(_STYLES)])
            axis.plot(x, y, style, color=colour, linewidth=1.8, marker="o", markersize=3, label=label)
        axis.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    # one legend for all panels, below them: inside, it would cover a curve
    named = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    if named:
        wide = 2 * columns + 1
        figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=wide, fontsize=7, frameon=False)
    FigureCanvasAgg(figure)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=130)
    return data.getvalue()

"""Many maps of one input at a glance, one a block or head; and the matrix of which token looks at which."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from whyformer.errors import InputError
from whyformer.show import colours, sentence
from whyformer.show.image import write
from whyformer.show.layout import listed, sections
from whyformer.show.look import Look
from whyformer.show.painting import drawn_size, overlay
from whyformer.show.words import array, figure_of, short, visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from whyformer.explanation.result import Explanation

_PAGE = 12.0  # inches that the panels may take in width
_LABELLED = 96  # the most tokens whose names are written beside a matrix


def panels(explanations: Iterable[Explanation], columns: int | None = None, **look: Any) -> Figure:
    """A small picture for each explanation, in order, under the settings in which it differs and its largest score.

    Each map is scaled by its own largest score. Of texts, the listing of :func:`~whyformer.show.image.figure`.

    Args:
        columns: maps side by side; about as many as rows by default.
        **look: options of :class:`~whyformer.show.look.Look`.
    """
    from matplotlib.figure import Figure

    Look.of(look)
    singles = [sample for e in listed(explanations) for sample in e]
    if not singles:
        raise InputError("there is no explanation to show")
    if singles[0].level == "token":
        return sentence.figure(sections(singles))
    ratio = max(high / wide for high, wide in map(drawn_size, singles))
    if columns is None:
        columns = math.ceil(math.sqrt(len(singles) * max(0.25, ratio)))
    if columns < 1:
        raise InputError(f"columns must be at least 1, not {columns}")
    rows, gap, top = math.ceil(len(singles) / columns), 0.06, 0.2
    wide = min(1.9, max(0.7, _PAGE / columns - gap)) / max(1.0, ratio / 1.5)
    high = wide * ratio
    width, height = gap + columns * (wide + gap), gap + rows * (high + top)
    drawing = Figure(figsize=(width, height), facecolor="white")
    for i, (e, title) in enumerate(zip(singles, _titles(singles), strict=True)):
        x, y = gap + i % columns * (wide + gap), height - (i // columns + 1) * (high + top)
        axes = drawing.add_axes((x / width, y / height, wide / width, high / height))
        axes.set_axis_off()
        axes.imshow(overlay(e, longest=round(wide * 300), **look), interpolation="antialiased")
        limit = max(8, int(wide * 19))
        full = f"{title}  max {figure_of(float(f'{colours.scale_of(e).limit:.2g}'))}"
        label = full if len(full) <= limit else short(title, limit)
        write(drawing, label, (x + wide / 2) / width, (y + high + 0.04) / height, size=5.5, ha="center", va="bottom")
    return drawing


def matrix(
    weights: Any, rows: Sequence[str] | None = None, columns: Sequence[str] | None = None, *,
    title: str = "", cmap: str | None = None,
) -> Figure:  # fmt: skip
    """A matrix as an image with a colour bar, such as which token (row) looks at which (column).

    Args:
        weights: ``[Q, K]`` tensor or array; with negative numbers the colours diverge around 0.
        rows, columns: names of the tokens; ``columns`` are those of the rows by default. More than 96 are numbered.
    """
    from matplotlib.figure import Figure

    values = np.asarray(array(weights) if hasattr(weights, "detach") else weights, dtype=np.float64)
    if values.ndim != 2 or 0 in values.shape:
        raise InputError(f"a matrix [tokens, tokens] is needed, not {list(values.shape)}")
    if not np.isfinite(values).all():
        raise InputError("the matrix holds NaN or infinity")
    columns = rows if columns is None else columns
    for names, count, side in ((rows, values.shape[0], "rows"), (columns, values.shape[1], "columns")):
        if names is not None and len(names) != count:
            raise InputError(f"{len(names)} names for {count} {side}")
    scale = colours.scale(values)
    labelled = rows is not None and max(values.shape) <= _LABELLED
    cell = 0.16 if labelled else min(0.16, 5.0 / max(values.shape))
    labels = [[short(visible(n), 18) for n in side or ()] if labelled else [] for side in (rows, columns)]
    left, above = (0.35 + 0.07 * max(map(sentence.width, side), default=1) for side in labels)
    wide, high = max(1.6, values.shape[1] * cell), max(1.6, values.shape[0] * cell)
    head = 0.3 if title else 0.05
    width, height = left + wide + 0.75, above + high + head + 0.1
    drawing = Figure(figsize=(width, height), facecolor="white")
    axes = drawing.add_axes((left / width, 0.1 / height, wide / width, high / height))
    axes.imshow(colours.paint(scale.unit(values), scale.signed, cmap), interpolation="nearest", aspect="auto")
    axes.xaxis.tick_top()
    axes.tick_params(length=2, pad=2, width=0.4, labelsize=6.5)
    for axis, named, turn in ((axes.yaxis, labels[0], 0), (axes.xaxis, labels[1], 90)):
        if named:
            axis.set_ticks(range(len(named)), [sentence.drawable(n) for n in named], rotation=turn, parse_math=False)
            for label in axis.get_ticklabels():
                label.set_fontfamily(list(sentence.families()))
    if title:
        write(drawing, short(visible(title), int(width * 11)), 0.08 / width, 1 - 0.08 / height, size=9, va="top")
    bar = drawing.add_axes(((left + wide + 0.08) / width, 0.1 / height, 0.09 / width, high / height))
    colours.bar(bar, scale, cmap)
    return drawing


def _titles(explanations: list[Explanation]) -> list[str]:
    """What differs between them: settings, then the method, then the target's place in the list."""
    flat = [{**_flat(e.settings), "method": e.method} for e in explanations]
    keys = list(dict.fromkeys(k for one in flat for k in one))
    differing = [k for k in keys if len({str(one.get(k)) for one in flat}) > 1]
    titles = [" ".join(_word(k, one[k]) for k in differing if k in one) for one in flat]
    return [visible(t) or str(i) for i, t in enumerate(titles)]


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with those of ``aggregation`` beside the others."""
    inner = settings.get("aggregation")
    own = {k: v for k, v in settings.items() if k != "aggregation"}
    return {**own, **inner} if isinstance(inner, dict) else own


def _word(key: str, value: Any) -> str:
    return str(value) if key == "method" else f"{key.rstrip('s')} {value}"

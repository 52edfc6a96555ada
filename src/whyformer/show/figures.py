"""Figures: grids of methods and classes, panels, galleries, matrices, strips of a picture with parts removed; and maps
on matplotlib axes of the caller."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from whyformer.errors import InputError, check_count
from whyformer.show import colours, sentence, sound
from whyformer.show.bars import draw_rows, strongest
from whyformer.show.colours import array
from whyformer.show.layout import Section, by_input, prepared_samples, sections
from whyformer.show.look import Look
from whyformer.show.painting import base, drawable, drawn_size, overlay, plain
from whyformer.show.paper import Paper
from whyformer.show.typeface import families, fitted, measure, printable
from whyformer.show.words import (
    agnostic,
    bar_labels,
    format_score,
    heading,
    input_share,
    legend_labels,
    notes,
    percent,
    predictions,
    short,
    target_name,
    trust_figures,
    visible,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from whyformer.evaluation.strip import Strip
    from whyformer.explanation.result import Explanation
    from whyformer.maximize import Maximized

_PIXELS = 900  # longest side of a picture in a figure
_CELL = 2.5  # longest side of a cell, inches
_MARGIN, _GAP, _BAR, _CLAIM = 0.12, 0.16, 0.68, 0.16  # inches: at the left, between maps, for a colour bar, a legend
_TITLE, _NAME, _LINE = 0.3, 0.2, 0.14  # inches: a question, a method's name, a line of text
_WIDE = 0.5  # height by width, below which pictures stand above their maps
_PAGE, _GALLERY = 12.0, 7.2  # inches that panels and galleries may take in width
_SPACE, _LABEL = 0.06, 0.2  # inches: between small pictures, above each for its label
_LABELLED = 96  # the most tokens whose names are written beside a matrix


# -- a grid ------------------------------------------------------------------------------------------------------
def figure(explanations: Explanation | Iterable[Explanation], *, picture: bool = True, **look: Any) -> Figure:
    """Return a figure of explanations: a row for each method (and input), columns for the picture and the classes.

    Texts are listed, with a line for each method under each class. Each map is scaled separately and has a colour bar.
    Inputs of several kinds (a picture and a question) stand one below the other.
    ``picture=False`` leaves the picture out; ``look`` are the options of :func:`~whyformer.show.painting.overlay`.
    Warnings stand at the bottom.
    """
    style = Look.of(look)
    kinds: dict[str, list[Section]] = {}
    for part in sections(explanations, style.smooth):
        kinds.setdefault(_kind(part.first), []).append(part)
    draw = {"sound": sound.draw, "text": sentence.draw}
    grid = partial(_grid, picture=picture, look=style)
    paper, y, widths = Paper(), 0.0, list[float]()
    for kind, parts in kinds.items():
        width, y = draw.get(kind, grid)(paper, y, parts)
        widths.append(width)
    remarks = [line for parts in kinds.values() for line in notes(e for part in parts for e in part.explanations)]
    return paper.finished(max(widths), y, remarks)


def _kind(e: Explanation) -> str:
    """Return how the input of an explanation is drawn: as "sound", "text" or "picture"."""
    return "sound" if e.sounds is not None else "text" if e.level == "token" else "picture"


def _grid(paper: Paper, y: float, parts: list[Section], picture: bool, look: Look) -> tuple[float, float]:
    """Draw a table for each input below the height y: picture and predictions at the left, rows of methods, columns of
    targets. Return the width, and the height below it.

    Wide pictures are larger, and stand above their maps, which stand one below the other.
    """
    picture = picture and any(base(part.first) is not None for part in parts)
    ratios = [high / wide for high, wide in (drawn_size(part.first) for part in parts)]
    above = max(ratios) < _WIDE
    tables = [part.by_column() if above else [part] for part in parts]
    wide = 2 * _CELL if above else max(1.2, _CELL / max(1.0, min(ratios)))
    left = _MARGIN + (wide + _GAP if picture and not above else 0)
    y += _GAP / 2
    for part, several, ratio in zip(parts, tables, ratios, strict=True):
        high = min(_CELL, max(0.8, wide * ratio))  # at least as high as the labels of a colour bar
        end = _input(paper, part.first, (_MARGIN, y, wide, high)) if picture else y
        at = end if above else y
        for table in several:
            at = _rows(paper, table, (left, at, wide, high), look)
        y = max(end, at)
    columns = max(len(table.targets) for several in tables for table in several)
    return left + columns * (wide + _GAP) + _BAR, y + _GAP / 2


def _input(paper: Paper, e: Explanation, span: tuple[float, float, float, float]) -> float:
    """Draw the picture, if there is one, without a map, and below it the predictions; return the height below them."""
    x, y, wide, high = span
    listed = predictions(e)
    end = y + _TITLE + _NAME + high + _LINE * (len(listed) + 1)
    if base(e) is None:
        return end
    _title(paper, "Input", x, y, wide)
    y += _TITLE + _NAME
    paper.picture(plain(e, _PIXELS), x, y, wide, high)
    for i, (name, value, _) in enumerate(listed):
        at = y + high + 0.08 + i * _LINE
        room = wide - measure(value, 7) - 0.1
        paper.write(fitted(name, room, 7), x, at, 7, va="top", color=colours.SOFT)
        paper.write(value, x + wide, at, 7, va="top", ha="right", color=colours.SOFT)
    return end


def _title(paper: Paper, text: str, x: float, y: float, wide: float) -> None:
    """Write a title above a picture, in the box that begins at (x, y)."""
    paper.write(text, x + wide / 2, y + _TITLE - 0.08, 9, ha="center", va="bottom")


def _rows(paper: Paper, part: Section, span: tuple[float, float, float, float], look: Look) -> float:
    """Draw the maps of an input: headings, then the maps of each method below its name, with a colour bar beside the
    first that has colours. Return the height below them."""
    x, y, wide, high = span
    below = 0.24 if any(map(trust_figures, part.explanations)) else 0.0  # for the bar of faithfulness
    for column, named in enumerate(part.heads):
        _title(paper, fitted(partial(heading, named), wide, 9), x + column * (wide + _GAP), y, wide)
    y += _TITLE
    for method, row in zip(part.methods, part.cells, strict=True):
        room = len(row) * (wide + _GAP) - _GAP
        size = max(5.0, min(7.0, 7.0 * room / measure(visible(method), 7)))
        paper.write(fitted(method, room, size), x, y + _NAME - 0.05, size, va="bottom", color=colours.SOFT)
        barred = False
        for column, e in enumerate(row):
            if e is None:
                continue
            place = (x + column * (wide + _GAP), y + _NAME, wide, high)
            if agnostic(e) and not agnostic(part.heads[column]):
                end, above = place[0] + wide, place[1] - 0.05
                paper.write(target_name(e), end, above, 7, va="bottom", ha="right", color=colours.SOFT)
            top, tall = _map(paper, e, place, look)
            scale, right = colours.scale_of(e), x + len(row) * (wide + _GAP) - _GAP + 0.06
            if not (barred or scale.note or look.note):
                paper.bar(scale, look.cmap, (right, top, 0.08, tall), bar_labels(e))
                barred = True
            _faithfulness(paper, e, (place[0], place[1] + high + 0.05, wide))
        y += _NAME + high + below
    return y


def _map(paper: Paper, e: Explanation, span: tuple[float, float, float, float], look: Look) -> tuple[float, float]:
    """Draw a map on its picture, with a note on it if it has no colours. Return its upper end and its height: it is
    smaller than its cell if inputs differ in shape."""
    pixels = overlay(e, longest=_PIXELS, **asdict(look))
    axes = paper.picture(pixels, *span)
    note = colours.scale_of(e).note or look.note
    if note is not None:
        axes.text(0.5, 0.04, note, transform=axes.transAxes, ha="center", va="bottom", fontsize=8, family=families(),
                  bbox={"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 2})  # fmt: skip
    _, y, wide, high = span
    tall = min(high, wide * pixels.shape[0] / pixels.shape[1])
    return y + (high - tall) / 2, tall


def _faithfulness(paper: Paper, e: Explanation, span: tuple[float, float, float]) -> None:
    """Draw the area under the deletion curve of a map, if measured, as a bar with a mark at that of random maps."""
    figures = trust_figures(e)
    if figures is None or figures.get("numeric") or not np.isfinite(np.array(figures["curve"], dtype=float)).all():
        return
    x, y, wide = span
    curves = [np.array(figures[name], dtype=float) for name in ("curve", "mean")]
    area, chance = (float((curve[1:] + curve[:-1]).mean() / 2) for curve in curves)  # of equal steps
    paper.box(x, y, wide, 0.05, colours.LIGHT["line"])
    paper.box(x, y, wide * area, 0.05, colours.LIGHT["accent"])
    paper.box(x + wide * chance - 0.01, y - 0.02, 0.02, 0.09, colours.INK)
    label = f"deletion {area:.2f} (random maps {chance:.2f}; lower is better)"
    paper.write(label, x, y + 0.09, 5.5, va="top", color=colours.SOFT)


# -- panels and galleries ----------------------------------------------------------------------------------------
def panels(explanations: Iterable[Explanation], columns: int | None = None, **look: Any) -> Figure:
    """Return a figure with a small map for each explanation, titled by what differs and its largest score.

    Each map is scaled separately. Texts are listed as by :func:`figure`.

    Args:
        columns: number of maps side by side; by default about the number of rows.
        **look: options of :class:`~whyformer.show.look.Look`.
    """
    singles = prepared_samples(explanations, Look.of(look).smooth)
    if not singles:
        raise InputError("there is no explanation to show")
    if singles[0].level == "token":
        return figure(singles)
    ratio = max(high / wide for high, wide in map(drawn_size, singles))
    if columns is None:
        columns = math.ceil(math.sqrt(len(singles) * max(0.25, ratio)))
    check_count("columns", columns)
    wide = min(1.9, max(0.7, _PAGE / columns - _SPACE)) / max(1.0, ratio / 1.5)
    drawn = (overlay(e, longest=round(wide * 300), **look) for e in singles)
    largest = [f"max {format_score(float(colours.largest(e)))}" for e in singles]
    paper, width, tall = _sheet(drawn, _titles(singles), largest, columns, (wide, wide * ratio))
    different = list(dict.fromkeys(map(legend_labels, singles)))[:2]
    for i, labels in enumerate(different):
        paper.legend(labels, _SPACE + i * width / 2, tall, width / len(different) - 2 * _SPACE)
    return paper.finished(width, tall + _CLAIM, notes(singles))


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
    wide = min(1.9, max(0.7, _GALLERY / columns - _SPACE))
    high = wide * max(m.pixels.shape[0] / m.pixels.shape[1] for m in maxima)
    activations = [format_score(float(f"{m.activation:.3g}")) for m in maxima]
    pictures = (np.asarray(m.pixels) for m in maxima)
    paper, width, tall = _sheet(pictures, [m.unit for m in maxima], activations, columns, (wide, high))
    return paper.finished(width, tall)


def _sheet(
    pictures: Iterable[Any], names: list[str], numbers: list[str], columns: int, cell: tuple[float, float]
) -> tuple[Paper, float, float]:
    """Draw small pictures in rows of cells, each below its name and a number; return also the width and the height."""
    paper, (wide, high) = Paper(), cell
    for i, (pixels, name, number) in enumerate(zip(pictures, names, numbers, strict=True)):
        x, y = _SPACE + i % columns * (wide + _SPACE), _LABEL + i // columns * (high + _LABEL)
        paper.picture(pixels, x, y, wide, high)
        label = f"{fitted(name, wide - measure(number, 5.5) - 0.08, 5.5)}  {number}"
        paper.write(label, x + wide / 2, y - 0.04, 5.5, ha="center", va="bottom")
    rows = math.ceil(len(names) / columns)
    return paper, _SPACE + columns * (wide + _SPACE), _SPACE + rows * (high + _LABEL)


def _titles(explanations: list[Explanation]) -> list[str]:
    """Return what differs between explanations: settings, including those of an aggregation, then method and target."""
    flat = []
    for e in explanations:
        inner = e.settings.get("aggregation")
        settings = e.settings | (inner if isinstance(inner, dict) else {})
        settings |= {"method": e.method, "target": target_name(e)}
        flat.append({k: v for k, v in settings.items() if k != "aggregation"})
    keys = list(dict.fromkeys(k for settings in flat for k in settings))
    differing = [k for k in keys if len({str(settings.get(k)) for settings in flat}) > 1]
    named = {k: "" if k in ("method", "target") else f"{k.rstrip('s')} " for k in differing}
    titles = (" ".join(f"{name}{s[k]}" for k, name in named.items() if k in s) for s in flat)
    return [visible(title) or str(i) for i, title in enumerate(titles)]


# -- a matrix ----------------------------------------------------------------------------------------------------
def matrix(
    weights: Any, rows: Sequence[str] | None = None, columns: Sequence[str] | None = None, *,
    title: str = "", cmap: str | None = None,
) -> Figure:  # fmt: skip
    """Return a matrix as an image with a colour bar, such as attention from tokens (rows) to tokens (columns).

    Args:
        weights: ``[Q, K]`` tensor or array; colours diverge around 0 if numbers are negative.
        rows, columns: names of tokens; ``columns`` are the rows by default. Of more than 96 the indices are written.
    """
    try:
        values = np.asarray(array(weights) if hasattr(weights, "detach") else weights, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"a matrix [tokens, tokens] of numbers is needed: {error}") from error
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
    left, above = (0.35 + max((measure(name, 6.5) for name in side), default=0.07) for side in labels)
    wide, high = max(1.6, values.shape[1] * cell), max(1.6, values.shape[0] * cell)
    head = 0.3 if title else 0.05
    paper, width = Paper(), left + wide + 0.75
    axes = paper.axes(left, head + above, wide, high)
    axes.set_axis_on()
    axes.imshow(colours.paint(scale.unit(values), scale.signed, cmap), interpolation="nearest", aspect="auto")
    axes.xaxis.tick_top()
    axes.tick_params(length=2, pad=2, width=0.4, labelsize=6.5)
    for axis, named, turn in ((axes.yaxis, labels[0], 0), (axes.xaxis, labels[1], 90)):
        if named:
            axis.set_ticks(range(len(named)), [printable(n) for n in named], rotation=turn, parse_math=False)
    if title:
        paper.write(fitted(visible(title), width - 0.16, 9), 0.08, 0.08, 9, va="top")
    paper.bar(scale, cmap, (left + wide + 0.08, head + above, 0.09, high))
    return paper.finished(width, above + high + head + 0.1)


# -- a strip -----------------------------------------------------------------------------------------------------
def strip(made: Strip) -> Figure:
    """Return a figure of a picture with more and more removed: the highest scores first, then the lowest first.

    Below each picture stand the probability of the class with a bar and, in red, another predicted class; for a
    regression the value.
    """
    if not hasattr(made, "fractions"):
        raise InputError("strip draws the result of whyformer.evaluation.strip.perturbation_strip")
    cell, left, top, foot, gap = 1.15, 0.5, 0.5, 0.36, 0.05  # inches
    orders, steps, high, wide, _ = made.pictures.shape
    tall = cell * min(3.0, max(1 / 3, high / wide))
    paper, width = Paper(), left + steps * (cell + gap)
    quantity = "value" if made.numeric else "probability"
    title = f"{quantity} of {made.target} as pixels are replaced by {made.baseline}, in the order of {made.method}"
    paper.write(fitted(visible(title), width - 0.12, 9), 0.06, 0.06, 9, va="top")
    for row, order in enumerate(("highest\nfirst", "lowest\nfirst")):
        y = top + row * (tall + foot)
        below = y + tall
        paper.write(order, 0.25, y + tall / 2, 8, rotation=90, ha="center", va="center")
        for column, fraction in enumerate(made.fractions):
            x = left + column * (cell + gap)
            paper.picture(made.pictures[row, column], x, y, cell, tall)
            if row == 0:
                label = f"{100 * fraction:.3g} % removed" if column else "unchanged"
                paper.write(label, x + cell / 2, y - 0.04, 7, ha="center", va="bottom")
            share, predicted = float(made.probabilities[row, column]), made.predicted[row][column]
            bars = ((1.0, "#e4e4e4"), (share, colours.code(colours.POSITIVE)))
            for filled, colour in () if made.numeric else bars:
                paper.box(x, below + 0.03, filled * cell, 0.05, colour)
            value = format_score(share) if made.numeric else percent(share)
            paper.write(value, x, below + 0.11, 7, ha="left", va="top")
            if predicted != made.target:
                label = fitted(visible(predicted), cell - measure(value, 7) - 0.05, 7)
                paper.write(label, x + cell, below + 0.11, 7, ha="right", va="top", color=colours.ERROR)
    return paper.finished(width, top + orders * (tall + foot))


# -- axes of the caller ------------------------------------------------------------------------------------------
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

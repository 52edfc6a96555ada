"""Figures of explanations: grids of methods x classes, panels, a matrix, a strip of pictures with parts removed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from whyformer.errors import InputError
from whyformer.show import colours, sentence, sound
from whyformer.show.colours import array
from whyformer.show.layout import Section, listed, sections
from whyformer.show.look import Look
from whyformer.show.painting import base, drawn_size, overlay
from whyformer.show.paper import Paper, families, measure, printable
from whyformer.show.words import claims, figure_of, heading, short, visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from whyformer.evaluation.strip import Strip
    from whyformer.explanation.result import Explanation

_PIXELS = 900  # longest side of a picture in a figure
_CELL = 2.5  # longest side of a cell, inches
_TOP, _CLAIM, _GAP, _BAR, _LABEL = 0.34, 0.16, 0.16, 0.62, 0.34  # inches: title, what colours say, space, bar, label
_WIDE = 0.5  # height by width, below which pictures are stacked
_PAGE = 12.0  # inches that the panels may take in width
_LABELLED = 96  # the most tokens whose names are written beside a matrix


# -- a grid ------------------------------------------------------------------------------------------------------
def figure(explanations: Explanation | Iterable[Explanation], *, picture: bool = True, **look: Any) -> Figure:
    """A matplotlib figure of explanations: rows are methods (and inputs), columns the picture and then the classes.

    Text becomes a listing, one line a method under each class. Each map has its own colour bar: maps are scaled one by
    one. ``picture=False`` leaves the plain picture out; ``look`` are the options of
    :func:`~whyformer.show.painting.overlay`. What the runs warn of stands below.
    """
    chosen = Look.of(look)
    parts = sections(explanations, chosen.smooth, alike=True)
    if any(part.first.sounds is not None for part in parts):
        return sound.figure(parts)
    if any(part.first.level == "token" for part in parts):
        return sentence.figure(parts)
    return _grid(parts, picture, chosen, look)


def _grid(parts: list[Section], picture: bool, chosen: Look, look: dict[str, Any]) -> Figure:
    """Cells of one width in inches, laid out by hand so that no label ever meets another; rows as high as they need."""
    picture = picture and any(base(part.first) is not None for part in parts)
    columns = max(len(part.targets) for part in parts)
    ratios = [high / wide for high, wide in (drawn_size(part.first) for part in parts)]
    if max(ratios) < _WIDE:
        return _stacked(parts, ratios, picture, chosen, look)
    wide = max(1.2, _CELL / max(1.0, min(ratios)))
    left = _LABEL + (wide + _GAP if picture else 0)
    width = left + columns * (wide + _BAR) + 0.06
    # at least as high as a row's label needs, and a colour bar's numbers
    highs = [min(_CELL, max(1.1, wide * ratio)) for ratio in ratios]
    tall = sum((high + _TOP + _CLAIM) * len(part.cells) for part, high in zip(parts, highs, strict=True))
    paper = Paper(width, tall + _GAP, (e for part in parts for row in part.cells for e in row if e is not None))
    y = _TOP
    for part, high in zip(parts, highs, strict=True):
        for r, (method, row) in enumerate(zip(part.methods, part.cells, strict=True)):
            label = "\n".join(_broken(method, int(high * 15)))
            paper.write(label, 0.17, y + high / 2, 8, rotation=90, ha="center", va="center")
            plain = base(part.first)
            if picture and plain is not None and r == 0:
                size = drawn_size(part.first, 0, _PIXELS)[::-1]
                paper.picture(plain.resize(size, Image.Resampling.BICUBIC), _LABEL, y, wide, high)
            for column, e in enumerate(row):
                if e is not None:
                    drawn = overlay(e, longest=_PIXELS, **look)
                    _cell(paper, drawn, e, (left + column * (wide + _BAR), y, wide, high), chosen)
            y += high + _CLAIM + _TOP
    return paper.figure


def _stacked(parts: list[Section], ratios: list[float], picture: bool, chosen: Look, look: dict[str, Any]) -> Figure:
    """Wide pictures below each other: side by side they would be thin strips."""
    rows: list[tuple[Section, float, str, Explanation | None]] = []
    for part, ratio in zip(parts, ratios, strict=True):
        high = max(_BAR, 2 * _CELL * ratio)  # a colour bar's numbers need some height
        if picture and base(part.first) is not None:
            rows.append((part, high, "", None))
        cells = [(m, e) for m, row in zip(part.methods, part.cells, strict=True) for e in row if e is not None]
        rows += [(part, high, f"{method}, ", e) for method, e in cells]
    shown = [e for _, _, _, e in rows if e is not None]
    tall = sum(high + _TOP + _CLAIM for _, high, _, _ in rows)
    wide, left = 2 * _CELL, 0.12
    paper, y = Paper(left + wide + _BAR + 0.06, tall + _GAP, shown), _TOP
    for part, high, name, e in rows:
        plain = base(part.first)
        if e is not None:
            _cell(paper, overlay(e, longest=_PIXELS, **look), e, (left, y, wide, high), chosen, name)
        elif plain is not None:
            size = drawn_size(part.first, 0, _PIXELS)[::-1]
            paper.picture(plain.resize(size, Image.Resampling.BICUBIC), left, y, wide, high)
        y += high + _CLAIM + _TOP
    return paper.figure


def _broken(name: str, room: int) -> list[str]:
    """A name in at most two lines of ``room`` characters, broken after a "_" or a space."""
    if len(name) <= room:
        return [name]
    at = max(name.rfind("_", 0, room), name.rfind(" ", 0, room)) + 1 or room
    return [name[:at], short(name[at:], room)]


def _cell(
    paper: Paper, drawn: Any, e: Explanation, span: tuple[float, float, float, float], look: Look, name: str = ""
) -> None:
    """One overlay with title (a ``name`` and the class) and colour bar; ``span`` is (x, y, width, height) in inches."""
    x, y, wide, high = span
    axes = paper.picture(drawn, *span)
    paper.write(short(name + heading(e), int(wide * 12)), x + wide / 2, y - 0.06, 9, ha="center", va="bottom")
    narrow = drawn.shape[1] * high < (wide - 0.1) * drawn.shape[0]  # then the bar's numbers stand above the claims
    _claims(paper, e, x, y + high + (0.07 if narrow else 0.03), wide)
    scale = colours.scale_of(e)
    note = scale.note or look.note
    if note is not None:
        axes.text(0.5, 0.04, note, transform=axes.transAxes, ha="center", va="bottom", fontsize=8,
                  bbox={"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 2})  # fmt: skip
        return
    # anchored to what imshow drew, which is smaller than the cell where the aspect ratios of several inputs differ
    axes.apply_aspect()
    box = axes.get_position()
    top, tall = (1 - box.y1) * paper.height, box.height * paper.height
    paper.bar(scale, look.cmap, box.x1 * paper.width + 0.05, top, 0.08, tall)


def _claims(paper: Paper, e: Explanation, x: float, y: float, wide: float) -> None:
    """What the colours say, in these colours: one end at the left, the other at the right."""
    against, favour = claims(e)
    inks = (colours.NEGATIVE, colours.POSITIVE) if against else (colours.MATTERED, colours.MATTERED)
    room = int(wide * 21) - len(against)
    if against:
        paper.write(against, x, y, 6.5, va="top", color=colours.code(inks[0]))
    at, side = (x + wide, "right") if against else (x + wide / 2, "center")
    paper.write(short(favour, room), at, y, 6.5, va="top", ha=side, color=colours.code(inks[1]))


# -- panels ------------------------------------------------------------------------------------------------------
def panels(explanations: Iterable[Explanation], columns: int | None = None, **look: Any) -> Figure:
    """A small picture for each explanation, in order, under the settings in which it differs and its largest score.

    Each map is scaled by its own largest score. Of texts, the listing of :func:`figure`.

    Args:
        columns: maps side by side; about as many as rows by default.
        **look: options of :class:`~whyformer.show.look.Look`.
    """
    singles = listed(explanations, Look.of(look).smooth)
    if not singles:
        raise InputError("there is no explanation to show")
    if singles[0].level == "token":
        return sentence.figure(sections(singles, alike=True))
    ratio = max(high / wide for high, wide in map(drawn_size, singles))
    if columns is None:
        columns = math.ceil(math.sqrt(len(singles) * max(0.25, ratio)))
    if columns < 1:
        raise InputError(f"columns must be at least 1, not {columns}")
    rows, gap, top = math.ceil(len(singles) / columns), 0.06, 0.2
    wide = min(1.9, max(0.7, _PAGE / columns - gap)) / max(1.0, ratio / 1.5)
    high = wide * ratio
    width, tall = gap + columns * (wide + gap), gap + rows * (high + top)
    paper = Paper(width, tall + _CLAIM, singles)
    for i, (e, title) in enumerate(zip(singles, _titles(singles), strict=True)):
        x, y = gap + i % columns * (wide + gap), top + i // columns * (high + top)
        paper.picture(overlay(e, longest=round(wide * 300), **look), x, y, wide, high)
        limit = max(8, int(wide * 19))
        full = f"{title}  max {figure_of(float(f'{colours.scale_of(e).limit:.2g}'))}"
        label = full if len(full) <= limit else short(title, limit)
        paper.write(label, x + wide / 2, y - 0.04, 5.5, ha="center", va="bottom")
    different = list({claims(e): e for e in singles}.values())[:2]
    for i, e in enumerate(different):
        _claims(paper, e, gap + i * width / 2, tall, width / len(different) - 2 * gap)
    return paper.figure


def _titles(explanations: list[Explanation]) -> list[str]:
    """What differs between them: settings (those of an aggregation like the others), then the method."""
    flat = []
    for e in explanations:
        inner = e.settings.get("aggregation")
        shown = e.settings | (inner if isinstance(inner, dict) else {}) | {"method": e.method}
        flat.append({k: v for k, v in shown.items() if k != "aggregation"})
    keys = list(dict.fromkeys(k for one in flat for k in one))
    differing = [k for k in keys if len({str(one.get(k)) for one in flat}) > 1]
    named = {k: "" if k == "method" else f"{k.rstrip('s')} " for k in differing}
    said = (" ".join(f"{name}{one[k]}" for k, name in named.items() if k in one) for one in flat)
    return [visible(title) or str(i) for i, title in enumerate(said)]


# -- a matrix ----------------------------------------------------------------------------------------------------
def matrix(
    weights: Any, rows: Sequence[str] | None = None, columns: Sequence[str] | None = None, *,
    title: str = "", cmap: str | None = None,
) -> Figure:  # fmt: skip
    """A matrix as an image with a colour bar, such as which token (row) looks at which (column).

    Args:
        weights: ``[Q, K]`` tensor or array; with negative numbers the colours diverge around 0.
        rows, columns: names of the tokens; ``columns`` are those of the rows by default. More than 96 are numbered.
    """
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
    left, above = (0.35 + max((measure(name, 6.5) for name in side), default=0.07) for side in labels)
    wide, high = max(1.6, values.shape[1] * cell), max(1.6, values.shape[0] * cell)
    head = 0.3 if title else 0.05
    paper = Paper(left + wide + 0.75, above + high + head + 0.1)
    axes = paper.axes(left, head + above, wide, high)
    axes.set_axis_on()
    axes.imshow(colours.paint(scale.unit(values), scale.signed, cmap), interpolation="nearest", aspect="auto")
    axes.xaxis.tick_top()
    axes.tick_params(length=2, pad=2, width=0.4, labelsize=6.5)
    for axis, named, turn in ((axes.yaxis, labels[0], 0), (axes.xaxis, labels[1], 90)):
        if named:
            axis.set_ticks(range(len(named)), [printable(n) for n in named], rotation=turn, parse_math=False)
            for label in axis.get_ticklabels():
                label.set_fontfamily(list(families()))
    if title:
        paper.write(short(visible(title), int(paper.width * 11)), 0.08, 0.08, 9, va="top")
    paper.bar(scale, cmap, left + wide + 0.08, head + above, 0.09, high)
    return paper.figure


# -- a strip -----------------------------------------------------------------------------------------------------
def strip(made: Strip) -> Figure:
    """The picture with more and more removed, from left to right: the highest scores first, then the lowest first.

    Under each picture stands the probability of the class, with a bar, and in red what the model says instead; of a
    number its value.
    """
    cell, left, top, foot, gap = 1.15, 0.5, 0.5, 0.36, 0.05  # inches
    orders, steps, high, wide, _ = made.pictures.shape
    tall = cell * min(3.0, max(1 / 3, high / wide))
    paper = Paper(left + steps * (cell + gap), top + orders * (tall + foot))
    what = "value" if made.numeric else "probability"
    title = f"{made.target}: {what} as pixels are removed by {made.method} (replaced by {made.baseline})"
    paper.write(short(visible(title), int(paper.width * 11)), 0.06, 0.06, 9, va="top")
    for row, order in enumerate(("highest\nfirst", "lowest\nfirst")):
        y = top + row * (tall + foot)
        below = y + tall
        paper.write(order, 0.25, y + tall / 2, 8, rotation=90, ha="center", va="center")
        for column, fraction in enumerate(made.fractions):
            x = left + column * (cell + gap)
            paper.picture(made.pictures[row, column], x, y, cell, tall)
            if row == 0:
                said = f"{100 * fraction:.3g} % removed" if column else "unchanged"
                paper.write(said, x + cell / 2, y - 0.04, 7, ha="center", va="bottom")
            share, predicted = float(made.probabilities[row, column]), made.predicted[row][column]
            bars = ((1.0, "#e4e4e4"), (share, colours.code(colours.POSITIVE)))
            for filled, colour in () if made.numeric else bars:
                paper.box(x, below + 0.03, filled * cell, 0.05, colour)
            written = figure_of(share) if made.numeric else f"{100 * share:.1f}%"
            paper.write(written, x, below + 0.11, 7, ha="left", va="top")
            if predicted != made.target:
                said = short(visible(predicted), 13)
                paper.write(said, x + cell, below + 0.11, 7, ha="right", va="top", color=colours.ERROR)
    return paper.figure

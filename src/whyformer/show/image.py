"""Pictures of explanations: overlays, and grids of methods x classes, as PNG, SVG or PDF."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from whyformer.errors import InputError
from whyformer.show import colours, sentence
from whyformer.show.layout import Section, sections
from whyformer.show.look import Look
from whyformer.show.painting import base, drawn_size, overlay
from whyformer.show.words import heading, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from whyformer.explanation.result import Explanation

FORMATS = ("png", "svg", "pdf")
_PIXELS = 900  # longest side of a picture in a figure
_CELL = 2.5  # longest side of a cell, inches
_TOP, _GAP, _BAR, _LABEL = 0.34, 0.16, 0.62, 0.34  # inches: title, space, colour bar with ticks, row label


def figure(
    explanations: Explanation | Iterable[Explanation],
    *,
    picture: bool = True,
    **look: Any,
) -> Figure:
    """A matplotlib figure of explanations: rows are methods (and inputs), columns the picture and then the classes.

    Text becomes a listing, one line a method under each class. Each map has its own colour bar: maps are scaled one by
    one. ``picture=False`` leaves the plain picture out; ``look`` are the options of :func:`overlay`.
    """
    Look.of(look)
    parts = sections(explanations)
    if any(part.first.level == "token" for part in parts):
        return sentence.figure(parts)
    return _grid(parts, picture, look)


def encode(drawing: Figure, kind: str = "png", dpi: int = 150) -> bytes:
    """A figure as the bytes of a PNG, SVG or PDF file, the same ones at each call."""
    if kind not in FORMATS:
        raise InputError(f"pictures are written as {', '.join(FORMATS)}, not {kind!r}")
    import matplotlib

    dates: dict[str, Any] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    for axes in drawing.axes:
        for shown in axes.images:  # files of vectors hold the pixels themselves, those of pixels a smooth reduction
            shown.set_interpolation("antialiased" if kind == "png" else "none")
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "whyformer", "text.hinting": "no_hinting"}):
        drawing.savefig(buffer, format=kind, dpi=dpi, metadata=dates[kind])
    return buffer.getvalue()


def _grid(parts: list[Section], picture: bool, look: dict[str, Any]) -> Figure:
    """Cells of one width in inches, laid out by hand so that no label ever meets another; rows as high as they need."""
    from matplotlib.figure import Figure

    rows = [(part, r) for part in parts for r in range(len(part.cells))]
    picture = picture and any(base(part.first) is not None for part in parts)
    columns = max(len(part.targets) for part in parts)
    sizes = [drawn_size(part.first) for part in parts]
    ratios = [h / w for h, w in sizes]
    wide = max(1.2, _CELL / max(1.0, min(ratios)))
    # at least as high as a row's label needs, and a colour bar's numbers
    highs = {id(part): min(_CELL, max(1.1, wide * ratio)) for part, ratio in zip(parts, ratios, strict=True)}
    left = _LABEL + (wide + _GAP if picture else 0)
    width = left + columns * (wide + _BAR) + 0.06
    below = np.cumsum([highs[id(part)] + _TOP for part, _ in rows])
    height = float(below[-1]) + _GAP
    drawing = Figure(figsize=(width, height), facecolor="white")

    def place(row: int, x: float, w: float) -> Axes:
        bottom, high = height - float(below[row]), highs[id(rows[row][0])]
        axes = drawing.add_axes((x / width, bottom / height, w / width, high / height))
        axes.set_axis_off()
        return axes

    for row, (part, r) in enumerate(rows):
        first, high = part.first, highs[id(part)]
        middle = 1 - (float(below[row]) - high / 2) / height
        room = int(high * 15)
        label = "\n".join(_broken(part.methods[r], room))
        write(drawing, label, 0.17 / width, middle, size=8, rotation=90, ha="center", va="center")
        plain = base(first)
        if picture and plain is not None and r == 0:
            pixels = plain.resize(drawn_size(first, 0, _PIXELS)[::-1], Image.Resampling.BICUBIC)
            place(row, _LABEL, wide).imshow(pixels, interpolation="antialiased")
        for column, e in enumerate(part.cells[r]):
            if e is not None:
                x = left + column * (wide + _BAR)
                _cell(drawing, place(row, x, wide), e, (x, wide, width), look)
    return drawing


def _broken(name: str, room: int) -> list[str]:
    """A name in at most two lines of ``room`` characters, broken after a "_" or a space."""
    if len(name) <= room:
        return [name]
    at = max(name.rfind("_", 0, room), name.rfind(" ", 0, room)) + 1 or room
    return [name[:at], short(name[at:], room)]


def _cell(drawing: Figure, axes: Axes, e: Explanation, span: tuple[float, float, float], look: dict[str, Any]) -> None:
    """One overlay with title and colour bar; ``span`` is (x, cell width, figure width) in inches."""
    x, wide, width = span
    scale = colours.scale_of(e)
    axes.imshow(overlay(e, longest=_PIXELS, **look), interpolation="antialiased")
    top = axes.get_position().y1 + 0.06 / drawing.get_figheight()
    write(drawing, short(heading(e), int(wide * 12)), (x + wide / 2) / width, top, size=9, ha="center", va="bottom")
    chosen = Look.of(look)
    note = scale.note or chosen.note
    if note is not None:
        axes.text(0.5, 0.04, note, transform=axes.transAxes, ha="center", va="bottom", fontsize=8,
                  bbox={"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 2})  # fmt: skip
        return
    # anchored to what imshow drew, which is smaller than the cell where the aspect ratios of several inputs differ
    axes.apply_aspect()
    box = axes.get_position()
    bar = drawing.add_axes((box.x1 + 0.05 / width, box.y0, 0.08 / width, box.height))
    colours.bar(bar, scale, chosen.cmap)


def write(drawing: Figure, text: str, x: float, y: float, *, size: float, **options: Any) -> None:
    """Text on a figure, taken literally: a ``$`` is no formula, and a missing glyph is a box, not a warning."""
    drawing.text(x, y, sentence.drawable(text), fontsize=size, parse_math=False, **options)

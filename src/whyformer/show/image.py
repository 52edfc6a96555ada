"""Pictures of explanations: overlays, and grids of methods x classes, as PNG, SVG or PDF."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from whyformer.errors import InputError
from whyformer.show import colours, sentence
from whyformer.show.layout import Section, sections
from whyformer.show.words import array, heading, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from whyformer.explanation import Explanation

FORMATS = ("png", "svg", "pdf")
OPACITY = 0.8
_SMALLEST = 336  # a 112-pixel picture is enlarged before the map is laid over it, so that the map stays smooth
_CELL = 2.5  # longest side of a cell, inches
_TOP, _GAP, _BAR, _LABEL = 0.34, 0.16, 0.62, 0.34  # inches: title, space, colour bar with ticks, row label


def overlay(
    e: Explanation, sample: int = 0, *, opacity: float = OPACITY, cmap: str | None = None, fade: bool = True
) -> NDArray[np.uint8]:
    """The map of one sample over its picture, ``[H, W, 3]``.

    The picture is drawn in grey, so every colour comes from the map: colour = (1 - a) · grey + a · map, with
    a = opacity · √(|score| / max |score|), or a = opacity everywhere with ``fade=False`` (as in the papers). Signed
    maps fade with a = opacity · |score| / max |score| between the two end colours, so that 0 is the picture itself.

    Args:
        opacity: 0 (picture alone) to 1.
        cmap: a matplotlib colour map, e.g. "jet"; see :func:`whyformer.show.colours.paint`.
        fade: let the picture show where scores are near 0.
    """
    if not 0 <= opacity <= 1:
        raise InputError(f"opacity must be between 0 and 1, not {opacity!r}")
    height, width = _size(e)
    scale = colours.scale_of(e, sample)
    unit = scale.unit(array(e[sample].heatmap((height, width))[0]))
    if e.pictures is None:
        return _bytes(colours.paint(unit, scale.signed, cmap))
    shown = Image.fromarray(e.pictures[sample].numpy()).resize((width, height), Image.Resampling.BICUBIC)
    grey = np.asarray(shown.convert("L"), dtype=np.float64)[..., None] / 255
    if scale.limit == 0:
        return _bytes(np.repeat(grey, 3, -1))
    if fade and scale.signed:
        a, tinted = opacity * np.abs(unit), colours.paint(np.where(unit < 0, -1, 1), True, cmap)
    else:
        a = opacity * np.sqrt(np.abs(unit)) if fade else np.full_like(unit, opacity)
        tinted = colours.paint(unit, scale.signed, cmap)
    return _bytes((1 - a[..., None]) * grey + a[..., None] * tinted)


def figure(
    explanations: Explanation | Iterable[Explanation],
    *,
    opacity: float = OPACITY,
    cmap: str | None = None,
    fade: bool = True,
    picture: bool = True,
) -> Figure:
    """A matplotlib figure of explanations: rows are methods (and inputs), columns the picture and then the classes.

    Text becomes a listing, one line a method under each class. Each map has its own colour bar: maps are scaled one by
    one. ``picture=False`` leaves the plain picture out.
    """
    parts = sections(explanations)
    if any(part.first.level == "token" for part in parts):
        return sentence.figure(parts)
    return _grid(parts, picture, {"opacity": opacity, "cmap": cmap, "fade": fade})


def encode(drawing: Figure, kind: str = "png", dpi: int = 150) -> bytes:
    """A figure as the bytes of a PNG, SVG or PDF file, the same ones at each call."""
    if kind not in FORMATS:
        raise InputError(f"pictures are written as {', '.join(FORMATS)}, not {kind!r}")
    import matplotlib

    dates: dict[str, Any] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "whyformer", "text.hinting": "no_hinting"}):
        drawing.savefig(buffer, format=kind, dpi=dpi, metadata=dates[kind])
    return buffer.getvalue()


def png(pixels: NDArray[np.uint8]) -> bytes:
    """Pixels ``[H, W, 3]`` as the bytes of a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def _bytes(colour: NDArray[Any]) -> NDArray[np.uint8]:
    return np.asarray(np.rint(np.clip(colour, 0, 1) * 255), dtype=np.uint8)


def _size(e: Explanation) -> tuple[int, int]:
    """(height, width) to draw at: a whole multiple of the picture's own, at its aspect ratio."""
    if e.grid is None and e.level == "patch":
        raise InputError("these patch scores have no grid, so they cannot be drawn as a picture; read e.scores")
    shape = tuple(e.pictures.shape[1:3]) if e.pictures is not None else e.image_size
    if shape is None:
        shape = e.grid if e.level == "patch" and e.grid is not None else tuple(e.scores.shape[1:3])
    times = math.ceil(_SMALLEST / max(1, min(shape)))
    return int(shape[0]) * times, int(shape[1]) * times


def _grid(parts: list[Section], picture: bool, style: dict[str, Any]) -> Figure:
    """Cells of one size in inches, laid out by hand so that no label ever meets another."""
    from matplotlib.figure import Figure

    rows = [(part, r) for part in parts for r in range(len(part.cells))]
    picture = picture and any(part.first.pictures is not None for part in parts)
    columns = max(len(part.targets) for part in parts)
    sizes = [_size(part.first) for part in parts]
    ratio = max(h / w for h, w in sizes)
    wide, high = (_CELL, _CELL * ratio) if ratio <= 1 else (_CELL / ratio, _CELL)
    wide = max(wide, 1.2)
    left = _LABEL + (wide + _GAP if picture else 0)
    width = left + columns * (wide + _BAR) + 0.06
    height = len(rows) * (high + _TOP) + _GAP
    drawing = Figure(figsize=(width, height), facecolor="white")

    def place(row: int, x: float, w: float) -> Axes:
        bottom = height - (row + 1) * (high + _TOP)
        axes = drawing.add_axes((x / width, bottom / height, w / width, high / height))
        axes.set_axis_off()
        return axes

    for row, (part, r) in enumerate(rows):
        first = part.first
        middle = 1 - (row * (high + _TOP) + _TOP + high / 2) / height
        room = int(high * 15)
        label = "\n".join(_broken(part.methods[r], room))
        write(drawing, label, 0.17 / width, middle, size=8, rotation=90, ha="center", va="center")
        if picture and first.pictures is not None and (r == 0 or len(parts) == 1):
            axes = place(row, _LABEL, wide)
            if r == 0:
                axes.imshow(first.pictures[0].numpy(), interpolation="bicubic")
        for column, e in enumerate(part.cells[r]):
            if e is not None:
                x = left + column * (wide + _BAR)
                _cell(drawing, place(row, x, wide), e, (x, wide, width), style)
    return drawing


def _broken(name: str, room: int) -> list[str]:
    """A name in at most two lines of ``room`` characters, broken after a "_" or a space."""
    if len(name) <= room:
        return [name]
    at = max(name.rfind("_", 0, room), name.rfind(" ", 0, room)) + 1 or room
    return [name[:at], short(name[at:], room)]


def _cell(drawing: Figure, axes: Axes, e: Explanation, span: tuple[float, float, float], style: dict[str, Any]) -> None:
    """One overlay with title and colour bar; ``span`` is (x, cell width, figure width) in inches."""
    x, wide, width = span
    scale = colours.scale_of(e)
    axes.imshow(overlay(e, **style), interpolation="none")
    top = axes.get_position().y1 + 0.06 / drawing.get_figheight()
    write(drawing, short(heading(e), int(wide * 12)), (x + wide / 2) / width, top, size=9, ha="center", va="bottom")
    if scale.note is not None:
        axes.text(0.5, 0.04, scale.note, transform=axes.transAxes, ha="center", va="bottom", fontsize=8,
                  bbox={"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 2})  # fmt: skip
        return
    # anchored to what imshow drew, which is smaller than the cell where the aspect ratios of several inputs differ
    axes.apply_aspect()
    box = axes.get_position()
    bar = drawing.add_axes((box.x1 + 0.05 / width, box.y0, 0.08 / width, box.height))
    bottom = -1.0 if scale.signed else 0.0
    ramp = np.linspace(bottom, 1, 256)[:, None]
    bar.imshow(
        colours.paint(ramp, scale.signed, style["cmap"]), origin="lower", aspect="auto", extent=(0, 1, bottom, 1)
    )
    bar.set_xticks([])
    low, high = scale.ends
    ticks = {-1.0: low, 0.0: "0", 1.0: high} if scale.signed else {0.0: low, 1.0: high}
    bar.set_yticks(list(ticks), list(ticks.values()), fontsize=6.5)
    bar.yaxis.tick_right()
    bar.tick_params(length=2, pad=1.5, width=0.5)
    for edge in bar.spines.values():
        edge.set_linewidth(0.5)


def write(drawing: Figure, text: str, x: float, y: float, *, size: float, **options: Any) -> None:
    """Text on a figure, taken literally: a ``$`` is no formula, and a missing glyph is a box, not a warning."""
    drawing.text(x, y, sentence.drawable(text), fontsize=size, parse_math=False, **options)

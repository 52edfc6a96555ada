"""Paper measured in inches from its left and its top: pictures, text, colour bars; and the files made of it."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from whyformer.errors import InputError
from whyformer.show import colours, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from whyformer.explanation.result import Explanation

FORMATS = ("png", "svg", "pdf")
GENERATOR = "whyformer"  # what a file says that it was made by
_FONTS = ("DejaVu Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans", "Arial Unicode MS", "WenQuanYi Zen Hei")
_NOTE = 0.14  # inches a line of remarks


class Paper:
    """A matplotlib figure on which things are placed by their upper left corners, in inches.

    What is said of the explanations that are ``shown`` stands at its foot, below ``height``.
    """

    def __init__(self, width: float, height: float, shown: Iterable[Explanation] = ()) -> None:
        from matplotlib.figure import Figure

        shown = list(shown)
        said = [*words.notes(shown), *words.remarks(shown)]
        lines = [
            (cut, colours.WARN if line.startswith("warning: ") else colours.SOFT)
            for line in said
            for cut in textwrap.wrap(line, max(24, int(width * 17)))
        ]
        self.width, self.height = width, height + (len(lines) * _NOTE + 0.08 if lines else 0)
        self.figure: Figure = Figure(figsize=(self.width, self.height), facecolor="white")
        for i, (line, colour) in enumerate(lines):
            self.write(line, 0.08, height + i * _NOTE, 6.5, va="top", color=colour)

    def axes(self, x: float, y: float, wide: float, high: float) -> Axes:
        """Axes without ticks or frame."""
        bottom = self.height - y - high
        span = (x / self.width, bottom / self.height, wide / self.width, high / self.height)
        made = self.figure.add_axes(span)
        made.set_axis_off()
        return made

    def picture(self, pixels: Any, x: float, y: float, wide: float, high: float) -> Axes:
        """Pixels ``[H, W, 3]`` as large as their shape allows, in the middle of the place."""
        axes = self.axes(x, y, wide, high)
        axes.imshow(pixels, interpolation="antialiased")
        return axes

    def write(self, text: str, x: float, y: float, size: float, **options: Any) -> None:
        """Text taken literally: a ``$`` is no formula, and a missing glyph is a box, not a warning."""
        place = (x / self.width, 1 - y / self.height)
        self.figure.text(*place, printable(text), fontsize=size, parse_math=False, family=families(), **options)

    def hatched(self, x: float, y: float, wide: float, high: float) -> None:
        """A hatched rectangle: what the model did not see."""
        from matplotlib.patches import Rectangle

        corner = (x / self.width, 1 - (y + high) / self.height)
        size = (wide / self.width, high / self.height)
        self.figure.add_artist(
            Rectangle(corner, *size, facecolor="#f2f2f2", edgecolor="#bdbdbd", hatch="////", linewidth=0)
        )

    def box(self, x: float, y: float, wide: float, high: float, colour: str) -> None:
        """A filled rectangle."""
        from matplotlib.patches import Rectangle

        corner = (x / self.width, 1 - (y + high) / self.height)
        self.figure.add_artist(Rectangle(corner, wide / self.width, high / self.height, color=colour, linewidth=0))

    def bar(
        self,
        scale: colours.Scale,
        cmap: str | None,
        place: tuple[float, float, float, float],
        ends: tuple[str, str] | None = None,
    ) -> None:
        """An upright colour bar at a place (x, y, width, height), with its ends named at its right: in words, or the
        scores there."""
        axes = self.axes(*place)
        axes.set_axis_on()
        bottom = -1.0 if scale.signed else 0.0
        ramp = colours.paint(np.linspace(bottom, 1, 256)[:, None], scale.signed, cmap)
        axes.imshow(ramp, origin="lower", aspect="auto", extent=(0, 1, bottom, 1))
        axes.set_xticks([])
        low, highest = ends or scale.ends
        ticks = {bottom: low, 0.0: "0", 1.0: highest} if scale.signed else {0.0: low or "0", 1.0: highest}
        axes.set_yticks(list(ticks), list(ticks.values()), fontsize=6.5)
        axes.yaxis.tick_right()
        axes.tick_params(length=2, pad=1.5, width=0.5)
        for edge in axes.spines.values():
            edge.set_linewidth(0.5)


def encode(drawing: Figure, kind: str = "png", dpi: int = 200) -> bytes:
    """A figure as the bytes of a PNG, SVG or PDF file, the same ones at each call."""
    if kind not in FORMATS:
        raise InputError(f"pictures are written as {', '.join(FORMATS)}, not {kind!r}")
    import matplotlib

    facts: dict[str, Any] = {  # no dates: the same drawing is the same file
        "png": {"Software": GENERATOR},
        "svg": {"Creator": GENERATOR, "Date": None},
        "pdf": {"Creator": GENERATOR, "CreationDate": None},
    }
    for axes in drawing.axes:
        for shown in axes.images:  # files of vectors hold the pixels themselves, those of pixels a smooth reduction
            shown.set_interpolation("antialiased" if kind == "png" else "none")
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "whyformer", "text.hinting": "no_hinting"}):
        drawing.savefig(buffer, format=kind, dpi=dpi, metadata=facts[kind])
    return buffer.getvalue()


# -- letters -----------------------------------------------------------------------------------------------------
@cache
def families() -> tuple[str, ...]:
    """The fonts of the list above that are installed; DejaVu Sans comes with matplotlib."""
    from matplotlib import font_manager

    installed = set(font_manager.get_font_names())
    return tuple(name for name in _FONTS if name in installed)


@cache
def _coverage() -> frozenset[int]:
    from matplotlib import font_manager, ft2font

    codes: set[int] = set()
    for name in families():
        codes |= ft2font.FT2Font(font_manager.findfont(name)).get_charmap().keys()
    return frozenset(codes)


def printable(text: str) -> str:
    """The text with a box for each character that no font at hand can draw."""
    return "".join(c if c == "\n" or ord(c) in _coverage() else "□" for c in text)


@cache
def measure(text: str, size: float) -> float:
    """Width in inches of a text in letters of so many points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family=list(families()), size=size)
    width, _, _ = text_to_path.get_text_width_height_descent(printable(text), font, ismath=False)
    if text.isspace():
        # a path has no ink for spaces: take what the space adds between two letters
        return measure(f"a{text}a", size) - measure("aa", size)
    return float(width) / 72

"""Paper measured in inches from its left and its top: pictures, text, colour bars; and the files made of it."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from whyformer.errors import InputError
from whyformer.show import colours, words
from whyformer.show.typeface import families, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from whyformer.explanation.result import Explanation

FORMATS = ("png", "svg", "pdf")
GENERATOR = "whyformer"  # what a file says that it was made by
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
        made.tick_params(labelfontfamily=families())
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

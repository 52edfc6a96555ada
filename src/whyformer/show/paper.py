"""Figures with positions in inches from the upper left: pictures, text, colour bars; and their files."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from whyformer.errors import InputError
from whyformer.show import colours, painting
from whyformer.show.typeface import families, printable
from whyformer.show.words import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from whyformer.explanation.result import Explanation

FORMATS = ("png", "svg", "pdf")
GENERATOR = "whyformer"  # in the metadata of files
_NOTE = 0.14  # inches a line of remarks


class Paper:
    """A matplotlib figure on which objects are placed by their upper left corners, in inches.

    Below ``height`` stand ``notes``, such as those of :func:`whyformer.show.words.notes`.
    """

    def __init__(self, width: float, height: float, notes: Iterable[str] = ()) -> None:
        from matplotlib.figure import Figure

        lines = [
            (cut, colours.WARN if line.startswith("warning: ") else colours.SOFT)
            for line in notes
            for cut in textwrap.wrap(line, max(24, int(width * 17)))
        ]
        self.width, self.height = width, height + (len(lines) * _NOTE + 0.08 if lines else 0)
        self.figure: Figure = Figure(figsize=(self.width, self.height), facecolor="white")
        for i, (line, colour) in enumerate(lines):
            self.write(line, 0.08, height + i * _NOTE, 6.5, va="top", color=colour)

    def axes(self, x: float, y: float, wide: float, high: float) -> Axes:
        """Add axes without ticks or frame."""
        bottom = self.height - y - high
        span = (x / self.width, bottom / self.height, wide / self.width, high / self.height)
        axes = self.figure.add_axes(span)
        axes.set_axis_off()
        axes.tick_params(labelfontfamily=families())
        return axes

    def picture(self, pixels: Any, x: float, y: float, wide: float, high: float) -> Axes:
        """Draw pixels ``[H, W, 3]`` in the middle of a box, as large as their shape allows."""
        axes = self.axes(x, y, wide, high)
        axes.imshow(pixels, interpolation="antialiased")
        return axes

    def plain(self, e: Explanation, longest: int, x: float, y: float, wide: float, high: float) -> None:
        """Draw the picture of an explanation without its map, if it has a picture."""
        picture = painting.plain(e, longest)
        if picture is not None:
            self.picture(picture, x, y, wide, high)

    def write(self, text: str, x: float, y: float, size: float, **options: Any) -> None:
        """Write literal text: ``$`` starts no formula, and a missing glyph is a box, not a warning."""
        place = (x / self.width, 1 - y / self.height)
        self.figure.text(*place, printable(text), fontsize=size, parse_math=False, family=families(), **options)

    def hatched(self, x: float, y: float, wide: float, high: float) -> None:
        """Draw a hatched rectangle, for parts that the model did not read."""
        self._rectangle(x, y, wide, high, facecolor="#f2f2f2", edgecolor="#bdbdbd", hatch="////")

    def box(self, x: float, y: float, wide: float, high: float, colour: str) -> None:
        """Draw a filled rectangle."""
        self._rectangle(x, y, wide, high, color=colour)

    def _rectangle(self, x: float, y: float, wide: float, high: float, **options: Any) -> None:
        from matplotlib.patches import Rectangle

        corner = (x / self.width, 1 - (y + high) / self.height)
        size = (wide / self.width, high / self.height)
        self.figure.add_artist(Rectangle(corner, *size, linewidth=0, **options))

    def legend(self, labels: tuple[str, str], x: float, y: float, wide: float) -> None:
        """Write the meanings of the colours in these colours, the low end at the left, the high end at the right; of
        colours without a sign (:func:`whyformer.show.words.legend_labels`) in the middle."""
        against, favour = labels
        if against:
            self.write(against, x, y, 6.5, va="top", color=colours.code(colours.NEGATIVE))
        at, side = (x + wide, "right") if against else (x + wide / 2, "center")
        ink = colours.code(colours.POSITIVE if against else colours.MATTERED)
        self.write(short(favour, int(wide * 21) - len(against)), at, y, 6.5, va="top", ha=side, color=ink)

    def bar(
        self,
        scale: colours.Scale,
        cmap: str | None,
        place: tuple[float, float, float, float],
        ends: tuple[str, str] | None = None,
    ) -> None:
        """Draw a vertical colour bar at (x, y, width, height), with labels of its ends at the right: by default the
        scores."""
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


@dataclass(frozen=True)
class FigurePart:
    """A part of a figure.

    Attributes:
        width, height: its size in inches.
        notes: remarks for the bottom of the figure.
        draw: function (paper, y) that draws it on paper below the height y.
    """

    width: float
    height: float
    notes: list[str]
    draw: Callable[[Paper, float], None]


def stacked(drawings: Sequence[FigurePart]) -> Figure:
    """Return a figure of drawings, one below the other, and their remarks."""
    remarks = dict.fromkeys(note for drawing in drawings for note in drawing.notes)
    paper = Paper(max(drawing.width for drawing in drawings), sum(drawing.height for drawing in drawings), remarks)
    y = 0.0
    for drawing in drawings:
        drawing.draw(paper, y)
        y += drawing.height
    return paper.figure


def encode(drawing: Figure, kind: str = "png", dpi: int = 200) -> bytes:
    """Encode a figure as a PNG, SVG or PDF file; the same figure gives the same bytes."""
    if kind not in FORMATS:
        raise InputError(f"pictures are written as {', '.join(FORMATS)}, not {kind!r}")
    import matplotlib

    metadata: dict[str, Any] = {  # without dates, for reproducible files
        "png": {"Software": GENERATOR},
        "svg": {"Creator": GENERATOR, "Date": None},
        "pdf": {"Creator": GENERATOR, "CreationDate": None},
    }
    for axes in drawing.axes:
        for image in axes.images:  # vector files store all pixels, PNG a smooth reduction
            image.set_interpolation("antialiased" if kind == "png" else "none")
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "whyformer", "text.hinting": "no_hinting"}):
        drawing.savefig(buffer, format=kind, dpi=dpi, metadata=metadata[kind])
    return buffer.getvalue()

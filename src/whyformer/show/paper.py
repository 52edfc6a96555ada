"""Figures with positions in inches from the upper left: pictures, text, colour bars; and their files."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from whyformer.errors import InputError
from whyformer.show import colours
from whyformer.show.typeface import families, fitted, measure, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 200
"""Resolution of figures and of their PNG files."""
FORMATS = ("png", "svg", "pdf")
GENERATOR = "whyformer"  # in the metadata of files
_NOTE = 0.14  # inches a line of remarks


class Paper:
    """A matplotlib figure on which objects are placed by their upper left corners, in inches. Its size is known at the
    end (:meth:`finished`), so that a drawing can follow what stands above it."""

    def __init__(self) -> None:
        from matplotlib.figure import Figure

        self._figure: Figure = Figure(facecolor="white", dpi=DPI)
        self._placed: list[tuple[Callable[..., Any], tuple[float, float, float, float]]] = []

    def finished(self, width: float, height: float, notes: Iterable[str] = ()) -> Figure:
        """Return the figure in this size, with ``notes`` below it, such as those of
        :func:`whyformer.show.words.notes`."""
        lines = [
            (cut, colours.WARN if line.startswith("warning: ") else colours.SOFT)
            for line in dict.fromkeys(notes)
            for cut in textwrap.wrap(line, max(24, int(width * 17)))
        ]
        for i, (line, colour) in enumerate(lines):
            self.write(line, 0.08, height + i * _NOTE, 6.5, va="top", color=colour)
        height += len(lines) * _NOTE + 0.08 if lines else 0
        self._figure.set_size_inches(width, height)
        for place, (x, y, wide, high) in self._placed:
            place((x / width, 1 - (y + high) / height, wide / width, high / height))
        return self._figure

    def axes(self, x: float, y: float, wide: float, high: float) -> Axes:
        """Add axes without ticks or frame."""
        axes = self._figure.add_axes((0, 0, 1, 1))
        self._placed.append((axes.set_position, (x, y, wide, high)))
        axes.set_axis_off()
        axes.tick_params(labelfontfamily=families())
        return axes

    def picture(self, pixels: Any, x: float, y: float, wide: float, high: float) -> Axes:
        """Draw pixels ``[H, W, 3]`` in the middle of a box, as large as their shape allows."""
        axes = self.axes(x, y, wide, high)
        axes.imshow(pixels, interpolation="antialiased")
        return axes

    def write(self, text: str, x: float, y: float, size: float, **options: Any) -> None:
        """Write literal text: ``$`` starts no formula, and a missing glyph is a box, not a warning."""
        style = {"fontsize": size, "parse_math": False, "family": families(), **options}
        written = self._figure.text(0, 0, printable(text), **style)
        self._placed.append((lambda box: written.set_position(box[:2]), (x, y, 0, 0)))

    def box(self, x: float, y: float, wide: float, high: float, colour: str | None = None, **style: Any) -> None:
        """Draw a rectangle, filled with a colour or in a style of matplotlib's patches."""
        from matplotlib.patches import Rectangle

        drawn = Rectangle((0, 0), 0, 0, linewidth=0, color=colour, **style)
        self._figure.add_artist(drawn)
        self._placed.append((drawn.set_bounds, (x, y, wide, high)))

    def legend(self, labels: tuple[str, str], x: float, y: float, wide: float) -> None:
        """Write the meanings of the colours in these colours, the low end at the left, the high end at the right; of
        colours without a sign (:func:`whyformer.show.words.legend_labels`) in the middle."""
        against, favour = labels
        if against:
            self.write(against, x, y, 6.5, va="top", color=colours.code(colours.NEGATIVE))
        at, side = (x + wide, "right") if against else (x + wide / 2, "center")
        ink = colours.code(colours.POSITIVE if against else colours.MATTERED)
        room = wide - measure(against, 6.5) - 0.1 if against else wide
        self.write(fitted(favour, room, 6.5), at, y, 6.5, va="top", ha=side, color=ink)

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


def encode(drawing: Figure, kind: str = "png", dpi: int = DPI) -> bytes:
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

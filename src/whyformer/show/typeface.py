"""The typeface of all that is shown, figures and pages alike: Inter, whose faces and licence lie in ``fonts``.

``scripts/typeface`` made these files of version 4.1: Latin, Greek and Cyrillic, with signs and arrows. matplotlib reads
the TrueType files, and pages hold those in WOFF2.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "Inter"
_FONTS = Path(__file__).parent / "fonts"
FACES = {"normal": _FONTS / f"{NAME}-Regular", "bold": _FONTS / f"{NAME}-Bold"}
"""Of each weight, as matplotlib and CSS name it, the file without its ending, ``.ttf`` or ``.woff2``."""
PAGES = (NAME, "system-ui", "sans-serif")
"""The families of pages: a browser finds by itself a typeface for a script that Inter lacks."""
_OTHERS = ("DejaVu Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans", "Arial Unicode MS", "WenQuanYi Zen Hei")


@cache
def families() -> list[str]:
    """The families of figures: Inter, and for the characters that it lacks those of a list that are installed.

    DejaVu Sans comes with matplotlib.
    """
    from matplotlib import font_manager

    for face in FACES.values():
        font_manager.fontManager.addfont(face.with_suffix(".ttf"))
    installed = set(font_manager.get_font_names())
    return [NAME, *(name for name in _OTHERS if name in installed)]


def dress(figure: Figure) -> None:
    """Set the text of a figure in these families, with that of ticks which matplotlib makes later."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        text.set_fontfamily(families())
    for axes in figure.axes:
        axes.tick_params(labelfontfamily=families())


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

    font = FontProperties(family=families(), size=size)
    width, _, _ = text_to_path.get_text_width_height_descent(printable(text), font, ismath=False)
    if text.isspace():
        # a path has no ink for spaces: take what the space adds between two letters
        return measure(f"a{text}a", size) - measure("aa", size)
    return float(width) / 72

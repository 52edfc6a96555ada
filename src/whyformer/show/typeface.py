"""The typeface of figures and pages: Inter 4.1, with its licence in ``fonts``.

``scripts/typeface`` reduces its files to Latin, Greek, Cyrillic, signs and arrows. matplotlib reads the TrueType files;
pages include those in WOFF2.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from whyformer.show.words import ISOLATE, short

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "Inter"
_FONTS = Path(__file__).parent / "fonts"
FACES = {"normal": _FONTS / f"{NAME}-Regular", "bold": _FONTS / f"{NAME}-Bold"}
"""Weight, as in matplotlib and CSS -> file without its suffix, ``.ttf`` or ``.woff2``."""
PAGES = (NAME, "system-ui", "sans-serif")
"""Font families of pages; browsers choose a typeface for scripts that Inter lacks."""
_OTHERS = ("DejaVu Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans", "Arial Unicode MS", "WenQuanYi Zen Hei")


@cache
def families() -> list[str]:
    """Return the font families of figures: Inter, then installed ones for the characters that it lacks.

    DejaVu Sans comes with matplotlib.
    """
    from matplotlib import font_manager

    for face in FACES.values():
        font_manager.fontManager.addfont(face.with_suffix(".ttf"))
    installed = set(font_manager.get_font_names())
    return [NAME, *(name for name in _OTHERS if name in installed)]


def dress(figure: Figure) -> None:
    """Set the font families of all text of a figure, including ticks that matplotlib adds later."""
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
    """Replace characters that no installed font can draw by boxes; isolates of directions are not drawn."""
    return "".join(c if c in ISOLATE + "\n" or ord(c) in _coverage() else "□" for c in text)


@cache
def measure(text: str, size: float, weight: str = "normal") -> float:
    """Return the width of a text in inches at a font size in points, in normal or bold weight."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family=families(), size=size, weight=weight)
    width, _, _ = text_to_path.get_text_width_height_descent(printable(text), font, ismath=False)
    if text.isspace():
        # a path has no width for spaces alone: measure them between two letters
        return measure(f"a{text}a", size, weight) - measure("aa", size, weight)
    return float(width) / 72


def fitted(text: str | Callable[[int], str], wide: float, size: float, weight: str = "normal") -> str:
    """Cut a text to a width in inches at a font size in points; see :func:`measure`.

    Args:
        text: text to cut at its end, or a function that returns it in at most a number of characters, such as
            :func:`whyformer.show.words.heading`.
    """
    cut = partial(short, text) if isinstance(text, str) else text
    limits = range(1, int(wide * 288 / size) + 2)  # a letter is at least a quarter as wide as its size
    wide /= 1.05  # hinting widens letters, by up to 4.5 % at 100 dpi
    return cut(max(1, bisect_right(limits, wide, key=lambda limit: measure(cut(limit), size, weight))))

"""A listing of highlighted sentences as a figure: under each class, one line a method."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from whyformer.show import colours
from whyformer.show.layout import Section
from whyformer.show.words import heading, right_to_left, short, visible, words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from whyformer.explanation.result import Explanation

_WIDTH, _LEFT, _MARGIN = 9.0, 2.1, 0.15  # inches: page, where sentences begin, edge
_SIZE, _LINE, _HEAD, _FOOT = 10.0, 0.26, 0.36, 0.42  # points; inches a line, a heading, the legend
_FONTS = ("DejaVu Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans", "Arial Unicode MS", "WenQuanYi Zen Hei")


@dataclass(frozen=True)
class _Box:
    """A piece of text at (x, y) inches from the left and the top of its block, ``width`` inches wide."""

    x: float
    y: float
    width: float
    text: str
    unit: float


def figure(parts: list[Section]) -> Figure:
    """Each sentence under each target, one method a line, words on their colours, and a legend."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    blocks: list[tuple[str | None, str, list[_Box], float]] = []
    for part in parts:
        for column in range(len(part.targets)):
            cells = [(m, row[column]) for m, row in zip(part.methods, part.cells, strict=True)]
            shown = [(m, e) for m, e in cells if e is not None]
            named = next((e for _, e in shown if e.diagnostics.get("class_specific") is not False), shown[0][1])
            for i, (name, e) in enumerate(shown):
                boxes, high = _flow(e)
                blocks.append((heading(named) if i == 0 else None, name, boxes, high))
    height = _FOOT + _MARGIN + sum(high + (_HEAD if head is not None else 0) for head, _, _, high in blocks)
    drawing = Figure(figsize=(_WIDTH, height), facecolor="white")

    def at(x: float, y: float, text: str, size: float, **options: Any) -> None:
        drawing.text(x / _WIDTH, 1 - y / height, drawable(text), fontsize=size, parse_math=False,
                     family=families(), **options)  # fmt: skip

    y = _MARGIN
    for head, name, boxes, high in blocks:
        if head is not None:
            at(_MARGIN, y + _HEAD / 2, short(head, 90), 10.5, weight="bold", va="center")
            y += _HEAD
        at(_MARGIN, y + _LINE / 2, short(name, 30), 8, va="center", color="#444444")
        for box in boxes:
            x, top = _LEFT + box.x, y + box.y
            if box.unit:
                colour = colours.ground(box.unit)
                corner = (x / _WIDTH, 1 - (top + 0.9 * _LINE) / height)
                patch = Rectangle(corner, box.width / _WIDTH, 0.8 * _LINE / height, color=colour, linewidth=0)
                drawing.add_artist(patch)
            at(x, top + _LINE / 2, box.text, _SIZE, va="center", ha="left", zorder=5)
        y += high
    _legend(drawing, y + 0.12, height)
    return drawing


def _flow(e: Explanation) -> tuple[list[_Box], float]:
    """Words laid out in lines, from the right where the sentence runs that way; and the height of it all."""
    pieces, rest = words(e)
    scale = colours.scale_of(e)
    room = _WIDTH - _LEFT - _MARGIN
    mirrored = right_to_left("".join(p.text for p in pieces))
    boxes: list[_Box] = []
    x = y = 0.0
    items = [(p.gap, p.text, float(scale.unit(np.array(p.score)))) for p in pieces] + [("", rest.rstrip(), 0.0)]
    for gap, text, unit in items:
        for lead, piece, value in ((" " if gap[:1].isspace() else "", gap.strip(), 0.0), ("", text, unit)):
            if gap and piece is text and gap[-1:].isspace() and gap.strip():
                x += _measure(" ")
            x += _measure(" ") if lead and x else 0
            for chunk in _fitting(visible(piece), room):
                wide = _measure(chunk)
                if x + wide > room and x:
                    x, y = 0.0, y + _LINE
                boxes.append(_Box(room - x - wide if mirrored else x, y, wide, chunk, value))
                x += wide
    if scale.note is not None:
        boxes.append(_Box(0.0, y + _LINE, 0.0, f"({scale.note})", 0.0))
        y += _LINE
    return boxes, y + _LINE + 0.06


def _fitting(text: str, room: float) -> list[str]:
    """The text, cut where a single word is longer than a line."""
    chunks = []
    while text:
        count = len(text)
        while count > 1 and _measure(text[:count]) > room:
            count = count * 3 // 4
        chunks.append(text[:count])
        text = text[count:]
    return chunks


def _legend(drawing: Figure, y: float, height: float) -> None:
    bar = drawing.add_axes((_LEFT / _WIDTH, 1 - (y + 0.09) / height, 1.4 / _WIDTH, 0.09 / height))
    ramp = np.linspace(-1, 1, 128)
    bar.imshow(np.array([[colours.tint(float(u), 0.85) for u in ramp]], dtype=np.uint8), aspect="auto")
    bar.set_axis_off()
    middle = 1 - (y + 0.045) / height
    drawing.text((_LEFT - 0.06) / _WIDTH, middle, "against", fontsize=7, ha="right", va="center", color="#444444")
    drawing.text((_LEFT + 1.46) / _WIDTH, middle, "for the class; each line scaled by its own largest score",
                 fontsize=7, ha="left", va="center", color="#444444")  # fmt: skip


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


def drawable(text: str) -> str:
    """The text with a box for each character that no font at hand can draw."""
    return "".join(c if c == "\n" or ord(c) in _coverage() else "□" for c in text)


def width(text: str) -> int:
    """Roughly how many letters wide a text is; letters of Chinese, Japanese and Korean count double."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


@cache
def _measure(text: str) -> float:
    """Width in inches."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family=list(families()), size=_SIZE)
    width, _, _ = text_to_path.get_text_width_height_descent(drawable(text), font, ismath=False)
    if text.isspace():
        # a path has no ink for spaces: take what the space adds between two letters
        return (_measure(f"a{text}a")) - _measure("aa")
    return float(width) / 72

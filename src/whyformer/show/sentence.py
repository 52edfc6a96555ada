"""A listing of highlighted sentences as a figure: under each class, one line a method."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from whyformer.show import colours
from whyformer.show.layout import Section
from whyformer.show.paper import GREY, Paper, measure
from whyformer.show.words import heading, right_to_left, short, visible, words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from whyformer.explanation.result import Explanation

_WIDTH, _LEFT, _MARGIN = 9.0, 2.1, 0.15  # inches: page, where sentences begin, edge
_SIZE, _LINE, _HEAD, _FOOT = 10.0, 0.26, 0.36, 0.42  # points; inches a line, a heading, the legend
_measure = partial(measure, size=_SIZE)


@dataclass(frozen=True)
class _Box:
    """A piece of text at (x, y) inches from the left and the top of its block, ``width`` inches wide."""

    x: float
    y: float
    width: float
    text: str
    unit: float


def figure(parts: list[Section]) -> Figure:
    """Each sentence under each target, one method a line, words on their colours; a legend, and the warnings."""
    blocks: list[tuple[str | None, str, list[_Box], float]] = []
    for named, rows in (column for part in parts for column in part.columns):
        for i, (name, e) in enumerate(rows):
            blocks.append((heading(named) if i == 0 else None, name, *_flow(e)))
    tall = _FOOT + _MARGIN + sum(high + (_HEAD if head is not None else 0) for head, _, _, high in blocks)
    shown = (e for part in parts for row in part.cells for e in row if e is not None)
    paper = Paper(_WIDTH, tall, shown)
    y = _MARGIN
    for head, name, boxes, high in blocks:
        if head is not None:
            paper.write(short(head, 90), _MARGIN, y + _HEAD / 2, 10.5, weight="bold", va="center")
            y += _HEAD
        paper.write(short(name, 30), _MARGIN, y + _LINE / 2, 8, va="center", color=GREY)
        for box in boxes:
            x, top = _LEFT + box.x, y + box.y
            if box.unit:
                paper.box(x, top + 0.1 * _LINE, box.width, 0.8 * _LINE, colours.code(colours.ground(box.unit)))
            paper.write(box.text, x, top + _LINE / 2, _SIZE, va="center", ha="left", zorder=5)
        y += high
    _legend(paper, y + 0.12)
    return paper.figure


def _flow(e: Explanation) -> tuple[list[_Box], float]:
    """Words laid out in lines, from the right where the sentence runs that way; and the height of it all."""
    pieces, rest = words(e)
    note = colours.scale_of(e).note
    room = _WIDTH - _LEFT - _MARGIN
    mirrored = right_to_left("".join(p.text for p in pieces))
    boxes: list[_Box] = []
    x = y = 0.0
    for gap, text, unit in [*((p.gap, p.text, p.unit) for p in pieces), ("", rest.rstrip(), 0.0)]:
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
    if note is not None:
        boxes.append(_Box(0.0, y + _LINE, 0.0, f"({note})", 0.0))
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


def _legend(paper: Paper, y: float) -> None:
    axes = paper.axes(_LEFT, y, 1.4, 0.09)
    axes.imshow(np.array([colours.ramp(colours.Scale(1.0, True), 128, words=True)], dtype=np.uint8), aspect="auto")
    write = partial(paper.write, y=y + 0.045, size=7, va="center", color=GREY)
    write("against", _LEFT - 0.06, ha="right")
    write("for the class; each line scaled by its own largest score", _LEFT + 1.46, ha="left")

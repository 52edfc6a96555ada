"""Figures of highlighted texts: a line for each method under each class."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from whyformer.show import colours
from whyformer.show.layout import Section
from whyformer.show.paper import Paper
from whyformer.show.typeface import fitted, measure
from whyformer.show.words import (
    Word,
    heading,
    right_to_left,
    special_tokens,
    truncated_parts,
    visible,
    words,
)

if TYPE_CHECKING:
    from whyformer.explanation.result import Explanation

_WIDTH, _LEFT, _MARGIN, _KEY = 9.0, 2.1, 0.15, 4.3  # inches: page, left of the texts, edge, legend
_SIZE = 10.0  # points
_LINE, _HEAD, _LEGEND = 0.26, 0.36, 0.2  # inches: a line, a heading, a line of the legend
_WORDS, _LEAST, _BESIDE = 400, 40, 8  # words of a figure; at least of each text; on either side of a strong word
_LONGEST = 300  # characters of a word that are shown
_measure = partial(measure, size=_SIZE)


@dataclass(frozen=True)
class _Box:
    """A piece of text at (x, y) in its block, ``width`` wide, in inches."""

    x: float
    y: float
    width: float
    text: str
    background: colours.Bytes | None = None
    unknown: bool = False
    unread: bool = False
    muted: bool = False
    mirrored: bool = False

    @property
    def reach(self) -> float:
        """Distance of its end from the edge at which its line begins."""
        return _WIDTH - _LEFT - _MARGIN - self.x if self.mirrored else self.x + self.width


def draw(paper: Paper, y: float, parts: list[Section]) -> tuple[float, float]:
    """Draw each text under each target below the height y, a line for each method, words on their colours; below them
    the legend. Return the width, and the height below it."""
    blocks: list[tuple[str | None, str, list[_Box], float]] = []
    columns = [column for part in parts for column in part.columns]
    most = max(_LEAST, _WORDS // sum(len(rows) for _, rows in columns))
    for named, rows in columns:
        question = fitted(partial(heading, named), _WIDTH - 2 * _MARGIN, 10.5, "bold")
        for i, (name, e) in enumerate(rows):
            blocks.append((question if i == 0 else None, name, *_flow(e, most)))
    explanations = [e for part in parts for e in part.explanations]
    placed = [box for *_, boxes, _ in blocks for box in boxes]
    widest = max([_KEY, *(box.reach for box in placed)])
    titles = max(measure(head, 10.5, "bold") for head, *_ in blocks if head is not None)
    width = min(_WIDTH, max(_LEFT + widest, titles + _MARGIN) + _MARGIN)
    y += _MARGIN
    for head, name, boxes, high in blocks:
        if head is not None:
            paper.write(head, _MARGIN, y + _HEAD / 2, 10.5, weight="bold", va="center")
            y += _HEAD
        lines = name.split(" · ")
        size = 8 if len(lines) == 1 else 6.5
        label = [fitted(line, _LEFT - _MARGIN - 0.1, size) for line in lines]
        paper.write("\n".join(label), _MARGIN, y + _LINE / 2, size, va="center", color=colours.SOFT)
        for box in boxes:
            _place(paper, box, _LEFT + box.x - (_WIDTH - width if box.mirrored else 0), y + box.y)
        y += high
    return width, _legend(paper, y, explanations, any(box.unknown for box in placed))


def _place(paper: Paper, box: _Box, x: float, y: float) -> None:
    """Draw a box: on its background, with dashes below unknown words, hatching behind truncated text."""
    top, high = y + 0.1 * _LINE, 0.8 * _LINE
    if box.unread:
        paper.box(x, top, box.width, high, facecolor="#f2f2f2", edgecolor="#bdbdbd", hatch="////")
    elif box.background is not None:
        paper.box(x, top, box.width, high, colours.code(box.background))
    if box.unknown:
        for at in np.arange(0, box.width, 0.07):
            paper.box(x + at, top + high, min(0.045, box.width - at), 0.016, colours.INK)
    size, ink = (_SIZE - 2, colours.SOFT) if box.unread or box.muted else (_SIZE, colours.INK)
    paper.write(box.text, x, y + _LINE / 2, size, va="center", ha="left", zorder=5, color=ink)


def _flow(e: Explanation, most: int) -> tuple[list[_Box], float]:
    """Return the boxes of a text in lines, from right to left if the text runs so, and their height.

    Of more than ``most`` words those around the strongest are shown, and the numbers of those left out.
    """
    pieces, rest = words(e)
    note = colours.scale_of(e).note
    room = _WIDTH - _LEFT - _MARGIN
    mirrored = right_to_left("".join(p.text for p in pieces))
    boxes: list[_Box] = []
    x = y = 0.0

    def put(text: str, **look: Any) -> None:
        nonlocal x, y
        if len(text) > _LONGEST:
            text = f"{text[:_LONGEST]}… ({len(text) - _LONGEST:,} characters more)"
        for chunk in _chunks(visible(text), room):
            wide = _measure(chunk)
            if x + wide > room and x:
                x, y = 0.0, y + _LINE
            boxes.append(_Box(room - x - wide if mirrored else x, y, wide, chunk, mirrored=mirrored, **look))
            x += wide

    cut = truncated_parts(e)
    for part in (part for part in cut if part.before):
        put(f" … {part.label} ", unread=True)
    strongest, skipped = _around_the_strongest(pieces, most), 0
    for i, piece in enumerate(pieces):
        if i not in strongest:
            skipped += 1
            continue
        if skipped:
            put(f" … {skipped:,} weaker words … ", muted=True)
            skipped = 0
        gap = piece.gap
        x += _measure(" ") if gap[:1].isspace() and x else 0
        put(gap.strip())
        x += _measure(" ") if gap[-1:].isspace() and gap.strip() else 0
        background = colours.background(piece.unit, piece.signed) if piece.unit else None
        put(piece.text, background=background, unknown=piece.unknown)
    put(f" … {skipped:,} weaker words" if skipped else rest.rstrip(), muted=bool(skipped))
    if (special := special_tokens(e)) is not None:
        x += _measure("  ")
        put(special.text, muted=True)
    for part in (part for part in cut if not part.before):
        x += _measure(" ")
        put(f" {part.label} … ", unread=True)
    if note is not None:
        boxes.append(_Box(0.0, y + _LINE, 0.0, f"({note})"))
        y += _LINE
    return boxes, y + _LINE + 0.06


def _around_the_strongest(pieces: list[Word], most: int) -> set[int]:
    """Return the indices of words to show: all, or the strongest with some words on either side."""
    if len(pieces) <= most:
        return set(range(len(pieces)))
    chosen: set[int] = set()
    for i in sorted(range(len(pieces)), key=lambda i: -abs(pieces[i].unit)):
        chosen.update(range(max(0, i - _BESIDE), min(len(pieces), i + _BESIDE + 1)))
        if len(chosen) >= most:
            break
    return chosen


def _chunks(text: str, room: float) -> list[str]:
    """Cut a text that is longer than a line."""
    chunks = []
    while text:
        count = len(text)
        while count > 1 and _measure(text[:count]) > room:
            count = count * 3 // 4
        chunks.append(text[:count])
        text = text[count:]
    return chunks


def _legend(paper: Paper, y: float, explanations: list[Explanation], unknown: bool) -> float:
    """Draw the meanings of the colours, and that of dashes below ``unknown`` words; return the height below them."""

    def write(text: str, x: float, ha: str = "left") -> None:
        paper.write(text, x, y + 0.045, 7, va="center", color=colours.SOFT, ha=ha)

    note = "; each line scaled by its own largest score"
    labels: dict[bool, str] = {}
    for e in explanations:
        signed = colours.scale_of(e).signed
        favour = "for the output" if e.numeric else "for the class"
        labels.setdefault(signed, (favour if signed else "mattered (no sign)") + ("" if labels else note))
    y += 0.12
    for signed, label in labels.items():
        ramp = np.array([colours.ramp(colours.Scale(1.0, signed), 128, words=True)], dtype=np.uint8)
        paper.axes(_LEFT, y, 1.4, 0.09).imshow(ramp, aspect="auto")
        if signed:
            write("against", _LEFT - 0.06, "right")
        write(label, _LEFT + 1.46)
        y += _LEGEND
    if unknown:
        _place(paper, _Box(0, 0, 1.4, "", unknown=True), _LEFT, y - 0.8 * _LINE)
        write("unknown to the model ([UNK])", _LEFT + 1.46)
        y += _LEGEND
    return y + 0.1

"""A film strip: for each generated word the picture with the word's map, the word beneath."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING, Any

from PIL import Image

from whyformer.errors import InputError
from whyformer.show import answers, colours
from whyformer.show.look import Look
from whyformer.show.painting import base, drawn_size, overlay
from whyformer.show.paper import Paper
from whyformer.show.words import figure_of, short, visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from whyformer.explanation.generation import Generation
    from whyformer.explanation.result import Explanation
    from whyformer.show.answers import Conversation

_PAGE, _WIDE, _GAP = 11.0, 1.8, 0.12  # inches: of a line of pictures, of a picture at most, between pictures
_TOP, _FOOT = 0.5, 0.44  # above the first line (the prompt), and below each picture (its word)
_PIXELS = 500


def film(g: Generation, columns: int | None = None, *, picture: bool = True, **look: Any) -> Figure:
    """The pictures of a prompt once for every generated word (or what :meth:`Generation.by` made), in order.

    Each map is scaled by its own largest score, which stands beneath beside the word's probability.

    Args:
        columns: pictures side by side; as many as fit by default.
        picture: whether the plain picture stands in front.
        **look: options of :class:`~whyformer.show.look.Look`.

    Raises:
        InputError: the prompt had no picture, or its scores have no place on it.
    """
    Look.of(look)
    if not g.seen:
        raise InputError("this text was generated without a picture, so there is no film strip: show its words instead")
    talk = answers.conversation(g)
    g = talk.g
    shown = [[g[t].part(name) for t in range(len(g))] for name in g.seen]
    ratio = max(high / wide for own in shown for high, wide in [drawn_size(own[0])])
    wide = _WIDE / max(1.0, ratio / 1.5)
    high = wide * ratio
    cells = len(g) + picture
    columns = columns or max(1, min(cells, int(_PAGE / (wide + _GAP))))
    lines = math.ceil(cells / columns)
    width = max(2.6, _GAP + min(columns, cells) * (wide + _GAP))
    signed = any(colours.scale_of(e).signed for own in shown for e in own)
    claim = colours.legend(signed, "the word")
    said = textwrap.wrap(f"{claim}; each map by its own largest score", int(width * 19))
    above = _TOP + 0.12 * len(said)
    paper = Paper(width, above + len(shown) * lines * (high + _FOOT), [e for own in shown for e in own])
    paper.write(short(visible(_question(talk)), int(width * 13)), _GAP, 0.08, 9, va="top")
    paper.write(answers.source(g), _GAP, 0.27, 7, va="top", color=colours.SOFT)
    for i, line in enumerate(said):
        paper.write(line, _GAP, 0.43 + 0.12 * i, 6.5, va="top", color=colours.SOFT)
    for row, own in enumerate(shown):
        for number in range(cells):
            x = _GAP + number % columns * (wide + _GAP)
            y = above + (row * lines + number // columns) * (high + _FOOT)
            step = number - picture
            if step < 0:
                _plain(paper, own[0], x, y, wide, high)
            else:
                paper.picture(overlay(own[step], longest=_PIXELS, **look), x, y, wide, high)
                _word(paper, g, own[step], step, x + wide / 2, y + high, wide)
    return paper.figure


def _question(talk: Conversation) -> str:
    """The prompt without the places for its pictures, of a conversation the message that is answered."""
    asked = [m for m in talk.messages if m.first < talk.g.start]
    places = asked[-1].places if talk.g.turns else range(talk.g.start)
    pieces = [talk.g.pieces[i] for i in places if i < talk.g.start]
    return "".join(p for p in pieces if p.strip() != answers.PICTURE).strip()


def _plain(paper: Paper, e: Explanation, x: float, y: float, wide: float, high: float) -> None:
    plain = base(e)
    if plain is not None:
        paper.picture(plain.resize(drawn_size(e, 0, _PIXELS)[::-1], Image.Resampling.BICUBIC), x, y, wide, high)


def _word(paper: Paper, g: Generation, e: Explanation, step: int, x: float, y: float, wide: float) -> None:
    """The word beneath its picture, and in small letters its probability and the map's largest score."""
    word = visible(g.pieces[g.start + step].strip() or g.pieces[g.start + step])
    paper.write(short(word, int(wide * 9)), x, y + 0.05, 11, ha="center", va="top", weight="bold")
    chance = f"p {g.probability(step):.2f} · " if g.unit == "token" else ""
    largest = figure_of(float(colours.largest(e)))
    paper.write(f"{chance}largest {largest}", x, y + 0.25, 6, ha="center", va="top", color=colours.SOFT)

"""Film strips: the picture with the map of each generated word, above the word."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from whyformer.errors import InputError, check_count
from whyformer.show import answers, colours
from whyformer.show.look import Look
from whyformer.show.painting import drawn_size, overlay, plain
from whyformer.show.paper import Paper
from whyformer.show.typeface import fitted
from whyformer.show.words import format_score, notes, visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from whyformer.explanation.generation import Generation
    from whyformer.explanation.result import Explanation
    from whyformer.show.answers import Conversation

_PAGE, _WIDE, _GAP = 11.0, 1.8, 0.12  # inches: of a line of pictures, of a picture at most, between pictures
_TOP, _FOOT = 0.5, 0.44  # inches: above the first line (the prompt), and below each picture (its word)
_PIXELS = 500


def film(g: Generation, columns: int | None = None, *, picture: bool = True, **look: Any) -> Figure:
    """Return a figure of the pictures of a prompt with the map of each generated word (or unit of
    :meth:`Generation.by`), in order.

    Each map is scaled by its largest score, which stands below with the probability of the word.

    Args:
        columns: number of pictures side by side; by default as many as fit.
        picture: start with the picture without a map.
        **look: options of :class:`~whyformer.show.look.Look`.

    Raises:
        InputError: the prompt has no picture, or the scores are not on a grid.
    """
    Look.of(look)
    if not hasattr(g, "picture_maps"):
        raise InputError("film draws the result of whyformer.explain_generation; figure draws explanations")
    if not g.picture_maps:
        raise InputError("this text was generated without a picture, so there is no film strip: show its words instead")
    talk = answers.conversation(g)
    g = talk.g
    films = [[g[t].part(name) for t in range(len(g))] for name in g.picture_maps]
    ratio = max(high / wide for maps in films for high, wide in [drawn_size(maps[0])])
    wide = _WIDE / max(1.0, ratio / 1.5)
    high = wide * ratio
    cells = len(g) + picture
    columns = max(1, min(cells, int(_PAGE / (wide + _GAP)))) if columns is None else columns
    check_count("columns", columns)
    lines = math.ceil(cells / columns)
    width = max(2.6, _GAP + min(columns, cells) * (wide + _GAP))
    signed = any(colours.scale_of(e).signed for maps in films for e in maps)
    legend = f"{colours.legend(signed, 'the word')}; each map scaled by its own largest score"
    paper = Paper()
    paper.write(fitted(visible(_question(talk)), width - 2 * _GAP, 9), _GAP, 0.08, 9, va="top")
    paper.write(answers.source(g), _GAP, 0.27, 7, va="top", color=colours.SOFT)
    for row, maps in enumerate(films):
        for number in range(cells):
            x = _GAP + number % columns * (wide + _GAP)
            y = _TOP + (row * lines + number // columns) * (high + _FOOT)
            step = number - picture
            pixels = overlay(maps[step], longest=_PIXELS, **look) if step >= 0 else plain(maps[0], _PIXELS)
            if pixels is not None:
                paper.picture(pixels, x, y, wide, high)
            if step >= 0:
                _word(paper, g, maps[step], step, x + wide / 2, y + high, wide)
    tall = _TOP + len(films) * lines * (high + _FOOT)
    return paper.finished(width, tall, [legend, *notes(e for maps in films for e in maps)])


def _question(talk: Conversation) -> str:
    """Return the prompt without placeholders of pictures; of a conversation its last message."""
    prompt = [m for m in talk.messages if m.first < talk.g.start]
    places = prompt[-1].places if talk.g.turns else range(talk.g.start)
    pieces = [talk.g.pieces[i] for i in places if i < talk.g.start]
    return "".join(p for p in pieces if p.strip() != answers.PICTURE).strip()


def _word(paper: Paper, g: Generation, e: Explanation, step: int, x: float, y: float, wide: float) -> None:
    """Write a word below its picture, and in small letters its probability and the largest score of its map."""
    word = visible(g.pieces[g.start + step].strip() or g.pieces[g.start + step])
    paper.write(fitted(word, wide, 11, "bold"), x, y + 0.05, 11, ha="center", va="top", weight="bold")
    probability = f"p {g.probability(step):.2f} · " if g.unit == "token" else ""
    largest = format_score(float(colours.largest(e)))
    paper.write(f"{probability}largest {largest}", x, y + 0.25, 6, ha="center", va="top", color=colours.SOFT)

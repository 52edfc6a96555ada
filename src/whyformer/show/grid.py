"""Explained answers as a matrix: rows are generated tokens, columns the tokens before them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from whyformer.show import answers, colours
from whyformer.show.paper import Paper
from whyformer.show.typeface import fitted, measure
from whyformer.show.words import short, visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from whyformer.explanation.generation import Generation
    from whyformer.show.answers import Conversation

_CELL, _SIZE, _LONGEST = 0.17, 7.0, 18  # inches, points, characters
_MOST = 90  # columns, beyond which tokens are merged
_ROLES, _EDGE = 0.24, 0.1  # inches: roles below the columns, the margin at the left
_NARROWEST = 3.8  # inches


def legend(talk: Conversation) -> str:
    """Return the meaning of the colours, and the share of tokens that are left out."""
    text = f"{colours.legend(talk.signed, 'what was written')}; weak rows are paler"
    return f"{text}; not shown: {special}" if (special := talk.special_note(None)) else text


def figure(g: Generation, bare: bool = False) -> Figure:
    """Return the matrix of an answer, each row on the scale of its step. More than 90 columns are merged into words,
    sentences or turns; ``bare`` leaves out title, legend and remarks, for a page that has them."""
    return drawn(answers.conversation(g, _MOST), bare)


def drawn(talk: Conversation, bare: bool = False) -> Figure:
    """Return :func:`figure` of a conversation."""
    talk = talk.compact()
    g = talk.g
    names = [short(answers.one_line(piece.strip() or piece).strip() or "␣", _LONGEST) for piece in g.pieces]
    columns = len(names) - 1 if len(names) > 1 else len(names)  # the last token has no scores
    left = max(measure(name, _SIZE) for name in names[g.start :]) + 0.25
    top = max(measure(name, _SIZE) for name in names[:columns]) + (0.15 if bare else 0.6)
    wide, high = columns * _CELL, len(g) * _CELL
    under = top + high + (_ROLES if talk.in_turns else 0.0)
    width = left + wide + 0.1 if bare else max(left + wide, _NARROWEST) + 0.2
    paper = Paper()
    if not bare:
        room = width - 2 * _EDGE
        paper.write(fitted(answers.question(talk), room, 9, "bold"), _EDGE, 0.1, 9, va="top", weight="bold")
        paper.write(fitted(answers.source(g), room, 6.5), _EDGE, 0.28, 6.5, va="top", color=colours.SOFT)
    painted = colours.paint(np.stack([talk.unit(t) for t in range(len(g))])[:, :columns], talk.signed)
    later = np.arange(columns)[None] >= g.start + np.arange(len(g))[:, None]
    painted[later] = 0.94
    axes = paper.axes(left, top, wide, high)
    axes.imshow(painted, interpolation="none", aspect="auto")
    for j, name in enumerate(names[:columns]):
        style = {"color": colours.SOFT} if j < g.start else {}
        paper.write(name, left + (j + 0.5) * _CELL, top - 0.05, _SIZE, va="bottom", ha="center", rotation=90, **style)
    for t, name in enumerate(names[g.start :]):
        paper.write(name, left - 0.06, top + (t + 0.5) * _CELL, _SIZE, va="center", ha="right")
    if talk.in_turns:
        _roles(paper, talk, left, top + high, columns)
    if bare:
        return paper.finished(width, under + 0.1)
    return paper.finished(width, under + 0.08, [legend(talk), *answers.remarks(g)])


def _roles(paper: Paper, talk: Conversation, left: float, y: float, columns: int) -> None:
    """Draw a line below the columns of each message, with its role if it fits."""
    for message in talk.messages:
        first, end = message.first, min(message.end, columns)
        if end <= first or (end == first + 1 and message.collapsed):  # the column is titled by the role
            continue
        x, wide = left + first * _CELL, (end - first) * _CELL
        paper.box(x + 0.02, y + 0.05, wide - 0.04, 0.012, colours.SOFT)
        if measure(label := visible(message.label), _SIZE) <= wide:
            paper.write(label, x + wide / 2, y + 0.09, _SIZE, va="top", ha="center", color=colours.SOFT)

"""A generated text in the terminal: each word with its probability and what it was made from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from whyformer.show.colours import array
from whyformer.show.words import figure_of, short, visible

if TYPE_CHECKING:
    from whyformer.explanation.generation import Generation
    from whyformer.explanation.result import Explanation

_STRONGEST = 4  # tokens that are named beside a word
_SHARE = 0.05  # of the largest score, below which a token is not named


def generated(g: Generation) -> str:
    """The text, then a line for each step: the word, its probability, how much of Σ |score| lies on the pictures and
    where the largest score on each lies, and the tokens with the largest scores."""
    lines = [f"{g.method}, what speaks for each word ({g.explained}):", "", f"  {visible(g.text.strip())}", ""]
    wide = max(len(visible(p.strip())) for p in g.pieces[g.generated]) + 2
    for t in range(len(g)):
        piece = g.pieces[g.start + t]
        word = visible(piece.strip() or piece)
        chance = f"p {g.probability(t):.2f}  " if g.unit == "token" else ""
        seen = [place for name in g.seen if (place := _place(g[t].part(name)))]
        lines.append(f"  {word:<{wide}}{chance}{_shares(g, t)}{'  '.join([*seen, _words(g, t)]).rstrip()}")
    return "\n".join([*lines, *(f"note: {note}" for note in g.notes)])


def _shares(g: Generation, step: int) -> str:
    """How much of all |score| is on the pictures."""
    if not g.seen:
        return ""
    seen = sum(float(np.abs(array(own.scores[step])).sum()) for own in g.seen.values())
    words = float(np.abs(array(g.matrix[step])).sum())
    return f"picture {seen / max(seen + words, 1e-300):4.0%}  "


def _place(e: Explanation) -> str:
    """Where on the picture the largest score lies, in its own pixels."""
    if e.geometry is None or not bool(e.scores.any()):
        return ""
    placed = np.nan_to_num(array(e.placed()))
    row, column = np.unravel_index(int(np.abs(placed).argmax()), placed.shape)
    return f"at x {column}, y {row}"


def _words(g: Generation, step: int) -> str:
    """The tokens with the largest scores, in the order of their size."""
    scores = array(g.matrix[step])
    order = np.argsort(-np.abs(scores), kind="stable")[:_STRONGEST]
    kept = [i for i in order.tolist() if abs(scores[i]) > _SHARE * np.abs(scores).max()]
    return "  ".join(f"{short(visible(g.pieces[i].strip()), 14)} {figure_of(float(scores[i]))}" for i in kept)

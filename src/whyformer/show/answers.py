"""What is drawn of a generated text: each step's scores on a scale of their own, and its strongest words."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from whyformer.explanation import units
from whyformer.show import colours
from whyformer.show.colours import Array, array
from whyformer.show.words import method_name, visible

if TYPE_CHECKING:
    from whyformer.explanation.generation import Generation
    from whyformer.explanation.result import Explanation

CANDIDATES = 3
PICTURE = "[picture]"


@dataclass(frozen=True)
class TokenReason:
    """A word before a step, with its score and the score on the step's scale (-1 to 1)."""

    text: str
    score: float
    unit: float


def folded(g: Generation) -> Generation:
    """The same with each run of tokens that stand for a picture as one: what they have of scores is the picture's."""
    if not g.seen:
        return g
    silent = (array(g.matrix) == 0).all(0)

    def key(i: int) -> tuple[object, ...]:
        return (g.pieces[i], i < g.source) if silent[i] and i < g.start else (i,)

    runs = [list(places) for _, places in groupby(range(len(g.pieces)), key)]
    named = {own[0]: f" {PICTURE}" if own[1:] else g.pieces[own[0]] for own in runs}
    if len(named) == len(g.pieces):
        return g
    at = {bound: i for i, bound in enumerate([*named, len(g.pieces)])}
    kept = list(named)
    return replace(
        g, matrix=g.matrix[:, kept], pieces=list(named.values()), tokens=[g.tokens[i] for i in kept],
        ids=[g.ids[i] for i in kept], start=at[g.start], source=at.get(g.source, 0),
        turns=[(role, at[a], at[b]) for role, a, b in g.turns if a in at and b in at],
        groups=None if g.groups is None else [g.groups[i] for i in kept],
    )  # fmt: skip


def readable(g: Generation, most: int) -> Generation:
    """The answer in tokens; where these and those before them are more than ``most``, in words, sentences or turns."""
    g = folded(g)
    for wider in ("word", "sentence", "turn"):
        if len(g.pieces) <= most or g.unit != "token":
            break
        merged = g.by(wider)
        g = merged if len(merged.pieces) <= most or wider == "turn" else g
    return g


def signed(g: Generation) -> bool:
    """Whether scores of this answer may speak against what was written: then their colours are two."""
    noted = (*g.diagnostics, *(one.first.diagnostics for one in g.seen.values()))
    known = any(own.get("signed") is True for own in noted)
    return known or any(colours.scale(row).signed for row in array(g.matrix))


def scales(g: Generation) -> list[colours.Scale]:
    """The scale of each step: up to its largest |score|, or a tenth of the largest of all steps if that is more, so
    that a step whose scores are next to nothing is pale.

    The most recent token usually dominates, for the step is read there. It is left out of the limit, and drawn in full
    colour where it lies beyond.
    """
    rows = [array(row)[: g.start + step] for step, row in enumerate(g.matrix)]
    limits = [colours.scale(row[:-1]).limit or colours.scale(row).limit for row in rows]
    least, whole = max(limits) / 10, [colours.scale(row) for row in rows]
    found = [(max(limit, least), one) for limit, one in zip(limits, whole, strict=True)]
    return [colours.Scale(limit, one.signed, clipped=limit < one.limit) for limit, one in found]


def scale_of(g: Generation, step: int) -> colours.Scale:
    """The scale of one step, see :func:`scales`."""
    return scales(g)[step]


def unit(g: Generation) -> Array:
    """``[T, N]`` the matrix with each row on its scale, -1 to 1."""
    return np.stack([one.unit(array(row)) for one, row in zip(scales(g), g.matrix, strict=True)])


def served(g: Generation) -> Array:
    """``[T, N]`` for each token the steps that it served: the matrix with each column by its largest |score|."""
    rows = array(g.matrix)
    largest = np.abs(rows).max(0)
    return rows / np.where(largest > 0, largest, 1)


def reasons(g: Generation, step: int, count: int = 4) -> list[TokenReason]:
    """The words before a step with the largest |score|, the largest first; the word at which it is read comes last."""
    row, scale = array(g.matrix[step])[: g.start + step], scale_of(g, step)
    ranges = units.words_of(g.pieces[: len(row)], {g.source, *((g.start,) if step else ())})
    sums = map(float, units.unit_scores(row, (range(a, b) for a, b in ranges)))
    words = [
        TokenReason(shown("".join(g.pieces[a:b])).strip(), score, float(scale.unit(np.array(score))))
        for (a, b), score in zip(ranges, sums, strict=True)
    ]
    last, words = words[-1:], [w for w in words[:-1] if w.score]
    best = sorted(words, key=lambda w: -abs(w.score))[:count]
    return best + [w for w in last if w.score and len(best) < count]


def share_seen(g: Generation, step: int) -> float:
    """How much of all |score| of a step lies on the pictures of the prompt, 0 to 1."""
    seen = sum(float(np.abs(array(own.scores[step])).sum()) for own in g.seen.values())
    words = float(np.abs(array(g.matrix[step])).sum())
    return seen / (seen + words) if seen else 0.0


def seen(g: Generation, step: int) -> str:
    """How much of a step's scores is on the pictures, and where on each the largest lies, in its own pixels."""
    if not g.seen:
        return ""
    places = [place for name in g.seen if (place := _place(g[step].part(name)))]
    return f"picture {100 * share_seen(g, step):.0f}%" + (f" ({', '.join(places)})" if places else "")


def _place(e: Explanation) -> str:
    if e.geometry is None or not bool(e.scores.any()):
        return ""
    placed = np.nan_to_num(array(e.placed()))
    row, column = np.unravel_index(int(np.abs(placed).argmax()), placed.shape)
    return f"most at x {column}, y {row}"


def others(g: Generation, step: int) -> list[tuple[str, float]]:
    """(text, probability) of the likeliest tokens that were not written at a step."""
    if g.unit != "token":
        return []
    token = g.ids[g.start + step]
    return [(name, share) for i, name, _, share in g.candidates(step, CANDIDATES + 1) if i != token][:CANDIDATES]


def shown(piece: str) -> str:
    """A token's text with line breaks and tabs made visible, for one line."""
    return visible(piece.replace("\n", "⏎").replace("\t", "⇥"))


def title(g: Generation) -> str:
    """What is explained, in words: "any token" by a method whose maps are the same whatever token was written."""
    return f"{method_name(g[0])}, " + (f"any {g.unit}" if agnostic(g) else f"{g.explained} of each {g.unit}")


def agnostic(g: Generation) -> bool:
    """Whether the scores do not depend on which token was written."""
    return bool(g.diagnostics) and all(own.get("class_specific") is False for own in g.diagnostics)


def remarks(g: Generation) -> list[str]:
    """Notes on the prompt and warnings of steps, safe to print; those that differ by numbers alone once."""
    warned = [line for own in g.diagnostics for one in own.get("warnings", ()) for line in _lines(one)]
    alike: dict[str, list[str]] = {}
    for line in warned:
        alike.setdefault(re.sub(r"\d+", "", line), []).append(line)
    said = [f"warning: {own[0]}" + (f" ({len(own)} of {len(g)} steps)" if own[1:] else "") for own in alike.values()]
    return [visible(line) for line in [*g.notes, *said]]


def _lines(warnings: object) -> list[str]:
    return [warnings] if isinstance(warnings, str) else [str(w) for w in warnings] if isinstance(warnings, list) else []

"""Bars: the strongest features of one explanation with their signs, and the words of a class over many samples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from whyformer.errors import InputError
from whyformer.explanation.counts import amount
from whyformer.show import colours
from whyformer.show.colours import array
from whyformer.show.layout import laid_out, listed
from whyformer.show.paper import Paper
from whyformer.show.typeface import measure
from whyformer.show.words import agnostic, claims, figure_of, heading, method_name, short, target_name, visible, words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from whyformer.explanation.result import Explanation

Row = tuple[str, float]  # (name, score)
_LEFT, _WIDE, _RIGHT, _LINE, _TOP = 2.2, 3.4, 0.7, 0.24, 0.62  # inches: names, bars, figures, a row, the heading


def bars(e: Explanation, k: int = 10, sample: int = 0) -> Figure:
    """The k features with the largest |score| of one sample as bars, and below them the sum of all others.

    Words of a text, stretches of a sound, patches or pixels of a picture. Where the scores have no sign, their colour
    has none either.

    Raises:
        InputError: k is not at least 1.
    """
    _check_count(k)
    one = laid_out(e[sample], smooth=0)
    best = strongest(one)
    shown, rest = best[:k], best[k:]
    title = f"{method_name(one)}: {heading(one)}"
    return _drawn(title, shown, rest, colours.scale_of(one).signed, claims(one), [one])


def summary(explanations: Explanation | Iterable[Explanation], k: int = 15, *, least: int = 1) -> Figure:
    """The words that speak most for (and against) one class, over many samples: bars of the mean score of each word.

    Args:
        explanations: of texts, by one method, for one class.
        k: so many words, by |mean score|.
        least: leave out words that occur fewer times.

    Raises:
        InputError: pictures, several methods or several classes.
    """
    singles = listed(explanations, smooth=0)
    if not singles or any(e.level != "token" for e in singles):
        raise InputError("a summary is of words over many texts: give explanations of texts")
    kinds = {(method_name(e), target_name(e)) for e in singles}
    if len(kinds) > 1:
        named = ", ".join(sorted(f"{method} for {target}" for method, target in kinds)[:4])
        raise InputError(f"a summary is of one method and one class, and these are {named}: choose some of them")
    found: dict[str, list[float]] = defaultdict(list)
    for e in singles:
        for word in words(e)[0]:
            if any(letter.isalnum() for letter in word.text):
                found[word.text.casefold()].append(word.score)
    rows = [(f"{name} ×{len(s)}", sum(s) / len(s)) for name, s in found.items() if len(s) >= least]
    if not rows:
        raise InputError(f"no word occurs at least {least} times in these {len(singles)} texts")
    best = sorted(rows, key=lambda row: -abs(row[1]))
    ((method, target),) = kinds
    signed = any(colours.scale_of(e).signed for e in singles)
    title = f"{method}: {target}, mean over {amount(len(singles), 'text')}"
    claimed = ("against", f"for {target}") if signed and not agnostic(singles[0]) else claims(singles[0])
    return _drawn(title, best[:k], [], signed, claimed, [])


def waterfall(e: Explanation, k: int = 10, sample: int = 0) -> Figure:
    """From nothing to what the model says: the k features with the largest |score| of one sample, each beginning where
    the one before it ends, and all others together.

    The last bar ends at the logit of the class (or the number) that is explained, Σ scores above where the first
    begins. Where scores add up to f(x) − f(baseline), as those of ``integrated_gradients`` do, that is f(baseline).

    Raises:
        InputError: the scores have no sign, so that they do not add up to anything; what is explained is no single
            output of the model; k is not at least 1.
    """
    _check_count(k)
    one = laid_out(e[sample], smooth=0)
    if not colours.scale_of(one).signed:
        raise InputError(f"the scores of {one.method} have no sign, so they do not add up to the output: see bars()")
    index = int(one.target[0])
    plain = one.target_names is None or one.target_names[0] == one.label(index) or one.numeric
    end = one.logit(index) if plain else None
    if end is None:
        raise InputError(f"what is explained, {target_name(one)}, is no single output of the model: see bars()")
    rows = strongest(one)
    total = float(one.scores.double().sum())
    held = sum(score for _, score in rows)
    if abs(total - held) > 1e-6 * max(1.0, float(one.scores.abs().sum())):
        rows.append(("special tokens", total - held))
    shown, rest = rows[:k], rows[k:]
    if rest:
        shown = [*shown, (f"sum of {len(rest):,} others", sum(score for _, score in rest))]
    return _steps(f"{method_name(one)}: {heading(one)}", shown[::-1], end - total, one)


def _steps(title: str, rows: list[Row], start: float, e: Explanation) -> Figure:
    """Bars of which each begins where the one before it ends, the first at ``start``."""
    ends = np.cumsum([start, *(score for _, score in rows)])
    low, high = float(ends.min()), float(ends.max())
    paper = Paper(_LEFT + _WIDE + 2 * _RIGHT, _TOP + (len(rows) + 1) * _LINE + 0.2, [e])
    paper.write(short(title, 80), 0.1, 0.12, 10, va="top", weight="bold")

    def at(value: float) -> float:
        return _LEFT + _RIGHT + (value - low) / ((high - low) or 1.0) * _WIDE

    y = _TOP
    paper.write(f"begins at {figure_of(float(ends[0]))}", at(float(ends[0])), y - 0.08, 7, ha="center", va="bottom")
    for (name, score), begin in zip(rows, ends.tolist(), strict=False):
        left, right = sorted((at(begin), at(begin + score)))
        paper.box(left, y + 0.04, max(right - left, 0.01), _LINE - 0.08, colours.code(colours.ink(score, True)))
        paper.write(_fitting(name), _LEFT - 0.1, y + _LINE / 2, 8, ha="right", va="center", color=colours.INK)
        paper.write(f"{score:+.3g}", right + 0.05, y + _LINE / 2, 7, va="center")
        y += _LINE
    paper.write(f"ends at {figure_of(float(ends[-1]))}", at(float(ends[-1])), y + 0.06, 7, ha="center", va="top")
    return paper.figure


def _check_count(k: int) -> None:
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise InputError(f"k must be a whole number of at least 1, not {k!r}")


def strongest(e: Explanation) -> list[Row]:
    """(name, score) of each word of a text, stretch of a sound, patch or pixel of one sample, by |score|."""
    return sorted(_features(e), key=lambda row: -abs(row[1]))


def _features(e: Explanation) -> list[Row]:
    if e.level == "token":
        return [(visible(word.text), word.score) for word in words(e)[0]]
    scores = array(e.scores[0]).reshape(-1).tolist()
    across = e.grid[1] if e.level == "patch" and e.grid is not None else int(e.scores.shape[-1])
    return [(f"{e.level} in row {i // across}, column {i % across}", score) for i, score in enumerate(scores)]


def _fitting(name: str) -> str:
    """As much of a name as there is room for."""
    letters = 34
    while letters > 4 and measure(short(name, letters), 8) > _LEFT - 0.2:
        letters -= 1
    return short(name, letters)


def _drawn(
    title: str, shown: list[Row], rest: list[Row], signed: bool, claimed: tuple[str, str], warned: list[Explanation]
) -> Figure:
    rows = [*shown, (f"sum of {len(rest):,} others", sum(score for _, score in rest))] if rest else shown
    limit = max((abs(score) for _, score in rows), default=0.0) or 1.0
    start = _LEFT + (_RIGHT if any(score < 0 for _, score in rows) else 0)  # their figures stand left of the bars
    paper = Paper(start + _WIDE + _RIGHT, _TOP + len(rows) * _LINE + 0.3, warned)
    paper.write(short(title, 80), 0.1, 0.12, 10, va="top", weight="bold")
    middle = start + (_WIDE / 2 if signed else 0)
    reach = _WIDE / 2 if signed else _WIDE
    for i, (name, score) in enumerate(rows):
        y, long = _TOP + i * _LINE, abs(score) / limit * reach
        aside = bool(rest) and i == len(rows) - 1
        strong = "#b9bec6" if aside else colours.code(colours.ink(score, signed))
        left = middle - long if score < 0 else middle
        paper.box(left, y + 0.04, long, _LINE - 0.08, strong)
        tone = colours.SOFT if aside else colours.INK
        paper.write(_fitting(name), _LEFT - 0.1, y + _LINE / 2, 8, ha="right", va="center", color=tone)
        side = "right" if score < 0 else "left"
        at = left - 0.05 if score < 0 else left + long + 0.05
        paper.write(figure_of(score), at, y + _LINE / 2, 7, ha=side, va="center")
    paper.box(middle - 0.005, _TOP - 0.03, 0.01, len(rows) * _LINE + 0.06, "#888888")
    foot = _TOP + len(rows) * _LINE + 0.12
    if claimed[0]:
        paper.write(claimed[0], start, foot, 7, va="top", color=colours.code(colours.NEGATIVE))
    ink = colours.code(colours.ink(1.0, signed))
    paper.write(short(claimed[1], 50), start + _WIDE, foot, 7, va="top", ha="right", color=ink)
    return paper.figure

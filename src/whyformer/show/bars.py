"""Bars of the strongest features of an explanation, and of the words for a class over many samples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from whyformer.errors import InputError
from whyformer.explanation.counts import amount
from whyformer.show import colours
from whyformer.show.colours import array
from whyformer.show.layout import prepared, prepared_samples
from whyformer.show.paper import Paper
from whyformer.show.typeface import measure
from whyformer.show.words import (
    agnostic,
    format_score,
    heading,
    legend_labels,
    method_name,
    notes,
    position_name,
    short,
    target_name,
    visible,
    words,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from whyformer.explanation.result import Explanation

Row = tuple[str, float]  # (name, score)
_LEFT, _WIDE, _RIGHT, _LINE, _TOP = 2.2, 3.4, 0.7, 0.24, 0.62  # inches: names, bars, figures, a row, the heading


def bars(e: Explanation, k: int = 10, sample: int = 0) -> Figure:
    """Draw the k features with the largest |score| of a sample as bars, and below them the sum of all others.

    Features are words of a text, segments of a sound, patches or pixels of a picture. Scores without a sign have the
    colour of scores without a sign.

    Raises:
        InputError: k is not at least 1.
    """
    _check_count(k)
    e = prepared(e[sample], smooth=0)
    best = strongest(e)
    shown, rest = best[:k], best[k:]
    title = f"{heading(e)} · {method_name(e)}"
    return _drawn(title, shown, rest, colours.scale_of(e).signed, legend_labels(e), [e])


def summary(explanations: Explanation | Iterable[Explanation], k: int = 15, *, least: int = 1) -> Figure:
    """Draw the words with the largest |mean score| for a class over many samples as bars.

    Args:
        explanations: of texts, by one method, for one class.
        k: number of words.
        least: leave out words that occur less often.

    Raises:
        InputError: pictures, several methods or several classes.
    """
    singles = prepared_samples(explanations, smooth=0)
    if not singles or any(e.level != "token" for e in singles):
        raise InputError("a summary needs explanations of texts")
    kinds = {(method_name(e), target_name(e)) for e in singles}
    if len(kinds) > 1:
        named = ", ".join(sorted(f"{method} for {target}" for method, target in kinds)[:4])
        raise InputError(f"a summary needs explanations by one method for one class, not {named}")
    scores: dict[str, list[float]] = defaultdict(list)
    for e in singles:
        for word in words(e)[0]:
            if any(letter.isalnum() for letter in word.text):
                scores[word.text.casefold()].append(word.score)
    rows = [(f"{name} ×{len(s)}", sum(s) / len(s)) for name, s in scores.items() if len(s) >= least]
    if not rows:
        raise InputError(f"no word occurs at least {least} times in these {len(singles)} texts")
    best = sorted(rows, key=lambda row: -abs(row[1]))
    ((method, target),) = kinds
    signed = any(colours.scale_of(e).signed for e in singles)
    title = f"{method}: {target}, mean over {amount(len(singles), 'text')}"
    labels = ("against", f"for {target}") if signed and not agnostic(singles[0]) else legend_labels(singles[0])
    return _drawn(title, best[:k], [], signed, labels, [])


def waterfall(e: Explanation, k: int = 10, sample: int = 0) -> Figure:
    """Draw how the scores of a sample add up to the output: k bars of the features with the largest |score|, each
    starting at the end of the previous bar, and a bar for the sum of all others.

    The last bar ends at the logit (or output) that is explained, and the first starts Σ scores below it: at
    f(baseline), if scores add up to f(x) − f(baseline), as those of ``integrated_gradients`` do.

    Raises:
        InputError: the scores have no sign; the target is not a single output of the model; k is not at least 1.
    """
    _check_count(k)
    e = prepared(e[sample], smooth=0)
    if not colours.scale_of(e).signed:
        raise InputError(f"the scores of {e.method} have no sign, so they do not add up to the output: see bars()")
    index = int(e.target[0])
    plain = e.target_names is None or e.target_names[0] == e.label(index) or e.numeric
    end = e.logit(index) if plain else None
    if end is None:
        raise InputError(f"the target {target_name(e)} is not a single output of the model: see bars()")
    rows = strongest(e)
    total = float(e.scores.double().sum())
    shown_sum = sum(score for _, score in rows)
    if abs(total - shown_sum) > 1e-6 * max(1.0, float(e.scores.abs().sum())):
        rows.append(("special tokens", total - shown_sum))
    shown, rest = rows[:k], rows[k:]
    if rest:
        shown = [*shown, (f"sum of {len(rest):,} others", sum(score for _, score in rest))]
    return _steps(f"{heading(e)} · {method_name(e)}", shown[::-1], end - total, e)


def _steps(title: str, rows: list[Row], start: float, e: Explanation) -> Figure:
    """Draw bars of which each starts at the end of the previous bar, the first at ``start``."""
    ends = np.cumsum([start, *(score for _, score in rows)])
    low, high = float(ends.min()), float(ends.max())
    paper = Paper(_LEFT + _WIDE + 2 * _RIGHT, _TOP + (len(rows) + 1) * _LINE + 0.2, notes([e]))
    paper.write(short(title, 80), 0.1, 0.12, 10, va="top", weight="bold")

    def at(value: float) -> float:
        return _LEFT + _RIGHT + (value - low) / ((high - low) or 1.0) * _WIDE

    y = _TOP
    paper.write(f"begins at {format_score(float(ends[0]))}", at(float(ends[0])), y - 0.08, 7, ha="center", va="bottom")
    for (name, score), begin in zip(rows, ends.tolist(), strict=False):
        left, right = sorted((at(begin), at(begin + score)))
        paper.box(left, y + 0.04, max(right - left, 0.01), _LINE - 0.08, colours.code(colours.colour_of(score, True)))
        paper.write(_cut(name), _LEFT - 0.1, y + _LINE / 2, 8, ha="right", va="center", color=colours.INK)
        paper.write(f"{score:+.3g}", right + 0.05, y + _LINE / 2, 7, va="center")
        y += _LINE
    paper.write(f"ends at {format_score(float(ends[-1]))}", at(float(ends[-1])), y + 0.06, 7, ha="center", va="top")
    return paper.figure


def _check_count(k: int) -> None:
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise InputError(f"k must be a whole number of at least 1, not {k!r}")


def strongest(e: Explanation) -> list[Row]:
    """Return (name, score) of each word, segment of a sound, patch or pixel of a sample, by descending |score|."""
    if e.level == "token":
        rows = [(visible(word.text), word.score) for word in words(e)[0]]
    else:
        scores = array(e.scores[0]).reshape(-1).tolist()
        rows = [(position_name(e, i), score) for i, score in enumerate(scores)]
    return sorted(rows, key=lambda row: -abs(row[1]))


def _cut(name: str) -> str:
    """Cut a name to the width of its column."""
    letters = 34
    while letters > 4 and measure(short(name, letters), 8) > _LEFT - 0.2:
        letters -= 1
    return short(name, letters)


def _drawn(
    title: str, shown: list[Row], rest: list[Row], signed: bool, labels: tuple[str, str], explained: list[Explanation]
) -> Figure:
    rows = [*shown, (f"sum of {len(rest):,} others", sum(score for _, score in rest))] if rest else shown
    limit = max((abs(score) for _, score in rows), default=0.0) or 1.0
    start = _LEFT + (_RIGHT if any(score < 0 for _, score in rows) else 0)  # their figures stand left of the bars
    paper = Paper(start + _WIDE + _RIGHT, _TOP + len(rows) * _LINE + 0.3, notes(explained))
    paper.write(short(title, 80), 0.1, 0.12, 10, va="top", weight="bold")
    middle = start + (_WIDE / 2 if signed else 0)
    reach = _WIDE / 2 if signed else _WIDE
    for i, (name, score) in enumerate(rows):
        y, long = _TOP + i * _LINE, abs(score) / limit * reach
        is_rest = bool(rest) and i == len(rows) - 1
        colour = "#b9bec6" if is_rest else colours.code(colours.colour_of(score, signed))
        left = middle - long if score < 0 else middle
        paper.box(left, y + 0.04, long, _LINE - 0.08, colour)
        tone = colours.SOFT if is_rest else colours.INK
        paper.write(_cut(name), _LEFT - 0.1, y + _LINE / 2, 8, ha="right", va="center", color=tone)
        side = "right" if score < 0 else "left"
        at = left - 0.05 if score < 0 else left + long + 0.05
        paper.write(format_score(score), at, y + _LINE / 2, 7, ha=side, va="center")
    paper.box(middle - 0.005, _TOP - 0.03, 0.01, len(rows) * _LINE + 0.06, "#888888")
    foot = _TOP + len(rows) * _LINE + 0.12
    if labels[0]:
        paper.write(labels[0], start, foot, 7, va="top", color=colours.code(colours.NEGATIVE))
    ink = colours.code(colours.colour_of(1.0, signed))
    paper.write(short(labels[1], 50), start + _WIDE, foot, 7, va="top", ha="right", color=ink)
    return paper.figure

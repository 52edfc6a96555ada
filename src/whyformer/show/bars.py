"""Bars of the strongest features of an explanation, and of the words for a class over many samples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from whyformer.errors import InputError, check_count
from whyformer.explanation.counts import amount
from whyformer.show import colours
from whyformer.show.colours import array
from whyformer.show.layout import prepared_sample, prepared_samples
from whyformer.show.paper import Paper
from whyformer.show.typeface import families, fitted, printable
from whyformer.show.words import (
    agnostic,
    format_score,
    heading,
    legend_labels,
    method_name,
    notes,
    position_name,
    target_name,
    visible,
    words,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.container import BarContainer
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
    check_count("k", k)
    e = prepared_sample(e, sample, smooth=0)
    rows, signed = _with_rest(strongest(e), k), colours.scale_of(e).signed
    return _from_zero(partial(_question, e), rows, signed, legend_labels(e), notes([e]))


def summary(explanations: Explanation | Iterable[Explanation], k: int = 15, *, least: int = 1) -> Figure:
    """Draw the words with the largest |mean score| for a class over many samples as bars.

    Args:
        explanations: of texts, by one method, for one class.
        k: number of words.
        least: leave out words that occur less often.

    Raises:
        InputError: pictures, several methods or several classes; k is not at least 1.
    """
    check_count("k", k)
    check_count("least", least)
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
    return _from_zero(title, best[:k], signed, labels, [])


def waterfall(e: Explanation, k: int = 10, sample: int = 0) -> Figure:
    """Draw how the scores of a sample add up to the output: k bars of the features with the largest |score|, each
    starting at the end of the previous bar, and a bar for the sum of all others.

    The last bar ends at the logit (or output) that is explained, and the first starts Σ scores below it: at
    f(baseline), if scores add up to f(x) − f(baseline), as those of ``integrated_gradients`` do.

    Raises:
        InputError: the scores have no sign; the target is not a single output of the model; k is not at least 1.
    """
    check_count("k", k)
    e = prepared_sample(e, sample, smooth=0)
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
    rows = _with_rest(rows, k)[::-1]
    ends = np.cumsum([end - total, *(score for _, score in rows)]).tolist()
    paper, axes = _chart(partial(_question, e), rows, "{:+.3g}", True, ends[:-1])
    axes.set_xlim(min(ends), max(ends) if max(ends) > min(ends) else min(ends) + 1)
    for word, value, y, side in (("begins", ends[0], -0.6, "bottom"), ("ends", ends[-1], len(rows) - 0.4, "top")):
        text = f"{word} at {format_score(value)}"
        axes.text(value, y, text, ha="center", va=side, fontsize=7, family=families())
    return paper.finished(*_size(rows), notes([e]))


def strongest(e: Explanation) -> list[Row]:
    """Return (name, score) of each word, segment of a sound, patch or pixel of a sample, by descending |score|."""
    if e.level == "token":
        rows = [(visible(word.text), word.score) for word in words(e)[0]]
    else:
        scores = array(e.scores[0]).reshape(-1).tolist()
        rows = [(position_name(e, i), score) for i, score in enumerate(scores)]
    return sorted(rows, key=lambda row: -abs(row[1]))


def _with_rest(rows: list[Row], k: int) -> list[Row]:
    """Return the first k rows, and a row for the sum of all others."""
    first, rest = rows[:k], rows[k:]
    return [*first, (f"sum of {len(rest):,} others", sum(score for _, score in rest))] if rest else first


def _question(e: Explanation, limit: int) -> str:
    """Return the question and the method in ``limit`` characters; only the name of the class is cut."""
    after = f" · {method_name(e)}"
    return heading(e, limit - len(after)) + after


def _from_zero(
    title: str | Callable[[int], str], rows: list[Row], signed: bool, labels: tuple[str, str], remarks: list[str]
) -> Figure:
    """Draw bars that start at 0, and below them the meanings of their colours."""
    paper, axes = _chart(title, rows, "{:.4g}", signed)
    limit = max((abs(score) for _, score in rows), default=0.0) or 1.0
    axes.set_xlim(-limit if signed else 0, limit)
    axes.axvline(0, color="#888888", linewidth=0.8, clip_on=False)
    paper.legend(labels, _LEFT + _RIGHT, _TOP + len(rows) * _LINE + 0.12, _WIDE)
    return paper.finished(*_size(rows), remarks)


def _size(rows: list[Row]) -> tuple[float, float]:
    """Return the width and height of a figure with these rows."""
    return _LEFT + _WIDE + 2 * _RIGHT, _TOP + len(rows) * _LINE + 0.3


def _chart(
    title: str | Callable[[int], str],
    rows: list[Row],
    form: str,
    signed: bool,
    starts: Sequence[float] = (0.0,),
) -> tuple[Paper, Axes]:
    """Draw the rows below a title, each bar between its name and its score in the format ``form``."""
    paper = Paper()
    paper.write(fitted(title, _size(rows)[0] - 0.2, 10, "bold"), 0.1, 0.12, 10, va="top", weight="bold")
    axes = paper.axes(_LEFT + _RIGHT, _TOP, _WIDE, len(rows) * _LINE)
    axes.set_axis_on()
    axes.set_frame_on(False)
    axes.set_xticks([])
    drawn = draw_rows(axes, rows, signed, starts)
    axes.tick_params(left=False, pad=72 * (_RIGHT + 0.1))
    texts = [form.format(score) for _, score in rows]
    axes.bar_label(drawn, texts, padding=3, fontsize=7, family=families())
    return paper, axes


def draw_rows(axes: Axes, rows: Sequence[Row], signed: bool, starts: Sequence[float] = (0.0,)) -> BarContainer:
    """Draw a horizontal bar for each row on axes, the first at the top, beside its name."""
    scores = [score for _, score in rows]
    inks = [colours.code(colours.colour_of(score, signed)) for score in scores]
    drawn = axes.barh(range(len(rows)), scores, 0.67, starts, color=inks)
    names = [printable(fitted(name, _LEFT - 0.2, 8)) for name, _ in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=8, parse_math=False)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(labelfontfamily=families())
    return drawn

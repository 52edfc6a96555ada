"""Plausibility: agreement with human rationales, in ERASER's terms (DeYoung et al. 2020; methods.md §6.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from whyformer.evaluate.metrics.faithfulness import area, removal_order

TOP_K: tuple[int, ...] = (10, 20, 30, 40, 50, 60, 70, 80)
"""The k of Chefer et al. 2021, Figure 4."""
SHARES: tuple[float, ...] = (0.01, 0.05, 0.10, 0.20, 0.50)
"""The shares of tokens over which ERASER averages comprehensiveness and sufficiency."""


def word_scores(pieces: ArrayLike, words: Sequence[int | None], count: int) -> NDArray[np.float64]:
    """Score of each word: the maximum over its word pieces, NaN for a word without a piece (cut off by truncation).

    Args:
        pieces: ``[N]`` scores of the tokens; words: the word of each token, None at special tokens (a fast tokenizer's
            ``word_ids()``); count: number of words of the document.
    """
    values = np.asarray(pieces, dtype=np.float64)
    if len(words) != values.size:
        raise ValueError(f"{values.size} scores for {len(words)} tokens")
    result = np.full(count, np.nan)
    for score, word in zip(values, words, strict=True):
        if word is not None:
            result[word] = score if np.isnan(result[word]) else max(result[word], score)
    return result


def top_words(scores: ArrayLike, k: int) -> NDArray[np.int64]:
    """The k words with the highest scores; words without a score never; equal scores in reading order."""
    values = np.asarray(scores, dtype=np.float64)
    scored = np.flatnonzero(~np.isnan(values))
    return scored[removal_order(values[scored])[:k]]


def token_counts(predicted: ArrayLike, truth: ArrayLike) -> tuple[int, int, int]:
    """(words in both, words predicted, words in the rationale). ``truth`` is one flag a word of the whole document."""
    flags = np.asarray(truth, dtype=bool)
    chosen = np.asarray(predicted, dtype=np.int64)
    return int(flags[chosen].sum()), int(chosen.size), int(flags.sum())


def f1(both: ArrayLike, predicted: ArrayLike, true: ArrayLike) -> NDArray[np.float64]:
    """Harmonic mean of precision and recall, 2·both/(predicted + true); 0 where both are empty."""
    b, total = (
        np.asarray(both, dtype=np.float64),
        np.asarray(predicted, dtype=np.float64) + np.asarray(true, dtype=np.float64),
    )
    return np.divide(2 * b, total, out=np.zeros_like(b), where=total > 0)


def macro_f1(counts: Sequence[tuple[int, int, int]]) -> float:
    """Mean of the documents' F1 (ERASER's ``instance_macro``, the one Chefer's code prints)."""
    return float(np.mean([f1(*c) for c in counts]))


def micro_f1(counts: Sequence[tuple[int, int, int]]) -> float:
    """F1 of the summed counts (ERASER's ``instance_micro``): long documents weigh more."""
    return float(f1(*np.asarray(counts, dtype=np.float64).sum(0)))


def auprc(scores: ArrayLike, truth: ArrayLike) -> float:
    """Area under the precision-recall curve of the words that have a score, by the trapezoid as in ERASER's code.

    The curve runs over the distinct thresholds and ends at recall 0, precision 1. The trapezoid is a little too
    optimistic between its points; :func:`~whyformer.evaluate.metrics.localisation.average_precision` is not.
    NaN if no scored word is in the rationale.
    """
    values, flags = np.asarray(scores, dtype=np.float64), np.asarray(truth, dtype=bool)
    scored = ~np.isnan(values)
    s, t = values[scored], flags[scored]
    if not t.any():
        return float("nan")
    order = np.argsort(-s, kind="stable")
    last = np.append(np.flatnonzero(np.diff(s[order])), s.size - 1)
    hits = np.cumsum(t[order])[last]
    precision = np.concatenate([[1.0], hits / (last + 1)])
    recall = np.concatenate([[0.0], hits / hits[-1]])
    return float(area(recall, precision))


def comprehensiveness(full: float, without: Mapping[float, float]) -> float:
    """AOPC over the shares of p_c(x) − p_c(x without the rationale); c = predicted class; higher is better."""
    return float(np.mean([full - p for p in without.values()]))


def sufficiency(full: float, alone: Mapping[float, float]) -> float:
    """AOPC over the shares of p_c(x) − p_c(the rationale alone); lower is better."""
    return float(np.mean([full - p for p in alone.values()]))

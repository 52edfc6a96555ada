"""Plausibility: agreement with human rationales, as in ERASER (DeYoung et al. 2020)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from whyformer.errors import InputError, check_count
from whyformer.evaluation.case import Case
from whyformer.evaluation.metrics.faithfulness import area, removal_order
from whyformer.evaluation.metrics.localisation import precision_recall
from whyformer.evaluation.registry import Array, metric

TOP_K: tuple[int, ...] = (10, 20, 30, 40, 50, 60, 70, 80)
"""The values of k in Chefer et al. 2021, Figure 4."""


def word_scores(pieces: ArrayLike, words: Sequence[int | None], count: int) -> NDArray[np.float64]:
    """Return the score of each word: the maximum over its tokens, NaN for a word without tokens (truncated).

    Args:
        pieces: ``[N]`` scores of the tokens.
        words: index of the word of each token, None for special tokens (a fast tokenizer's ``word_ids()``).
        count: number of words in the document.
    """
    values = np.asarray(pieces, dtype=np.float64)
    if len(words) != values.size:
        raise ValueError(f"{values.size} scores for {len(words)} tokens")
    result = np.full(count, np.nan)
    for score, word in zip(values, words, strict=True):
        if word is not None:
            result[word] = np.fmax(result[word], score)
    return result


def top_words(scores: ArrayLike, k: int) -> NDArray[np.int64]:
    """Return the indices of the k words with the highest scores, NaN excluded; equal scores in reading order."""
    values = np.asarray(scores, dtype=np.float64)
    scored = np.flatnonzero(~np.isnan(values))
    return scored[removal_order(values[scored])[:k]]


def token_counts(predicted: ArrayLike, truth: ArrayLike) -> tuple[int, int, int]:
    """Return the numbers of words in both, predicted, and in the rationale; ``truth`` has a flag for each word."""
    flags, indices = np.asarray(truth, dtype=bool), np.asarray(predicted, dtype=np.int64)
    return int(flags[indices].sum()), int(indices.size), int(flags.sum())


def f1(both: ArrayLike, predicted: ArrayLike, true: ArrayLike) -> NDArray[np.float64]:
    """Return the F1 score 2·both/(predicted + true); 0 if both are empty."""
    b = np.asarray(both, dtype=np.float64)
    total = np.asarray(predicted, dtype=np.float64) + np.asarray(true, dtype=np.float64)
    return np.divide(2 * b, total, out=np.zeros_like(b), where=total > 0)


def auprc(scores: ArrayLike, truth: ArrayLike) -> float:
    """Return the area under the precision-recall curve by the trapezoidal rule, as in ERASER's code.

    The curve runs over the distinct thresholds of the scored words and ends at recall 0, precision 1. The trapezoidal
    rule is slightly optimistic; :func:`~whyformer.evaluation.metrics.localisation.average_precision` is not. The result
    is NaN if no scored word is in the rationale.
    """
    values, flags = np.asarray(scores, dtype=np.float64), np.asarray(truth, dtype=bool)
    scored = ~np.isnan(values)
    if not flags[scored].any():
        return float("nan")
    precision, recall = precision_recall(values[scored], flags[scored])
    return float(area(np.append(0.0, recall), np.append(1.0, precision)))


def _against(figure: Callable[..., Any], case: Case, *, rationale: Any, **settings: Any) -> Array:
    """Compare tokens with a rationale that has a flag for each token; the benchmark ``rationales`` compares words."""
    flags = case.flags("rationale", rationale)
    truths = flags if case.content is None else [row[content] for row, content in zip(flags, case.content, strict=True)]
    if not all(truth.any() for truth in truths):
        raise InputError("a rationale is empty: it has no token of the text, special tokens aside")
    return np.array([figure(case.features(i), truth, **settings) for i, truth in enumerate(truths)])


def _token_f1(scores: Array, truth: NDArray[np.bool_], *, k: int) -> NDArray[np.float64]:
    """Return the F1 score of the k highest tokens."""
    check_count("k", k)
    return f1(*token_counts(top_words(scores, k), truth))


metric(
    "auprc", "area under the precision-recall curve against a rationale",
    better="higher", modality="text", needs=("rationale",),
)(partial(_against, auprc))  # fmt: skip
metric(
    "token_f1", "token-F1 of the k highest tokens against a rationale",
    better="higher", modality="text", needs=("rationale",), k=10,
)(partial(_against, _token_f1))  # fmt: skip

"""Localization: does the map lie on the object? Pooled exactly as in Chefer et al. 2021, Table 2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from whyformer.errors import InputError
from whyformer.evaluation.case import Case
from whyformer.evaluation.registry import Array, metric


@dataclass(frozen=True)
class SegmentationCounts:
    """What one picture adds to the pooled figures; the sums over pictures give the figures.

    Attributes:
        correct, labelled: pixels.
        intersection, union: pixels, (background, foreground).
        average_precision: of this picture, in 0..1.
        hit: 1 if the highest score lies on the object; energy: share of the positive scores that lies on it.
        foreground: the share of the labelled pixels on the object.
    """

    correct: int
    labelled: int
    intersection: tuple[int, int]
    union: tuple[int, int]
    average_precision: float
    hit: int
    energy: float
    foreground: float


def minmax(scores: ArrayLike) -> NDArray[np.float64]:
    """(s − min)/(max − min); a constant or non-finite map is an error, never background."""
    s = np.asarray(scores, dtype=np.float64)
    if not np.isfinite(s).all():
        raise ValueError("the map holds NaN or infinity")
    low, high = s.min(), s.max()
    if high <= low:
        raise ValueError("the map is constant")
    return (s - low) / (high - low)


def counts(scores: ArrayLike, mask: ArrayLike, labelled: ArrayLike | None = None) -> SegmentationCounts:
    """Figures of one map against one mask.

    Foreground is predicted where the min–max-scaled score is greater than its mean over the picture.

    Args:
        scores: ``[H, W]``; mask: ``[H, W]`` true on the object; labelled: ``[H, W]`` true where the truth is known.
    """
    scaled = minmax(scores)
    truth = np.asarray(mask, dtype=bool)
    known = np.ones_like(truth) if labelled is None else np.asarray(labelled, dtype=bool)
    if scaled.shape != truth.shape or known.shape != truth.shape:
        raise ValueError(f"the map is {scaled.shape} and the mask {truth.shape}")
    if not (truth & known).any():
        raise ValueError("the mask is empty: there is no object in this picture")
    found = scaled > scaled.mean()
    return SegmentationCounts(
        correct=int(((found == truth) & known).sum()),
        labelled=int(known.sum()),
        intersection=(int((~found & ~truth & known).sum()), int((found & truth & known).sum())),
        union=(int((~(found & truth) & known).sum()), int(((found | truth) & known).sum())),
        average_precision=two_channel_average_precision(scaled[known], truth[known]),
        hit=pointing_hit(np.where(known, scaled, -1), truth),
        energy=energy_in_mask(np.where(known, np.asarray(scores, dtype=np.float64), 0), truth & known),
        foreground=float(truth[known].mean()),
    )


def pixel_accuracy(correct: ArrayLike, labelled: ArrayLike) -> NDArray[np.float64]:
    """100 · Σ correct / Σ labelled, over all pixels of all pictures (not a mean over pictures)."""
    return 100 * np.asarray(correct, dtype=np.float64) / np.asarray(labelled, dtype=np.float64)


def mean_iou(intersection: ArrayLike, union: ArrayLike) -> NDArray[np.float64]:
    """100 · mean over {background, foreground} of Σ intersection / Σ union, each summed over the data set first."""
    i, u = np.asarray(intersection, dtype=np.float64), np.asarray(union, dtype=np.float64)
    return 100 * np.divide(i, u, out=np.zeros_like(i), where=u > 0).mean(-1)


def precision_recall(scores: ArrayLike, truth: ArrayLike) -> tuple[Array, Array]:
    """(precision, recall) at the distinct thresholds, highest first; at least one must be true."""
    s, t = np.asarray(scores, dtype=np.float64).reshape(-1), np.asarray(truth, dtype=bool).reshape(-1)
    order = np.argsort(-s, kind="stable")
    last = np.append(np.flatnonzero(np.diff(s[order])), s.size - 1)  # the last element of each group of equal scores
    hits = np.cumsum(t[order])[last]
    return hits / (last + 1), hits / hits[-1]


def average_precision(scores: ArrayLike, truth: ArrayLike) -> float:
    """Σ_n (R_n − R_{n−1}) P_n over the distinct thresholds, highest first; 0 if nothing is true."""
    if not np.any(truth):
        return 0.0
    precision, recall = precision_recall(scores, truth)
    return float((np.diff(recall, prepend=0.0) * precision).sum())


def two_channel_average_precision(scaled: ArrayLike, truth: ArrayLike) -> float:
    """Average precision of the flattened pair (1 − s, s) against (background, foreground), as in the reference code.

    mAP is its mean over pictures. It counts each pixel twice, so it is not the average precision of the foreground.
    """
    s, t = np.asarray(scaled, dtype=np.float64).reshape(-1), np.asarray(truth, dtype=bool).reshape(-1)
    return average_precision(np.concatenate([1 - s, s]), np.concatenate([~t, t]))


def pointing_hit(scores: ArrayLike, mask: ArrayLike) -> int:
    """Pointing game (Zhang et al. 2016), no tolerance: 1 if the highest score (the first of equals) is in the mask."""
    return int(np.asarray(mask, dtype=bool).reshape(-1)[int(np.argmax(np.asarray(scores).reshape(-1)))])


def energy_in_mask(scores: ArrayLike, mask: ArrayLike) -> float:
    """Σ s⁺ in the mask / Σ s⁺ (energy-based pointing game, Wang et al. 2020); 0 if no score is positive."""
    positive = np.maximum(np.asarray(scores, dtype=np.float64), 0)
    total = positive.sum()
    return float(positive[np.asarray(mask, dtype=bool)].sum() / total) if total > 0 else 0.0


_FIGURES: dict[str, tuple[str, Callable[[SegmentationCounts], Any]]] = {
    "pixel_accuracy": ("pixel accuracy in %, foreground = above the mean", lambda c: 100 * c.correct / c.labelled),
    # of each picture; over a data set the benchmark sums numerators and denominators first, as the paper does
    "miou": ("mean IoU of background and foreground in %", lambda c: mean_iou(c.intersection, c.union)),
    "map": ("average precision of (1 − s, s) in % (the paper's mAP is its mean)", lambda c: 100 * c.average_precision),
    "pointing_game": ("1 if the highest score lies on the object", lambda c: float(c.hit)),
    "energy": ("share of the positive scores that lies on the object", lambda c: c.energy),
}


def _against_mask(read: Callable[[SegmentationCounts], Any], case: Case, *, mask: Any) -> Array:
    masks = case.flags("mask", mask)
    if not masks.any((1, 2)).all():
        raise InputError("a mask is empty: there is no object in this picture")
    return np.array([read(counts(s, m)) for s, m in zip(case.scores, masks, strict=True)])


for _name, (_summary, _read) in _FIGURES.items():
    metric(_name, _summary, better="higher", modality="image", needs=("mask",))(partial(_against_mask, _read))

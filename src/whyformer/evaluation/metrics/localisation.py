"""Localization: agreement of a map with the mask of an object, pooled as in Chefer et al. 2021, Table 2."""

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
    """The contribution of one picture to figures that are pooled by sums over pictures.

    Attributes:
        correct: number of correctly classified pixels.
        labelled: number of pixels, all of which have a known label.
        intersection: pixels of the intersections for (background, foreground).
        union: pixels of the unions for (background, foreground).
        average_precision: average precision of this picture, in 0..1.
        hit: 1 if the highest score lies on the object, else 0.
        energy: fraction of the positive scores that lies on the object.
        foreground: fraction of the pixels that lies on the object.
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
    """Return (s − min)/(max − min). A constant or non-finite map raises ValueError."""
    s = np.asarray(scores, dtype=np.float64)
    if not np.isfinite(s).all():
        raise ValueError("the map holds NaN or infinity")
    low, high = s.min(), s.max()
    if high <= low:
        raise ValueError("the map is constant")
    return (s - low) / (high - low)


def counts(scores: ArrayLike, mask: ArrayLike) -> SegmentationCounts:
    """Compare a map ``[H, W]`` with a mask ``[H, W]`` that is True on the object.

    A pixel is predicted as foreground if its min–max-scaled score is greater than the mean over the picture.
    """
    scaled, truth = minmax(scores), np.asarray(mask, dtype=bool)
    if scaled.shape != truth.shape:
        raise ValueError(f"the map is {scaled.shape} and the mask {truth.shape}")
    if not truth.any():
        raise ValueError("the mask is empty: there is no object in this picture")
    predicted = scaled > scaled.mean()
    return SegmentationCounts(
        correct=int((predicted == truth).sum()),
        labelled=truth.size,
        intersection=(int((~predicted & ~truth).sum()), int((predicted & truth).sum())),
        union=(int((~(predicted & truth)).sum()), int((predicted | truth).sum())),
        average_precision=two_channel_average_precision(scaled, truth),
        hit=pointing_hit(scaled, truth),
        energy=energy_in_mask(scores, truth),
        foreground=float(truth.mean()),
    )


def pixel_accuracy(correct: ArrayLike, labelled: ArrayLike) -> NDArray[np.float64]:
    """Return 100 · Σ correct / Σ labelled over all pixels of all pictures (not a mean over pictures)."""
    return 100 * np.asarray(correct, dtype=np.float64) / np.asarray(labelled, dtype=np.float64)


def mean_iou(intersection: ArrayLike, union: ArrayLike) -> NDArray[np.float64]:
    """Return 100 · mean over {background, foreground} of Σ intersection / Σ union, with sums over the data set."""
    i, u = np.asarray(intersection, dtype=np.float64), np.asarray(union, dtype=np.float64)
    return 100 * np.divide(i, u, out=np.zeros_like(i), where=u > 0).mean(-1)


def precision_recall(scores: ArrayLike, truth: ArrayLike) -> tuple[Array, Array]:
    """Return (precision, recall) at the distinct thresholds, in descending order; ``truth`` must have a True."""
    s, t = np.asarray(scores, dtype=np.float64).reshape(-1), np.asarray(truth, dtype=bool).reshape(-1)
    order = np.argsort(-s, kind="stable")
    last = np.append(np.flatnonzero(np.diff(s[order])), s.size - 1)  # last of each group of equal scores
    hits = np.cumsum(t[order])[last]
    return hits / (last + 1), hits / hits[-1]


def average_precision(scores: ArrayLike, truth: ArrayLike) -> float:
    """Return Σ_n (R_n − R_{n−1}) P_n over the distinct thresholds, in descending order; 0 if no ``truth`` is True."""
    if not np.any(truth):
        return 0.0
    precision, recall = precision_recall(scores, truth)
    return float((np.diff(recall, prepend=0.0) * precision).sum())


def two_channel_average_precision(scaled: ArrayLike, truth: ArrayLike) -> float:
    """Return the average precision of the flattened pair (1 − s, s) against (background, foreground).

    The reference code does the same; its mAP is the mean over pictures. Each pixel counts twice, so the value is not
    the average precision of the foreground.
    """
    s, t = np.asarray(scaled, dtype=np.float64).reshape(-1), np.asarray(truth, dtype=bool).reshape(-1)
    return average_precision(np.concatenate([1 - s, s]), np.concatenate([~t, t]))


def pointing_hit(scores: ArrayLike, mask: ArrayLike) -> int:
    """Return 1 if the first highest score lies in the mask, else 0: pointing game (Zhang et al. 2016), no tolerance."""
    return int(np.asarray(mask, dtype=bool).reshape(-1)[int(np.argmax(np.asarray(scores).reshape(-1)))])


def energy_in_mask(scores: ArrayLike, mask: ArrayLike) -> float:
    """Return Σ s⁺ in the mask / Σ s⁺ (energy-based pointing game, Wang et al. 2020); 0 if no score is positive."""
    positive = np.maximum(np.asarray(scores, dtype=np.float64), 0)
    total = positive.sum()
    return float(positive[np.asarray(mask, dtype=bool)].sum() / total) if total > 0 else 0.0


_FIGURES: dict[str, tuple[str, Callable[[SegmentationCounts], Any]]] = {
    "pixel_accuracy": ("pixel accuracy in %, foreground = above the mean", lambda c: 100 * c.correct / c.labelled),
    # for a single picture; over a data set the benchmark sums numerators and denominators first, as in the paper
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

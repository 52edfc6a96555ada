"""Perturbation curves: remove features in the order a map gives, and see what becomes of the prediction.

Positive perturbation (MoRF) removes the highest scores first, negative (LeRF) the lowest (Chefer et al. 2021,
section 4.1). All functions take arrays; the model's side is in :mod:`whyformer.evaluate.forwards`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

FRACTIONS: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""The nine steps of the published curves; the clean point 0 is added by :func:`curve_fractions`."""


def removal_order(scores: ArrayLike, *, highest_first: bool = True) -> NDArray[np.int64]:
    """Flat indices of the features in the order in which they are removed.

    Equal scores are taken by index (row by row), in both directions, so that the same map always gives the same masks.
    """
    flat = np.asarray(scores, dtype=np.float64).reshape(-1)
    if not np.isfinite(flat).all():
        raise ValueError("the scores hold NaN or infinity, so they give no order")
    return np.argsort(-flat if highest_first else flat, kind="stable").astype(np.int64)


def removed_count(features: int, fraction: float) -> int:
    """k = ⌊features · fraction⌋, the number removed (Chefer's reference code: ``int(196 * 256 * f)``).

    A product that is whole but for rounding (100 · 0.29) counts as whole.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"a fraction lies in 0..1, not {fraction}")
    return math.floor(features * fraction + 1e-9)


def removal_mask(order: NDArray[np.int64], count: int, shape: tuple[int, ...] | None = None) -> NDArray[np.bool_]:
    """True at the first ``count`` features of ``order``: exactly ``count`` of them, whatever the ties."""
    mask = np.zeros(order.size, dtype=bool)
    mask[order[:count]] = True
    return mask if shape is None else mask.reshape(shape)


TIES = ("index", "topk")
"""Which of equal scores goes first: the lower index, or what ``torch.topk`` picks (option ``ties``)."""


def topk_mask(scores: ArrayLike, count: int, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """True at the ``count`` highest scores, equal ones as ``torch.topk`` picks them on a CPU (Chefer's code does).

    Deterministic, but the sets of two counts need not be nested, and no order is documented. For comparisons alone.
    """
    flat = torch.from_numpy(np.asarray(scores, dtype=np.float32).reshape(-1))
    mask = np.zeros(flat.numel(), dtype=bool)
    mask[torch.topk(flat, count).indices.numpy()] = True
    return mask.reshape(shape)


def curve_fractions(fractions: Sequence[float] = FRACTIONS) -> tuple[float, ...]:
    """The clean point 0 followed by the steps."""
    return (0.0, *fractions) if not fractions or fractions[0] != 0 else tuple(fractions)


def area(fractions: ArrayLike, values: ArrayLike) -> NDArray[np.float64]:
    """Trapezoidal area Σ (f_{i+1} − f_i)(y_i + y_{i+1})/2 under the last axis of ``values``; NaN-safe where all are
    finite."""
    x, y = np.asarray(fractions, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if x.shape[-1] != y.shape[-1]:
        raise ValueError(f"{x.shape[-1]} fractions for {y.shape[-1]} values")
    return ((y[..., 1:] + y[..., :-1]) / 2 * np.diff(x)).sum(-1)


def accuracy_auc(fractions: ArrayLike, correct: ArrayLike) -> NDArray[np.float64]:
    """100 · ∫ accuracy df, from the clean point over f = 0..0.9, so at most 90; lower is better for positive
    perturbation.

    Not divided by 0.9. Formula of the paper's author; it is not in the published code (methods.md §6.1). Other work
    leaves out f = 0 or adds y(1) = 0: never compare across conventions.

    Args:
        correct: ``[..., F]`` 1 where the top-1 class is the label, one column a fraction, the clean picture first.
    """
    return 100 * area(fractions, correct)


def mean_curve_area(values: ArrayLike) -> NDArray[np.float64]:
    """(Σy − y_0/2 − y_n/2)/n of n equal steps: the insertion and deletion score in 0..1 (RISE, Petsiuk et al. 2018)."""
    y = np.asarray(values, dtype=np.float64)
    return area(np.linspace(0, 1, y.shape[-1]), y)


def aopc(clean: ArrayLike, perturbed: ArrayLike) -> NDArray[np.float64]:
    """Mean over the steps of p(x) − p(x_f), in probability units (Samek et al. 2017); higher is better for MoRF.

    AttCAT takes the absolute difference instead; so a map that raises the probability gains there and loses here.

    Args:
        clean: ``[...]`` probability of the explained class; perturbed: ``[..., F]`` without the clean point.
    """
    return (np.asarray(clean, dtype=np.float64)[..., None] - np.asarray(perturbed, dtype=np.float64)).mean(-1)


def log_odds(clean: ArrayLike, perturbed: ArrayLike, *, floor: float = 1e-12) -> NDArray[np.float64]:
    """LOdds: mean over the steps of ln(p(x_f) / p(x)) (Shrikumar et al. 2017, in AttCAT's form); lower is better
    for MoRF.

    Probabilities below ``floor`` count as ``floor``, so the result is finite.
    """
    p = np.maximum(np.asarray(clean, dtype=np.float64), floor)[..., None]
    return (np.log(np.maximum(np.asarray(perturbed, dtype=np.float64), floor)) - np.log(p)).mean(-1)

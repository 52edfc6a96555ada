"""Activation curve and pruning of Ali et al. 2022 (methods.md §6.4)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from whyformer.evaluate.metrics.faithfulness import area, removal_order

STEPS: tuple[float, ...] = tuple(i / 10 for i in range(11))
"""Fractions revealed (or pruned): linspace(0, 1, 11)."""


def revealed_count(features: int, fraction: float) -> int:
    """⌈fraction · features⌉, the number revealed; a product whole but for rounding counts as whole."""
    return math.ceil(fraction * features - 1e-9)


def reveal_masks(scores: ArrayLike, steps: tuple[float, ...] = STEPS) -> NDArray[np.bool_]:
    """``[F, N]`` True where a feature shows: in descending signed relevance, from nothing to everything."""
    order = removal_order(scores)
    return _masks(order, steps)


def prune_masks(scores: ArrayLike, steps: tuple[float, ...] = STEPS) -> NDArray[np.bool_]:
    """``[F, N]`` True where a feature is removed: in ascending |relevance|, least important first."""
    order = removal_order(np.abs(np.asarray(scores, dtype=np.float64)), highest_first=False)
    return _masks(order, steps)


def _masks(order: NDArray[np.int64], steps: tuple[float, ...]) -> NDArray[np.bool_]:
    masks = np.zeros((len(steps), order.size), dtype=bool)
    for row, fraction in zip(masks, steps, strict=True):
        row[order[: revealed_count(order.size, fraction)]] = True
    return masks


def auac(probabilities: ArrayLike, steps: tuple[float, ...] = STEPS) -> NDArray[np.float64]:
    """Area under the activation curve: ∫ p_true df over f = 0..1, in 0..1; higher is better.

    Args:
        probabilities: ``[..., F]`` softmax probability of the true class with the top fraction f revealed.
    """
    return area(steps, probabilities)


def squared_change(clean: ArrayLike, pruned: ArrayLike) -> NDArray[np.float64]:
    """Σ_c (f_c(x) − f_c(x_f))² over the logits (a sum over classes, not a mean). ``clean [C]``, ``pruned [F, C]``."""
    return ((np.asarray(clean, dtype=np.float64) - np.asarray(pruned, dtype=np.float64)) ** 2).sum(-1)


def au_mse(changes: ArrayLike, steps: tuple[float, ...] = STEPS) -> NDArray[np.float64]:
    """Area under the pruning curve ∫ MSE df, in squared logits; lower is better. ``changes [..., F]``."""
    return area(steps, changes)

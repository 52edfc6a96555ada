"""Infidelity (Yeh et al. 2019): do the scores of what is removed add up to the change of the output?"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def random_subsets(features: int, count: int, *, share: float = 0.2, seed: int = 0) -> NDArray[np.bool_]:
    """``[count, features]`` True at the features removed: in each row exactly max(1, ⌊share · features⌋) at random."""
    generator = np.random.default_rng(seed)
    size = max(1, int(share * features + 1e-9))
    masks = np.zeros((count, features), dtype=bool)
    for row in masks:
        row[generator.choice(features, size, replace=False)] = True
    return masks


def infidelity(scores: ArrayLike, removed: ArrayLike, drops: ArrayLike, *, scale: bool = True) -> float:
    """mean_S (β Σ_{i∈S} R_i − (f(x) − f(x without S)))² / mean_S (f(x) − f(x without S))², lower is better.

    R_i are scores of features, already times the input (the paper's Iᵀ Φ with I = x − baseline on S). β = 1 without
    ``scale``; with it the β that fits best, as the paper does for methods whose unit is arbitrary. Then 1 is what a
    map of zeros gets, and 0 is perfect. NaN if removing changes nothing.

    Args:
        scores: ``[N]``; removed: ``[S, N]``, True where a feature is removed; drops: ``[S]`` f(x) − f(x without S),
            logits.
    """
    sums = np.asarray(removed, dtype=np.float64) @ np.asarray(scores, dtype=np.float64).reshape(-1)
    wanted = np.asarray(drops, dtype=np.float64)
    power = (wanted**2).mean()
    if power == 0:
        return float("nan")
    beta = 1.0
    if scale:
        beta = float(sums @ wanted / (sums @ sums)) if (sums @ sums) > 0 else 0.0
    return float(((beta * sums - wanted) ** 2).mean() / power)

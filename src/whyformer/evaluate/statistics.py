"""Bootstrap confidence intervals of figures that are made of sums over samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Combine = Callable[[NDArray[np.float64]], NDArray[np.float64]]


@dataclass(frozen=True)
class Interval:
    """A figure with its percentile interval; ``count`` samples went into it."""

    value: float
    low: float
    high: float
    count: int


def first(means: NDArray[np.float64]) -> NDArray[np.float64]:
    """The plain mean: the first (only) column."""
    return means[..., 0]


def bootstrap(
    rows: ArrayLike, combine: Combine = first, *, level: float = 0.95, draws: int = 1000, seed: int = 0
) -> Interval:
    """Percentile bootstrap over samples.

    Args:
        rows: ``[n]`` or ``[n, k]``: what each sample contributes.
        combine: means over samples ``[..., k]`` -> figure ``[...]``; a ratio of two columns is a pooled figure.
        level: coverage; draws: resamples; seed: the same rows always give the same interval.
    """
    data = np.asarray(rows, dtype=np.float64)
    data = data[:, None] if data.ndim == 1 else data
    count = data.shape[0]
    if not count:
        return Interval(float("nan"), float("nan"), float("nan"), 0)
    value = float(combine(data.mean(0)))
    weights = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=draws) / count
    low, high = np.quantile(combine(weights @ data), [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high), count)

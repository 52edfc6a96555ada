"""Bootstrap confidence intervals of figures that are functions of means over samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Combine = Callable[[NDArray[np.float64]], NDArray[np.float64]]


@dataclass(frozen=True)
class Interval:
    """A figure with its percentile interval over ``count`` samples."""

    value: float
    low: float
    high: float
    count: int


def bootstrap(rows: ArrayLike, combine: Combine = lambda means: means[..., 0], *, draws: int = 1000) -> Interval:
    """Compute a 95 % percentile bootstrap interval over samples; the same rows always give the same interval.

    Args:
        rows: ``[n]`` or ``[n, k]`` contribution of each sample.
        combine: means over samples ``[..., k]`` -> figure ``[...]``; the first column by default. A ratio of two
            columns is a pooled figure.
        draws: number of bootstrap samples.
    """
    data = np.asarray(rows, dtype=np.float64)
    data = data[:, None] if data.ndim == 1 else data
    count = data.shape[0]
    if not count:
        return Interval(float("nan"), float("nan"), float("nan"), 0)
    value = float(combine(data.mean(0)))
    weights = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=draws) / count
    low, high = np.quantile(combine(weights @ data), [0.025, 0.975])
    return Interval(value, float(low), float(high), count)

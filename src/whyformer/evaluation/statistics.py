"""Bootstrap confidence intervals of figures over samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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


def bootstrap_of(figure: Callable[..., Any], *groups: ArrayLike, draws: int = 1000) -> Interval:
    """Compute the interval of :func:`bootstrap` for a figure that is no function of means, such as a median.

    Args:
        figure: groups of samples -> number; NaN if these samples have none.
        groups: ``[n, ...]`` samples of each group, which are resampled separately.
        draws: number of bootstrap samples.
    """
    arrays, generator = [np.asarray(group, dtype=np.float64) for group in groups], np.random.default_rng(0)
    drawn = [figure(*(a[generator.integers(len(a), size=len(a))] for a in arrays)) for _ in range(draws)]
    figures = np.array(drawn, dtype=np.float64)
    figures = figures[np.isfinite(figures)]
    low, high = np.quantile(figures, [0.025, 0.975]) if figures.size else (np.nan, np.nan)
    return Interval(float(figure(*arrays)), float(low), float(high), sum(map(len, arrays)))

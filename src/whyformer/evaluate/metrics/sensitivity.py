"""How much a map changes: with the class, and with small changes of the input."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from whyformer.evaluate.metrics.sanity import spearman


def relative_change(original: ArrayLike, changed: ArrayLike) -> float:
    """‖E(x + δ) − E(x)‖ / ‖E(x)‖, Frobenius norms (Yeh et al. 2019); NaN for a map of zeros."""
    a, b = np.asarray(original, dtype=np.float64), np.asarray(changed, dtype=np.float64)
    norm = np.linalg.norm(a.reshape(-1))
    return float(np.linalg.norm((b - a).reshape(-1)) / norm) if norm > 0 else float("nan")


def max_sensitivity(original: ArrayLike, changed: Sequence[ArrayLike]) -> float:
    """Max-sensitivity: the largest relative change over the disturbed inputs δ ∈ U[−r, r]; lower is better."""
    if not len(changed):
        raise ValueError("no disturbed maps")
    return max(relative_change(original, one) for one in changed)


def class_sensitivity(top: ArrayLike, least: ArrayLike) -> float:
    """Spearman correlation of the maps of the most and the least likely class; 1 = the map does not depend on the
    class."""
    return spearman(top, least)

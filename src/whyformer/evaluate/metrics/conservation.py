"""Conservation: does the relevance add up to what it explains? (Ali et al. 2022, the scatter of Figure 2)"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class ConservationFit:
    """How Σ relevance follows the explained output over samples.

    Attributes:
        slope, intercept: least squares Σ R ≈ slope · f + intercept; exact conservation has slope 1, intercept 0.
        error: mean |ΣR − f| / mean |f|; 0 = conserved, 1 = as bad as no relevance at all.
        correlation: Pearson's r (NaN where either side does not vary).
    """

    slope: float
    intercept: float
    error: float
    correlation: float


def conservation_fit(relevance: ArrayLike, output: ArrayLike) -> ConservationFit:
    """Fit of the scatter. ``relevance [n]``: Σ_i R_i a sample; ``output [n]``: f_c of the same sample (logits)."""
    r, f = np.asarray(relevance, dtype=np.float64), np.asarray(output, dtype=np.float64)
    if r.shape != f.shape or r.ndim != 1 or not r.size:
        raise ValueError(f"need one sum and one output a sample, got shapes {r.shape} and {f.shape}")
    scale = np.abs(f).mean()
    error = float(np.abs(r - f).mean() / scale) if scale > 0 else float("nan")
    spread = ((f - f.mean()) ** 2).sum()
    if spread == 0:
        return ConservationFit(float("nan"), float("nan"), error, float("nan"))
    slope = float(((f - f.mean()) * (r - r.mean())).sum() / spread)
    wide = ((r - r.mean()) ** 2).sum()
    correlation = float(((f - f.mean()) * (r - r.mean())).sum() / np.sqrt(spread * wide)) if wide > 0 else float("nan")
    return ConservationFit(slope, float(r.mean() - slope * f.mean()), error, correlation)

"""Relevance against the output: does it add up to it, in whole (conservation) and in part (infidelity)?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from whyformer.evaluation.case import Case
from whyformer.evaluation.registry import Array, metric
from whyformer.explanation.result import Explanation


# -- infidelity (Yeh et al. 2019) --------------------------------------------------------------------------------------
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
    if not wanted.any():
        return float("nan")
    if scale and sums.any():
        sums = sums * (sums @ wanted / (sums @ sums))
    return float(((sums - wanted) ** 2).mean() / (wanted**2).mean())


@metric(
    "infidelity", "squared error of the removed scores' sum against the change of the logit, scaled",
    better="lower", baselines=("black", "unk"), subsets=50, share=0.2, seed=0, scale=True,
)  # fmt: skip
def _infidelity(case: Case, *, subsets: int, share: float, seed: int, scale: bool, baseline: str) -> Array:
    """Random subsets, of pixels for pictures: where these change nothing, the benchmark ``sanity`` takes patches."""
    rows = []
    for i, target in enumerate(case.target):
        scores = case.features(i)
        removed = random_subsets(scores.size, subsets, share=share, seed=seed)
        drops = case.logits[i, target] - case.run(i, removed, baseline)[:, target]
        rows.append(infidelity(scores, removed, drops, scale=scale))
    return np.array(rows)


# -- conservation (Ali et al. 2022, the scatter of Figure 2) -----------------------------------------------------------
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
    df, dr = f - f.mean(), r - r.mean()
    spread, wide, both = (df**2).sum(), (dr**2).sum(), (df * dr).sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        slope, error = both / spread, np.abs(r - f).mean() / np.abs(f).mean()
        figures = (slope, r.mean() - slope * f.mean(), error, both / np.sqrt(spread * wide))
    return ConservationFit(*(float(x) if np.isfinite(x) else float("nan") for x in figures))


def relevance_sum(explanation: Explanation) -> tuple[float, str]:
    """(Σ R of one sample, where it was read): all features, special and prefix tokens included, where the method tells.

    Relevance that starts from one (instead of the logit) is scaled by the logit.
    """
    figure = explanation.diagnostics.get("conservation", {})
    if "sum" in figure:
        return float(figure["sum"][0]), "all features"
    if figure.get("blocks"):
        lowest = min(figure["blocks"], key=int)
        logit = explanation.logit(int(explanation.target[0])) or 0.0
        return float(figure["blocks"][lowest][0]) / float(figure["start"][0]) * logit, f"input of block {lowest}"
    if "completeness" in explanation.diagnostics:
        return float(explanation.diagnostics["completeness"]["sum"][0]), "all features"
    return float(explanation.scores[0].double().sum()), "scored features"


@metric("conservation", "relative error |ΣR − f| / |f| of the relevance's sum against the logit", better="lower")
def _conservation(case: Case) -> Array:
    """Of an Explanation all features (special and prefix tokens too, where the method tells), of an array its sum."""
    output = case.logits[np.arange(len(case)), case.target]
    if case.explanation is not None:
        sums = np.array([relevance_sum(one)[0] for one in case.explanation])
    else:
        sums = case.scores.reshape(len(case), -1).sum(-1)
    return np.abs(sums - output) / np.maximum(np.abs(output), 1e-12)

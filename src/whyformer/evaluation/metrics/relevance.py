"""Sums of relevance compared with the output: of all features (conservation) and of subsets (infidelity)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from whyformer.errors import InputError, check_count, check_type
from whyformer.evaluation.case import Case
from whyformer.evaluation.registry import Array, metric
from whyformer.explanation.result import Explanation


# -- infidelity (Yeh et al. 2019) --------------------------------------------------------------------------------------
def random_subsets(features: int, count: int, *, share: float = 0.2, seed: int = 0) -> NDArray[np.bool_]:
    """Return masks ``[count, features]``, each True at max(1, ⌊share · features⌋) random features."""
    generator = np.random.default_rng(seed)
    size = max(1, int(share * features + 1e-9))
    masks = np.zeros((count, features), dtype=bool)
    for row in masks:
        row[generator.choice(features, size, replace=False)] = True
    return masks


def infidelity(scores: ArrayLike, removed: ArrayLike, drops: ArrayLike, *, scale: bool = True) -> float:
    """Return mean_S (β Σ_{i∈S} R_i − (f(x) − f(x without S)))² / mean_S (f(x) − f(x without S))²; lower is better.

    R_i are scores of features, multiplied by the input (the paper's Iᵀ Φ with I = x − baseline on S). A map of zeros
    has infidelity 1, a perfect map 0.

    Args:
        scores: ``[N]`` scores R.
        removed: ``[S, N]`` True where a feature is removed.
        drops: ``[S]`` decrease of the target f(x) − f(x without S).
        scale: fit β by least squares, as the paper does for methods of arbitrary scale; otherwise β = 1.

    Returns:
        The infidelity; NaN if no removal changes the target.
    """
    sums = np.asarray(removed, dtype=np.float64) @ np.asarray(scores, dtype=np.float64).reshape(-1)
    observed = np.asarray(drops, dtype=np.float64)
    if not observed.any():
        return float("nan")
    if scale and sums.any():
        sums = sums * (sums @ observed / (sums @ sums))
    return float(((sums - observed) ** 2).mean() / (observed**2).mean())


@metric(
    "infidelity", "squared error of the removed scores' sum against the change of the explained target, scaled",
    better="lower", baselines=("black", "unk"), subsets=50, share=0.2, seed=0, scale=True,
)  # fmt: skip
def _infidelity(case: Case, *, subsets: int, share: float, seed: int, scale: bool, baseline: str) -> Array:
    """Infidelity over random subsets of pixels or tokens. The benchmark ``sanity`` uses subsets of patches instead."""
    check_count("subsets", subsets)
    check_count("seed", seed, least=0)
    check_type("scale", scale, bool, "True or False")
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise InputError(f"share must be a number above 0 and up to 1, not {share!r}")
    rows = []
    for i in range(len(case)):
        scores = case.features(i)
        removed = random_subsets(scores.size, subsets, share=share, seed=seed)
        perturbed = case.perturbed_logits(i, removed, baseline)
        drops = case.target_values(i, case.logits[[i]]) - case.target_values(i, perturbed)
        rows.append(infidelity(scores, removed, drops, scale=scale))
    return np.array(rows)


# -- conservation (Ali et al. 2022, the scatter of Figure 2) -----------------------------------------------------------
@dataclass(frozen=True)
class ConservationFit:
    """The relation of Σ relevance to the explained output over samples.

    Attributes:
        slope: slope of the least-squares fit Σ R ≈ slope · f + intercept; 1 for exact conservation.
        intercept: intercept of the fit; 0 for exact conservation.
        error: mean |ΣR − f| / mean |f|; 0 for exact conservation, 1 for relevance 0.
        correlation: Pearson's r; NaN if either side is constant.
    """

    slope: float
    intercept: float
    error: float
    correlation: float


def conservation_fit(relevance: ArrayLike, output: ArrayLike) -> ConservationFit:
    """Fit Σ_i R_i of each sample, ``relevance [n]``, to its logit f_c, ``output [n]``."""
    r, f = np.asarray(relevance, dtype=np.float64), np.asarray(output, dtype=np.float64)
    if r.shape != f.shape or r.ndim != 1 or not r.size:
        raise ValueError(f"each sample needs a sum and an output, but the shapes are {r.shape} and {f.shape}")
    df, dr = f - f.mean(), r - r.mean()
    spread, wide, both = (df**2).sum(), (dr**2).sum(), (df * dr).sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        slope, error = both / spread, np.abs(r - f).mean() / np.abs(f).mean()
        figures = (slope, r.mean() - slope * f.mean(), error, both / np.sqrt(spread * wide))
    return ConservationFit(*(float(x) if np.isfinite(x) else float("nan") for x in figures))


def relevance_sum(explanation: Explanation, output: float) -> tuple[float, str]:
    """Return Σ R of one sample, and a description of the features that it covers.

    The sum is over all features, special and prefix tokens included, if the method reports it; otherwise over the
    relevance at the input of the lowest block, or over the scores. Relevance that starts from the derivatives of the
    target with respect to the logits (1 for a logit) is scaled so that exact conservation gives the target.

    Args:
        explanation: the explanation of one sample.
        output: value of its target.
    """
    figure = explanation.diagnostics.get("conservation", {})
    if "sum" in figure:
        return float(figure["sum"][0]), "all features"
    if figure.get("blocks"):
        lowest = min(figure["blocks"], key=int)
        lost = figure["start"][0] - figure["blocks"][lowest][0]
        return output * (1 - lost / figure["scale"][0]), f"input of block {lowest}"
    if "completeness" in explanation.diagnostics:
        return float(explanation.diagnostics["completeness"]["sum"][0]), "all features"
    return float(explanation.scores[0].double().sum()), "scored features"


@metric(
    "conservation", "relative error |ΣR − f| / |f| of the relevance's sum against the explained target", better="lower"
)
def _conservation(case: Case) -> Array:
    """Relative error of :func:`relevance_sum` of an explanation, or of the sum of an array of scores."""
    output = np.concatenate([case.target_values(i, case.logits[[i]]) for i in range(len(case))])
    if case.explanation is not None:
        sums = np.array([relevance_sum(e, f)[0] for e, f in zip(case.explanation, output, strict=True)])
    else:
        sums = case.scores.reshape(len(case), -1).sum(-1)
    return np.abs(sums - output) / np.maximum(np.abs(output), 1e-12)

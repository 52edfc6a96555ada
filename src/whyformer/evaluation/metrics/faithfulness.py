"""Faithfulness: how the prediction changes as features are removed in the order of their scores.

Positive perturbation (MoRF) removes the highest scores first, negative (LeRF) the lowest (Chefer et al. 2021,
section 4.1). Each formula takes arrays, and is followed by the registration of its metric.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from whyformer.errors import InputError, check_count
from whyformer.evaluation.case import Case
from whyformer.evaluation.registry import Array, metric, perturbation

FRACTIONS: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""The nine steps of the published curves; :func:`curve_fractions` adds the clean point 0."""
STEPS: tuple[float, ...] = tuple(i / 10 for i in range(11))
"""Fractions revealed or pruned by Ali et al. 2022: 0, 0.1 ... 1."""
SHARES: tuple[float, ...] = (0.01, 0.05, 0.10, 0.20, 0.50)
"""Fractions of tokens over which ERASER averages comprehensiveness and sufficiency."""


# -- order of removal, and area under a curve ------------------------------------------------------
def removal_order(scores: ArrayLike, *, highest_first: bool = True) -> NDArray[np.int64]:
    """Return the flat indices of the features in the order of their removal.

    Equal scores are ordered by index (row-major) in both directions, so that masks are deterministic.
    """
    flat = np.asarray(scores, dtype=np.float64).reshape(-1)
    if not np.isfinite(flat).all():
        raise ValueError("the scores hold NaN or infinity, so they have no order")
    return np.argsort(-flat if highest_first else flat, kind="stable").astype(np.int64)


def removed_count(features: int, fraction: float) -> int:
    """Return the number of removed features ⌊features · fraction⌋ (Chefer's reference code: ``int(196 * 256 * f)``).

    Rounding errors are tolerated: 100 · 0.29 gives 29.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction must be between 0 and 1, not {fraction}")
    return math.floor(features * fraction + 1e-9)


def first_masks(order: NDArray[np.int64], counts: Sequence[int]) -> NDArray[np.bool_]:
    """Return masks ``[F, n]`` that are True at the first ``counts[f]`` features of ``order``."""
    place = np.empty(order.size, dtype=np.int64)
    place[order] = np.arange(order.size)
    return place < np.asarray(counts)[:, None]


def curve_fractions(fractions: Sequence[float] = FRACTIONS) -> tuple[float, ...]:
    """Return the clean point 0 followed by the fractions."""
    return (0.0, *fractions) if not fractions or fractions[0] != 0 else tuple(fractions)


def area(fractions: ArrayLike, values: ArrayLike) -> NDArray[np.float64]:
    """Return the trapezoidal area Σ (f_{i+1} − f_i)(y_i + y_{i+1})/2 along the last axis of ``values``."""
    x, y = np.asarray(fractions, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if x.shape[-1] != y.shape[-1]:
        raise ValueError(f"{x.shape[-1]} fractions for {y.shape[-1]} values")
    return ((y[..., 1:] + y[..., :-1]) / 2 * np.diff(x)).sum(-1)


def removal_masks(scores: ArrayLike, fractions: Sequence[float], *, highest_first: bool = True) -> NDArray[np.bool_]:
    """Return masks ``[F, n]`` that are True at the :func:`removed_count` first features for each fraction."""
    order = removal_order(scores, highest_first=highest_first)
    return first_masks(order, [removed_count(order.size, f) for f in fractions])


def mean_curve_area(values: ArrayLike) -> NDArray[np.float64]:
    """Return (Σy − y_0/2 − y_n/2)/n of n equal steps: insertion and deletion in 0..1 (RISE, Petsiuk et al. 2018)."""
    y = np.asarray(values, dtype=np.float64)
    return area(np.linspace(0, 1, y.shape[-1]), y)


# -- top-1 accuracy (Chefer et al. 2021, Table 1) --------------------------------------------------
def accuracy_auc(fractions: ArrayLike, correct: ArrayLike) -> NDArray[np.float64]:
    """Return 100 · ∫ accuracy df over f = 0..0.9, at most 90; lower is better for positive perturbation.

    The integral is not divided by 0.9. The formula is from the paper's author, and not in the published code. Other
    work omits f = 0 or adds y(1) = 0; such values are not comparable.

    Args:
        fractions: ``[F]`` fractions, from 0.
        correct: ``[..., F]`` 1 where the top-1 class is the label.
    """
    return 100 * area(fractions, correct)


def _top_1(case: Case, *, label: Any, baseline: str, highest_first: bool) -> tuple[Array, Array]:
    """Top-1 accuracy against ``label`` (the explained class by default) with 10–90 % removed."""
    if case.logits.shape[1] == 1:
        raise InputError(
            "the model has a single class, which is always its first: use deletion, insertion, aopc or log_odds, which "
            "measure the probability"
        )
    truth = case.target if label is None else case.labels(label)
    rows = []
    for i in range(len(case)):
        masks = removal_masks(case.features(i), FRACTIONS, highest_first=highest_first)
        top = case.perturbed_logits(i, masks, baseline).argmax(-1)
        rows.append([case.logits[i].argmax() == truth[i], *(top == truth[i])])
    curves = np.array(rows, dtype=np.float64)
    return accuracy_auc(curve_fractions(), curves), curves


for _name, _which, _better in (("positive", "highest", "lower"), ("negative", "lowest", "higher")):
    metric(
        _name, f"top-1 AUC in % as the {_which} scores are removed (CVPR 2021, Table 1)",
        better=_better, baselines=("black", "unk"), of_classes=True, label=None,
    )(partial(_top_1, highest_first=_name == "positive"))  # fmt: skip


# -- deletion and insertion (RISE) -----------------------------------------------------------------
def equal_steps(steps: int) -> tuple[float, ...]:
    """Return the fractions 0, 1/steps ... 1."""
    check_count("steps", steps)
    return tuple(i / steps for i in range(steps + 1))


perturbation(
    "deletion", "area under the probability as the highest scores are removed (RISE)",
    lambda a, steps: removal_masks(a, equal_steps(steps)), lambda a, clean, y: (mean_curve_area(y), y),
    better="lower", baselines=("zero", "mask"), steps=28,
)  # fmt: skip
perturbation(
    "insertion", "area under the probability as the highest scores appear (RISE)",
    lambda a, steps: ~removal_masks(a, equal_steps(steps)), lambda a, clean, y: (mean_curve_area(y), y),
    better="higher", baselines=("blur", "mask"), steps=28,
)  # fmt: skip


# -- AOPC and LOdds --------------------------------------------------------------------------------
def aopc(clean: ArrayLike, perturbed: ArrayLike) -> NDArray[np.float64]:
    """Return the mean over the steps of p(x) − p(x_f) (Samek et al. 2017); higher is better for MoRF.

    AttCAT uses the absolute difference, so that there, unlike here, a rise of the probability counts in a map's favor.

    Args:
        clean: ``[...]`` probability of the explained class.
        perturbed: ``[..., F]`` its probability at each step, without the clean point.
    """
    return (np.asarray(clean, dtype=np.float64)[..., None] - np.asarray(perturbed, dtype=np.float64)).mean(-1)


def log_odds(clean: ArrayLike, perturbed: ArrayLike, *, floor: float = 1e-12) -> NDArray[np.float64]:
    """Return LOdds, the mean over the steps of ln(p(x_f) / p(x)) (Shrikumar et al. 2017, as in AttCAT).

    Lower is better for MoRF. Probabilities are clamped to at least ``floor``, so that the result is finite. Arguments
    are those of :func:`aopc`.
    """
    p = np.maximum(np.asarray(clean, dtype=np.float64), floor)[..., None]
    return (np.log(np.maximum(np.asarray(perturbed, dtype=np.float64), floor)) - np.log(p)).mean(-1)


def _ten_to_ninety(a: Array) -> NDArray[np.bool_]:
    return removal_masks(a, FRACTIONS)


perturbation(
    "aopc", "mean loss of probability over 10–90 % removed, highest first", _ten_to_ninety,
    lambda a, clean, y: (aopc(clean, y), y), better="higher", baselines=("black", "unk"),
)  # fmt: skip
perturbation(
    "log_odds", "mean log ratio of the probability over 10–90 % removed, highest first", _ten_to_ninety,
    lambda a, clean, y: (log_odds(clean, y), y), better="lower", baselines=("black", "unk"), of_classes=True,
)  # fmt: skip


# -- comprehensiveness and sufficiency (ERASER, DeYoung et al. 2020) -------------------------------
def rationale_masks(scores: ArrayLike) -> NDArray[np.bool_]:
    """Return masks ``[5, n]``, True at the highest max(1, round(share · n)) features for each of :data:`SHARES`."""
    order = removal_order(scores)
    return first_masks(order, [max(1, round(share * order.size)) for share in SHARES])


def _drops(a: Array, clean: float, y: Array) -> tuple[float, Array]:
    """Return the mean over :data:`SHARES` of p(x) − p(x without, or with only, the rationale)."""
    return float((clean - y).mean()), clean - y


perturbation(
    "comprehensiveness", "loss of probability without the top 1, 5, 10, 20, 50 % (ERASER)", rationale_masks, _drops,
    better="higher", baselines=("black", "delete"),
)  # fmt: skip
perturbation(
    "sufficiency", "loss of probability with the top 1, 5, 10, 20, 50 % alone (ERASER)",
    lambda a: ~rationale_masks(a), _drops, better="lower", baselines=("black", "delete"),
)  # fmt: skip


# -- activation and pruning (Ali et al. 2022) -------------------------------------
def revealed_count(features: int, fraction: float) -> int:
    """Return the number of revealed features ⌈fraction · features⌉; rounding errors are tolerated."""
    return math.ceil(fraction * features - 1e-9)


def reveal_masks(scores: ArrayLike, steps: tuple[float, ...] = STEPS) -> NDArray[np.bool_]:
    """Return masks ``[F, N]`` that are True at revealed features: in descending order of signed relevance."""
    order = removal_order(scores)
    return first_masks(order, [revealed_count(order.size, f) for f in steps])


def prune_masks(scores: ArrayLike, steps: tuple[float, ...] = STEPS) -> NDArray[np.bool_]:
    """Return masks ``[F, N]`` that are True at removed features: in ascending order of |relevance|."""
    order = removal_order(np.abs(np.asarray(scores, dtype=np.float64)), highest_first=False)
    return first_masks(order, [revealed_count(order.size, f) for f in steps])


def auac(probabilities: ArrayLike, steps: tuple[float, ...] = STEPS) -> NDArray[np.float64]:
    """Return the area under the activation curve ∫ p_true df over f = 0..1, in 0..1; higher is better.

    Args:
        probabilities: ``[..., F]`` softmax probability of the true class with the top fraction f revealed.
        steps: the fractions f.
    """
    return area(steps, probabilities)


# only content tokens are hidden and revealed; the benchmark ``activation`` hides special tokens too
perturbation(
    "auac", "area under the activation curve (Ali et al. 2022)", lambda a: ~reveal_masks(a),
    lambda a, clean, y: (auac(y), y), better="higher", baselines=("black", "unk"),
)  # fmt: skip


def squared_change(clean: ArrayLike, pruned: ArrayLike) -> NDArray[np.float64]:
    """Return Σ_c (f_c(x) − f_c(x_f))², a sum over the logits of all classes. ``clean [C]``, ``pruned [F, C]``."""
    return ((np.asarray(clean, dtype=np.float64) - np.asarray(pruned, dtype=np.float64)) ** 2).sum(-1)


def au_mse(changes: ArrayLike, steps: tuple[float, ...] = STEPS) -> NDArray[np.float64]:
    """Return the area under the pruning curve ∫ MSE df, in squared logits; lower is better. ``changes [..., F]``."""
    return area(steps, changes)


@metric(
    "au_mse", "area under the pruning curve of squared logit changes (Ali et al. 2022)",
    better="lower", baselines=("black", "unk"),
)  # fmt: skip
def _au_mse(case: Case, *, baseline: str) -> tuple[Array, Array]:
    runs = [case.perturbed_logits(i, prune_masks(case.features(i)), baseline) for i in range(len(case))]
    changes = np.stack([squared_change(clean, run) for clean, run in zip(case.logits, runs, strict=True)])
    return au_mse(changes), changes


# -- ranked faithfulness of single tokens (Mylonas et al. 2022) -------------------
def worst_ranks(scores: ArrayLike) -> NDArray[np.int64]:
    """Return the rank of each |score|; the largest has rank 1, and equal values share the worst of their ranks."""
    size = np.abs(np.asarray(scores, dtype=np.float64))
    return (size[None, :] >= size[:, None]).sum(-1)


def ranked_faithfulness(scores: ArrayLike, drops: ArrayLike) -> float:
    """Return RFT = Σ_t term_t / rank_t; higher is better.

    term_t is Δ_t for a positive score, −Δ_t for a negative score, and −|Δ_t| for a score of 0. rank_t is the
    :func:`worst_ranks` of the score.

    Args:
        scores: ``[N]`` signed scores.
        drops: ``[N]`` decrease of the probability Δ_t = p(x) − p(x with token t replaced).
    """
    a, d = np.asarray(scores, dtype=np.float64), np.asarray(drops, dtype=np.float64)
    if a.shape != d.shape or a.ndim != 1:
        raise ValueError(f"each token needs a score and a drop, but the shapes are {a.shape} and {d.shape}")
    term = np.where(a > 0, d, np.where(a < 0, -d, -np.abs(d)))
    return float((term / worst_ranks(a)).sum())


perturbation(
    "rft", "ranked faithfulness of single tokens (Mylonas et al. 2022)", lambda a: np.eye(a.size, dtype=bool),
    lambda a, clean, y: (ranked_faithfulness(a, clean - y), None),
    better="higher", baselines=("zero", "unk"), modality="text",
)  # fmt: skip

"""The metrics of one explanation against the model itself, each over the samples of a case."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whyformer.errors import InputError
from whyformer.evaluate.case import Case
from whyformer.evaluate.metrics import activation
from whyformer.evaluate.metrics import faithfulness as perturbation
from whyformer.evaluate.metrics.faithfulness import FRACTIONS
from whyformer.evaluate.metrics.infidelity import infidelity as infidelity_of
from whyformer.evaluate.metrics.infidelity import random_subsets
from whyformer.evaluate.registry import metric
from whyformer.evaluate.rft import ranked_faithfulness

Curves = tuple[NDArray[np.float64], NDArray[np.float64]]


def _how(case: Case, substrate: str, replace: str) -> str:
    return substrate if case.image else replace


def _removed(
    case: Case, sample: int, fractions: Sequence[float], *, highest_first: bool = True
) -> list[NDArray[np.bool_]]:
    order = perturbation.removal_order(case.features(sample), highest_first=highest_first)
    return [perturbation.removal_mask(order, perturbation.removed_count(order.size, f)) for f in fractions]


def _probabilities(
    case: Case, fractions: Sequence[float], how: str, *, highest_first: bool = True, reveal: bool = False
) -> NDArray[np.float64]:
    """``[B, F]`` probability of the target."""
    rows = []
    for i in range(len(case)):
        masks = _removed(case, i, fractions, highest_first=highest_first)
        rows.append(case.probabilities(case.run(i, masks, how, reveal=reveal))[:, case.target[i]])
    return np.stack(rows)


def _accuracy(case: Case, label: Any, how: str, highest_first: bool) -> Curves:
    truth = case.target if label is None else np.broadcast_to(np.asarray(label), (len(case),))
    rows = []
    for i in range(len(case)):
        top = case.run(i, _removed(case, i, FRACTIONS, highest_first=highest_first), how).argmax(-1)
        rows.append([case.logits[i].argmax() == truth[i], *(top == truth[i])])
    curves = np.array(rows, dtype=np.float64)
    return perturbation.accuracy_auc(perturbation.curve_fractions(), curves), curves


@metric(
    "top-1 AUC in % as the highest scores are removed (CVPR 2021, Table 1)",
    better="lower",
    label=None,
    substrate="black",
    replace="unk",
)
def positive(case: Case, *, label: Any, substrate: str, replace: str) -> Curves:
    """Top-1 against ``label`` (the explained class by default), 10–90 % removed; at most 90."""
    return _accuracy(case, label, _how(case, substrate, replace), True)


@metric(
    "top-1 AUC in % as the lowest scores are removed (CVPR 2021, Table 1)",
    better="higher",
    label=None,
    substrate="black",
    replace="unk",
)
def negative(case: Case, *, label: Any, substrate: str, replace: str) -> Curves:
    """As ``positive``, the other way round."""
    return _accuracy(case, label, _how(case, substrate, replace), False)


@metric(
    "area under the probability as the highest scores are removed (RISE)",
    better="lower",
    steps=28,
    substrate="mean",
    replace="mask",
)
def deletion(case: Case, *, steps: int, substrate: str, replace: str) -> Curves:
    curves = _probabilities(case, _grid(steps), _how(case, substrate, replace))
    return perturbation.mean_curve_area(curves), curves


@metric(
    "area under the probability as the highest scores appear (RISE)",
    better="higher",
    steps=28,
    substrate="blur",
    replace="mask",
)
def insertion(case: Case, *, steps: int, substrate: str, replace: str) -> Curves:
    curves = _probabilities(case, _grid(steps), _how(case, substrate, replace), reveal=True)
    return perturbation.mean_curve_area(curves), curves


def _grid(steps: int) -> list[float]:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InputError(f"steps must be a whole number from 1, not {steps!r}")
    return [i / steps for i in range(steps + 1)]


@metric(
    "mean loss of probability over 10–90 % removed, highest first", better="higher", substrate="black", replace="unk"
)
def aopc(case: Case, *, substrate: str, replace: str) -> Curves:
    curves = _probabilities(case, FRACTIONS, _how(case, substrate, replace))
    return perturbation.aopc(case.clean, curves), curves


@metric(
    "mean log ratio of the probability over 10–90 % removed, highest first",
    better="lower",
    substrate="black",
    replace="unk",
)
def log_odds(case: Case, *, substrate: str, replace: str) -> Curves:
    curves = _probabilities(case, FRACTIONS, _how(case, substrate, replace))
    return perturbation.log_odds(case.clean, curves), curves


@metric(
    "loss of probability without the top 1, 5, 10, 20, 50 % (ERASER)",
    better="higher",
    substrate="black",
    replace="delete",
)
def comprehensiveness(case: Case, *, substrate: str, replace: str) -> Curves:
    return _erased(case, _how(case, substrate, replace), reveal=False)


@metric(
    "loss of probability with the top 1, 5, 10, 20, 50 % alone (ERASER)",
    better="lower",
    substrate="black",
    replace="delete",
)
def sufficiency(case: Case, *, substrate: str, replace: str) -> Curves:
    return _erased(case, _how(case, substrate, replace), reveal=True)


def _erased(case: Case, how: str, *, reveal: bool) -> Curves:
    from whyformer.evaluate.metrics.plausibility import SHARES

    rows = []
    for i in range(len(case)):
        order = perturbation.removal_order(case.features(i))
        masks = [perturbation.removal_mask(order, max(1, round(s * order.size))) for s in SHARES]
        rows.append(case.clean[i] - case.probabilities(case.run(i, masks, how, reveal=reveal))[:, case.target[i]])
    curves = np.stack(rows)
    return curves.mean(-1), curves


@metric("area under the activation curve (Ali et al. 2022)", better="higher", substrate="black", replace="unk")
def auac(case: Case, *, substrate: str, replace: str) -> Curves:
    """Content tokens alone are hidden and revealed; the benchmark ``activation`` hides the special ones too."""
    rows = []
    for i in range(len(case)):
        masks = activation.reveal_masks(case.features(i))
        logits = case.run(i, list(masks), _how(case, substrate, replace), reveal=True)
        rows.append(case.probabilities(logits)[:, case.target[i]])
    return activation.auac(np.stack(rows)), np.stack(rows)


@metric(
    "area under the pruning curve of squared logit changes (Ali et al. 2022)",
    better="lower",
    substrate="black",
    replace="unk",
)
def au_mse(case: Case, *, substrate: str, replace: str) -> Curves:
    rows = []
    for i in range(len(case)):
        logits = case.run(i, list(activation.prune_masks(case.features(i))), _how(case, substrate, replace))
        rows.append(activation.squared_change(case.logits[i], logits))
    return activation.au_mse(np.stack(rows)), np.stack(rows)


# -- against the output ------------------------------------------------------------------------------------------
@metric(
    "squared error of the removed scores' sum against the change of the logit, scaled",
    better="lower",
    subsets=50,
    share=0.2,
    seed=0,
    scale=True,
    substrate="black",
    replace="unk",
)
def infidelity(
    case: Case, *, subsets: int, share: float, seed: int, scale: bool, substrate: str, replace: str
) -> NDArray[np.float64]:
    """Random subsets of pixels for pictures: use patches (the benchmark ``sanity``) where pixels alone change
    nothing."""
    rows = []
    for i in range(len(case)):
        scores = case.features(i)
        removed = random_subsets(scores.size, subsets, share=share, seed=seed)
        logits = case.run(i, list(removed), _how(case, substrate, replace))[:, case.target[i]]
        rows.append(infidelity_of(scores, removed, case.logits[i, case.target[i]] - logits, scale=scale))
    return np.array(rows)


@metric("ranked faithfulness of single tokens (Mylonas et al. 2022)", better="higher", modality="text", replace="unk")
def rft(case: Case, *, replace: str) -> NDArray[np.float64]:
    rows = []
    for i in range(len(case)):
        scores = case.features(i)
        logits = case.run(i, list(np.eye(scores.size, dtype=bool)), replace)
        rows.append(ranked_faithfulness(scores, case.clean[i] - case.probabilities(logits)[:, case.target[i]]))
    return np.array(rows)


@metric("relative error |ΣR − f| / |f| of the relevance's sum against the logit", better="lower")
def conservation(case: Case) -> NDArray[np.float64]:
    """Uses all features of an Explanation (special and prefix tokens too, where the method tells); of an array, its
    sum."""
    from whyformer.benchmarks.conservation import relevance_sum
    from whyformer.benchmarks.explaining import Found

    output = case.logits[np.arange(len(case)), case.target]
    if case.explanation is not None:
        sums = np.array([relevance_sum(Found(one))[0] for one in case.explanation])
    else:
        sums = case.scores.reshape(len(case), -1).sum(-1)
    return np.abs(sums - output) / np.maximum(np.abs(output), 1e-12)

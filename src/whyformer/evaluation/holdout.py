"""Measure explanations on two parts of the features, for selection and held out, with shared forward passes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from whyformer.errors import InputError, ModelError
from whyformer.evaluation.registry import Plan
from whyformer.inputs.removal import Removal, logits_without, values_of
from whyformer.methods.task import Task

Goal = Callable[[Tensor], Tensor]
Parts = tuple[list[int], list[int]]


def split(features: list[int], holdout: float, seed: int) -> Parts:
    """Split features into (selection, held out), each sorted; both are all features if none can be held out."""
    if not features:
        raise InputError("arbitrate: a sample has no features that can be removed")
    if holdout == 0 or len(features) < 2:
        return features, features
    count = min(max(round(len(features) * holdout), 1), len(features) - 1)
    mixed = [features[i] for i in torch.randperm(len(features), generator=torch.Generator().manual_seed(seed)).tolist()]
    return sorted(mixed[count:]), sorted(mixed[:count])


def measure(
    task: Task, removed: Removal, plan: Plan, scores: Sequence[Sequence[Tensor]], goals: Sequence[Goal],
    parts: Sequence[Parts], logits: Tensor, batch_size: int,
) -> tuple[Tensor, dict[str, int]]:  # fmt: skip
    """Compute a metric of explanations on both parts of the features; explanations share perturbed inputs.

    Args:
        task: the model and its inputs.
        removed: how features are removed.
        plan: the metric.
        scores: ``[B, P]`` for each of M explanations and each of K goals.
        goals: functions logits ``[B, C]`` -> measured output ``[B]``.
        parts: parts of each sample, see :func:`split`.
        logits: ``[B, C]`` of the clean inputs.
        batch_size: perturbed samples in one forward pass.

    Returns:
        The values ``[2, M, B, K]``, and the number of "perturbed" inputs, also without sharing ("unshared").
    """
    rows: dict[tuple[int, tuple[int, ...]], int] = {}
    requests: dict[tuple[int, int, int, int], tuple[np.ndarray, list[int]]] = {}
    unshared: list[set[int]] = [set() for _ in scores]
    for p, m, b, k in itertools.product(range(2), range(len(scores)), range(len(parts)), range(len(goals))):
        part = np.array(parts[b][p])
        selected = scores[m][k][b][parts[b][p]].cpu().numpy()
        subsets = [tuple(part[mask].tolist()) for mask in plan.masks(selected)]
        # -1 stands for the clean output, which is known
        needed = [rows.setdefault((b, s), len(rows)) if s else -1 for s in subsets]
        requests[p, m, b, k] = selected, needed
        unshared[m].update(row for row in needed if row >= 0)
    outcomes = logits_without(task, removed, list(rows), batch_size, "removing features")
    if not bool(torch.isfinite(outcomes).all()):
        raise ModelError(f"{task.method}: the logits without some features are not finite: choose another baseline")
    clean = [goal(logits).double().cpu().numpy() for goal in goals]
    outputs = [values_of(goal, outcomes, [b for b, _ in rows], logits).double().cpu().numpy() for goal in goals]
    figures = torch.zeros(2, len(scores), len(parts), len(goals), dtype=torch.float64)
    for (p, m, b, k), (selected, needed) in requests.items():
        observed = np.array([outputs[k][row] if row >= 0 else clean[k][b] for row in needed])
        figures[p, m, b, k] = float(plan.score(selected, float(clean[k][b]), observed)[0])
    return figures, {"perturbed": len(rows), "unshared": sum(map(len, unshared))}

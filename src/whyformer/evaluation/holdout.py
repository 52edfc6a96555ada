"""Explanations measured on two parts of the features, one that chooses and one held out, with shared forwards."""

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
    """(part that chooses, part held out), each in order; both are everything where nothing can be held out."""
    if not features:
        raise InputError("arbitrate: a sample has no features that could be taken out")
    if holdout == 0 or len(features) < 2:
        return features, features
    count = min(max(round(len(features) * holdout), 1), len(features) - 1)
    mixed = [features[i] for i in torch.randperm(len(features), generator=torch.Generator().manual_seed(seed)).tolist()]
    return sorted(mixed[count:]), sorted(mixed[:count])


def measure(
    task: Task, removed: Removal, plan: Plan, scores: Sequence[Sequence[Tensor]], goals: Sequence[Goal],
    parts: Sequence[Parts], logits: Tensor, batch_size: int,
) -> tuple[Tensor, dict[str, int]]:  # fmt: skip
    """Score explanations on both parts of the features; a perturbed input that several of them ask for runs once.

    Args:
        scores: for each of M explanations and each of K goals, ``[B, P]``.
        goals: what is watched: logits ``[B, C]`` -> ``[B]``.
        parts: of each sample, see :func:`split`.
        logits: ``[B, C]`` of the clean inputs.

    Returns:
        (``[2, M, B, K]``; forwards "perturbed" and what they were "unshared", each explanation on its own)
    """
    rows: dict[tuple[int, tuple[int, ...]], int] = {}
    asked: dict[tuple[int, int, int, int], tuple[np.ndarray, list[int]]] = {}
    alone: list[set[int]] = [set() for _ in scores]
    for p, m, b, k in itertools.product(range(2), range(len(scores)), range(len(parts)), range(len(goals))):
        part = np.array(parts[b][p])
        own = scores[m][k][b][parts[b][p]].cpu().numpy()
        subsets = [tuple(part[mask].tolist()) for mask in plan.masks(own)]
        # nothing taken out: the clean output, which is known
        places = [rows.setdefault((b, s), len(rows)) if s else -1 for s in subsets]
        asked[p, m, b, k] = own, places
        alone[m].update(row for row in places if row >= 0)
    found = logits_without(task, removed, list(rows), batch_size, "taking features out")
    if not bool(torch.isfinite(found).all()):
        raise ModelError(f"{task.method}: without some features the logits are not finite; choose another baseline")
    clean = [goal(logits).double().cpu().numpy() for goal in goals]
    outputs = [values_of(goal, found, [b for b, _ in rows], logits).double().cpu().numpy() for goal in goals]
    figures = torch.zeros(2, len(scores), len(parts), len(goals), dtype=torch.float64)
    for (p, m, b, k), (own, places) in asked.items():
        seen = np.array([outputs[k][row] if row >= 0 else clean[k][b] for row in places])
        figures[p, m, b, k] = float(plan.score(own, float(clean[k][b]), seen)[0])
    return figures, {"perturbed": len(rows), "unshared": sum(map(len, alone))}

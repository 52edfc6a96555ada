"""How faithful an explanation is, by what the model puts out without its features: RFT, deletion, comprehensiveness.

One table of perturbed inputs serves any number of explanations.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whyformer.errors import InputError, ModelError
from whyformer.evaluate.rft import ranked_faithfulness
from whyformer.inputs.removal import Removal, logits_without, values_of
from whyformer.methods.task import Task

Goal = Callable[[Tensor], Tensor]
Parts = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Criterion:
    """What is taken out, and a score from the outputs without it.

    Attributes:
        subsets: features, most relevant first -> sets of them, each taken out at once.
        score: (scores a of the features, clean output, output without each subset) -> a number.
    """

    subsets: Callable[[list[int]], list[list[int]]]
    score: Callable[[Tensor, float, Tensor], float]
    higher_is_better: bool = True


def rft(scores: Tensor, clean: float, outputs: Tensor) -> float:
    """:func:`whyformer.evaluate.rft.ranked_faithfulness` of scores a ``[P]``, where ``outputs`` ``[P]`` are the
    model's without each feature alone."""
    return ranked_faithfulness(scores, clean - outputs)


def _first(order: list[int], fractions: Sequence[float]) -> list[list[int]]:
    # a share of 10 % of 10 features is 1, whatever 0.1 is in binary
    return [order[: max(1, math.ceil(f * len(order) - 1e-9))] for f in fractions]


_STEPS = [i / 10 for i in range(1, 11)]
_SHARES = (0.01, 0.05, 0.1, 0.2, 0.5)
CRITERIA = {
    "rft": Criterion(lambda order: [[t] for t in sorted(order)], rft),
    "deletion": Criterion(
        lambda order: _first(order, _STEPS),
        lambda _, clean, y: float(torch.trapezoid(torch.cat([y.new_tensor([clean]), y]), dx=0.1)),
        higher_is_better=False,
    ),
    "comprehensiveness": Criterion(lambda order: _first(order, _SHARES), lambda _, clean, y: float((clean - y).mean())),
}


def split(features: list[int], holdout: float, seed: int) -> tuple[list[int], list[int]]:
    """(part that chooses, part held out), each in order; both are everything where nothing can be held out."""
    if not features:
        raise InputError("arbitrate: a sample has no features that could be taken out")
    if holdout == 0 or len(features) < 2:
        return features, features
    count = min(max(round(len(features) * holdout), 1), len(features) - 1)
    mixed = [features[i] for i in torch.randperm(len(features), generator=torch.Generator().manual_seed(seed)).tolist()]
    return sorted(mixed[count:]), sorted(mixed[:count])


def measure(
    task: Task,
    removed: Removal,
    criterion: Criterion,
    scores: Sequence[Sequence[Tensor]],
    goals: Sequence[Goal],
    parts: Sequence[Parts],
    logits: Tensor,
    batch_size: int,
) -> tuple[Tensor, dict[str, int]]:
    """Score explanations on both parts of the features; a perturbed input that several of them ask for runs once.

    Args:
        scores: for each of M explanations and each of K goals, ``[B, P]``.
        goals: what is watched: logits ``[B, C]`` -> ``[B]``.
        parts: of each sample, see :func:`split`.
        logits: ``[B, C]`` of the clean inputs.

    Returns:
        (``[2, M, B, K]``; forwards "perturbed" and what they were "unshared", each explanation on its own)
    """
    table: dict[tuple[int, tuple[int, ...]], int] = {}
    places: dict[tuple[int, int, int, int], list[int]] = {}
    alone: list[set[int]] = [set() for _ in scores]

    def everything() -> Iterator[tuple[int, int, int, int]]:
        return itertools.product(range(2), range(len(scores)), range(len(parts)), range(len(goals)))

    for p, m, b, k in everything():
        a = scores[m][k][b].tolist()
        order = sorted(parts[b][p], key=lambda t: (-a[t], t))
        places[p, m, b, k] = [table.setdefault((b, tuple(sorted(s))), len(table)) for s in criterion.subsets(order)]
        alone[m].update(places[p, m, b, k])
    rows = logits_without(task, removed, list(table), batch_size, "taking features out")
    if not bool(torch.isfinite(rows).all()):
        raise ModelError(f"{task.method}: without some features the logits are not finite; choose another baseline")
    outputs = [values_of(goal, rows, [b for b, _ in table], logits).double().cpu() for goal in goals]
    clean = [goal(logits).double().tolist() for goal in goals]
    found = torch.zeros(2, len(scores), len(parts), len(goals), dtype=torch.float64)
    for p, m, b, k in everything():
        found[p, m, b, k] = criterion.score(scores[m][k][b][parts[b][p]], clean[k][b], outputs[k][places[p, m, b, k]])
    return found, {"perturbed": len(table), "unshared": sum(map(len, alone))}

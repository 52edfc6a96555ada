"""Beyond Intuition (Chen et al., TMLR 2023): the last block's attention × its integrated gradient × a weighted rollout.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from whyformer.methods.registry import Count, OptionalBlock, method
from whyformer.methods.task import Scores, Task
from whyformer.methods.vectors.mixtures import AttentionVectors
from whyformer.rules.multipliers import COMPOSITES, CompositeName
from whyformer.tape.walking import GRADIENT, Composite

FIRST = {"head": 3 / 12, "token": 5 / 12}
"""Fraction of the blocks that is skipped by default: the published first block of twelve."""


@method(
    "attention of the last block by its integrated gradient × a rollout weighted by heads or tokens (Beyond Intuition)",
    family="attention",
    citation="Chen et al.: Beyond Intuition: Rethinking Token Attributions inside Transformers, TMLR 2023",
)
def beyond_intuition(
    task: Task,
    *,
    variant: Literal["head", "token"] = "token",
    start_layer: OptionalBlock = None,
    steps: Count = 20,
    composite: CompositeName = "plain",
) -> Scores:
    """The readout row of G ⊙ |R|: R ← R + Ā_b R from R = I over the blocks, G = mean_h (mean_t ∇A_L(t x))⁺ of the last
    block at t = 0 … 1 on the path from zero to the input x (pixels, or the first block's input).

    "token": Ā_b = mean_h A_b with column j times ‖Σ_h v_j^h W_O^h‖ / ‖h_b[j]‖, the norm of the token's projected
    values relative to that of its block input. "head": Ā_b = Σ_h I_h A_b^h with I_h ∝ mean_ij |A^hᵀ ∇A^h|, ΣI_h = 1.

    Args:
        variant: "token" (BT-T) or "head" (BT-H).
        start_layer: first block of R, from 0; None: the published 5 (token) or 3 (head) of 12 blocks, scaled to the
            model's number of blocks and rounded down.
        steps: number of points t; each costs a forward and a backward pass.
        composite: the rules with which gradients are computed, see :mod:`whyformer.rules.multipliers`.

    Raises:
        MethodNotApplicable: several sequences, windows, no blocks or no attention.
    """
    task.refuse_streams()
    last = task.layer(-1)
    first = int(FIRST[variant] * task.blocks()) if start_layer is None else task.layer(start_layer)
    maps: dict[int, Tensor] = {}

    def observe(index: int, weights: Tensor, flow: Tensor) -> None:
        if variant == "head":
            used = flow * task.real_rows(None, flow.shape[::3]).to(flow)[:, None, None]
            influence = (weights.transpose(-2, -1) @ used).abs().mean((-2, -1))
            total = influence.sum(1, keepdim=True)
            share = torch.where(total > 0, influence / torch.where(total > 0, total, 1), 0)
            maps[index] = torch.einsum("bh,bhij->bij", share, weights)

    rules = COMPOSITES[composite]
    walked = task.walk(task.attended(start=first), rules, observe, range(first, task.blocks()))
    row = walked.row
    if variant == "token":
        attended = task.attended()
        vectors = AttentionVectors(task, attended)
        for index in list(attended.attentions)[first:]:
            mixture = vectors.at(index, "sum")
            size = mixture.residual_norms()
            ratio = mixture.parts.sum(1).norm(dim=-1) / torch.where(size > 0, size, 1)
            maps[index] = mixture.weights.mean(1) * ratio[:, None]
    gradient = _integrated(task, last, steps, rules).clamp(min=0).mean(1)
    rolled = torch.eye(row.shape[-1], dtype=gradient.dtype, device=row.device).expand(len(row), -1, -1)
    for index in sorted(maps):
        rolled = rolled + maps[index].to(rolled) @ rolled
    return task.of_rows(torch.einsum("bi,bij->bj", row.to(rolled.dtype), gradient * rolled.abs()), walked.logits)


def _integrated(task: Task, block: int, steps: int, rules: Composite) -> Tensor:
    """Return the mean ``[B, H, N, N]`` over t of a block's ∇A at t times the input."""
    recorded = task.rooted_pass(GRADIENT)
    roots = {name: task.by_sample(name, value.detach()) for name, value in recorded.root_values.items()}
    copies, total = task.copies(1, recorded.logits.detach()), list[Tensor]()

    def observe(_: int, __: Tensor, flow: Tensor) -> None:
        total[:] = [flow if not total else total[0] + flow]

    for t in task.progress(torch.linspace(0, 1, steps).tolist(), "beyond intuition", steps):
        values = {name: task.packed(name, t * x) for name, x in roots.items()}
        copies.walk(copies.attended(values, recorded.roots, start=block), rules, observe, [block])
    return total[0] / steps

"""Generic Attention Explainability (Chefer, Gur, Wolf, ICCV 2021): one tower, two towers, encoder and decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from whyformer.errors import InputError
from whyformer.methods.map_passes import RowsName
from whyformer.methods.maps import stream_maps
from whyformer.methods.maps.aggregation import Aggregation, Choices
from whyformer.methods.maps.rollout import over_gradients
from whyformer.methods.registry import Block, method
from whyformer.methods.structure import NOT_YET
from whyformer.methods.task import Scores, Task
from whyformer.rules.multipliers import COMPOSITES, CompositeName


@method(
    "attention × its gradient in every block, rolled out (Generic Attention Explainability)",
    family="attention",
    citation="Chefer, Gur, Wolf: Generic Attention-model Explainability, ICCV 2021",
    identity=lambda settings: (settings["aggregation"] or {}).get("layers", "sum_product") == "sum_product",
)
def gae(
    task: Task,
    *,
    start_layer: Block = 0,
    aggregation: Choices = None,
    side: Literal["auto", "image", "text"] = "auto",
    composite: CompositeName = "plain",
) -> Scores:
    """Ā_b = mean_h (∇A_b ⊙ A_b)⁺, R ← R + Ā_b R from R = I; the scores are the readout row of R,
    Σ_i w_i R_i with w_i ∝ ‖∂f/∂h_i‖, where f is the target and h the last state (1 at a single row, such as CLS).

    One forward and one backward pass; computed with row vectors instead of matrices, without storing attention maps.
    If streams attend to one another (encoder and decoder, LXMERT), the paper's cross-attention rules are used. Each
    tower of a two-tower model (CLIP) is explained separately; the target is the index of the text with which a picture
    is compared.

    Args:
        start_layer: first block used, from 0. The published CLIP figures use the last block only (−1).
        aggregation: see :mod:`whyformer.methods.maps.aggregation`; applied to (∇A ⊙ A)⁺ of each head.
        side: the tower of a two-tower model whose scores are the main ones: "auto" (the main input's), "image" or
            "text".
        composite: the rules with which ∇A is computed, see :mod:`whyformer.rules.multipliers`.

    If a row of R − I is all zero, cross-attention leaves that row at zero. The authors' code for DETR divides 0 by 0
    there and then drops the contribution of the whole block, so its map of such a query is lower.
    """
    how = Aggregation(layers="sum_product").with_choices(aggregation)
    structure = task.structure
    towers = [key for key in structure.ends if len(key) == 1]
    if side != "auto" and (len(towers) < 2 or any(a.queries != a.keys for a in structure.attentions.values())):
        raise InputError(f"gae: side={side!r} is only for models with an image and a text tower: omit it")
    if structure.is_plain or all(a.queries == a.keys for a in structure.attentions.values()):
        return _side(task, over_gradients(task, start_layer, positive_product, how, composite), side)
    return _across(task, how, start_layer, composite)


def _side(task: Task, scores: Scores, side: str) -> Scores:
    """Return the scores of one tower of a two-tower model."""
    main = "text" if task.inputs.modality == "text" else "image"
    if side in ("auto", main):
        return scores
    name = next((n for n, part in scores.parts.items() if part.inputs and part.inputs.modality == side), None)
    if name is None:
        raise task.refuse(f"no attention connects its output with its {side}", verdict=NOT_YET)
    return replace(scores.parts[name], diagnostics=scores.diagnostics)


def positive_product(weights: Tensor, gradient: Tensor) -> Tensor:
    """Return (A ⊙ ∇A)⁺."""
    return (weights * gradient).clamp_(min=0)


# -- encoder and decoder -----------------------------------------------------------------------------------------
def normalised_excess(relevance: Tensor) -> Tensor:
    """Return N(R) = R̂ / rowsum(R̂) + I with R̂ = R − I; rows of R̂ that are all zero remain zero (ICCV 2021, Eq. 8–9)."""
    identity = torch.eye(relevance.shape[-1], dtype=relevance.dtype, device=relevance.device)
    excess = relevance - identity
    sums = excess.sum(-1, keepdim=True)
    return torch.where(sums != 0, excess / torch.where(sums != 0, sums, 1), 0) + identity


def _across(task: Task, how: Aggregation, start: int, composite: CompositeName) -> Scores:
    """Explain streams that attend to one another."""
    rules = COMPOSITES[composite]
    work = stream_maps.begin(task, rules, row_alone=how.rows == "readout")
    attention_indices, maps = work.attentions_for(how, start), {}

    def observe(index: int, weights: Tensor, flow: Tensor) -> None:
        maps[index] = how.fuse(positive_product(weights, flow))

    walked = work.walk(rules, observe, attention_indices)
    widest = reduce(torch.promote_types, (fused.dtype for fused in maps.values()), torch.float32)
    paths = work.paths({number: fused.to(widest) for number, fused in maps.items()}, walked.readouts)
    rows: dict[RowsName, Tensor] = {}
    for (s, x), matrix in _relevance(task, paths.steps, next(iter(maps.values()))).items():
        if s in paths.readouts:
            row = torch.einsum("bq,bqn->bn", paths.readouts[s].to(matrix.dtype), matrix)
            rows[x] = rows[x] + row if x in rows else row
    return work.scores(rows, walked.logits)


def _relevance(
    task: Task, steps: Sequence[stream_maps.MapStep], some: Tensor
) -> dict[tuple[RowsName, RowsName], Tensor]:
    """Return R_sx of the rows x in the rows s: R_ss = I at the input of each stream s, in the data type of ``some``
    map; layer by layer, R_sx += Ā R_sx for all x if s attends to itself, and R_sq += N(R_ss)ᵀ Ā N(R_qq), R_ss += Ā R_qs
    if s attends to q."""
    sizes = {pair[i]: fused.shape[1 + i] for step in steps for pair, fused in step.items() for i in (0, 1)}
    relevance = {
        (s, s): torch.eye(n, dtype=some.dtype, device=some.device).expand(len(some), n, n) for s, n in sizes.items()
    }
    for step in steps:
        before = dict(relevance)

        def add(pair: tuple[RowsName, RowsName], more: Tensor) -> None:
            relevance[pair] = relevance[pair] + more if pair in relevance else more

        for (s, q), fused in step.items():
            if fused.shape[1:] != (sizes[s], sizes[q]):
                raise task.refuse(
                    "the keys of some of its rows differ between blocks (they are joined with other keys)",
                    verdict="is not supported yet",
                )
            if isinstance(step, stream_maps.Copies):
                for pair in [pair for pair in before if pair[0] == q]:
                    add((s, pair[1]), fused.to(before[pair]) @ before[pair])
                continue
            if s == q:
                for pair in [pair for pair in before if pair[0] == s]:
                    add(pair, fused @ before[pair])
                continue
            add((s, q), normalised_excess(before[s, s]).transpose(-2, -1) @ fused @ normalised_excess(before[q, q]))
            if (q, s) in before:
                add((s, s), fused @ before[q, s])
    return relevance

"""Methods that use only attention maps: raw attention and rollout. They do not depend on the class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from whyformer.methods.maps import stream_maps
from whyformer.methods.maps.aggregation import Aggregation, Choices
from whyformer.methods.registry import Block, Checked, method
from whyformer.methods.task import Scores, Task
from whyformer.rules.multipliers import COMPOSITES, CompositeName

HeadFusion = Literal["mean", "max", "min"]
_BELOW_ONE: Checked = ("a number from 0 up to (not including) 1", lambda v: not isinstance(v, bool) and 0 <= v < 1)
DiscardRatio = Annotated[float, _BELOW_ONE]
ROLLOUT = "Abnar, Zuidema: Quantifying Attention Flow in Transformers, ACL 2020"


@method(
    "attention of one block, averaged over heads (default: the last block)",
    family="attention",
    citation="baseline of Chefer et al., CVPR 2021",
    class_specific=False,
)
def raw_attention(task: Task, *, block: Block = -1, aggregation: Choices = None) -> Scores:
    """mean_h A_b, the readout row: the row of CLS or, if the rows i are pooled, their mean with weights
    w_i ∝ ‖∂f/∂h_i‖ for f = ½‖logits‖² and the last state h.

    Args:
        block: index of the block; negative ones count from the last.
        aggregation: see :mod:`whyformer.methods.maps.aggregation`.
    """
    task.layer(block, "block")
    return over_attention(task, Aggregation(layers=block).with_choices(aggregation))


def how_of(head_fusion: str, normalize_rows: bool, aggregation: Choices) -> Aggregation:
    """Return the reduction for a rollout's settings."""
    layers = "rollout" if normalize_rows else "sum_product"
    return Aggregation(head_fusion, layers).with_choices(aggregation)


@method(
    "product over blocks of head-averaged attention plus identity",
    family="attention",
    citation=ROLLOUT,
    class_specific=False,
    identity=lambda s: how_of(s["head_fusion"], s["normalize_rows"], s["aggregation"]).layers == "sum_product",
)
def rollout(
    task: Task,
    *,
    head_fusion: HeadFusion = "mean",
    discard_ratio: DiscardRatio = 0.0,
    start_layer: Block = 0,
    normalize_rows: bool = True,
    gradient_weighted: bool = False,
    aggregation: Choices = None,
    composite: CompositeName = "plain",
) -> Scores:
    """Â_b = rownorm(fuse_h A_b + I), J = Â_L ⋯ Â_start; the scores are the readout row of J, Σ_i w_i J_i with
    w_i ∝ ‖∂f/∂h_i‖ at the last state h, and f = ½‖logits‖², or the target with ``gradient_weighted``.

    Args:
        head_fusion: "mean" (published), "max" or "min" over heads.
        discard_ratio: fraction of each sample's smallest map entries, without those of padding, that is set to 0 before
            the identity is added.
        start_layer: first block used, from 0. The published perturbation figures use 1.
        normalize_rows: divide rows by their sums.
        gradient_weighted: use (fuse_h A ⊙ ∇A)⁺ instead of A, so that the map depends on the class.
        aggregation: see :mod:`whyformer.methods.maps.aggregation`.
        composite: the rules with which ∇A is computed, see :mod:`whyformer.rules.multipliers`.

    Unlike vit-explain, this does not divide *columns* by row sums or pair maps with the gradients of other blocks, and
    it may discard any entry, including the attention of CLS to itself.
    """
    how = how_of(head_fusion, normalize_rows, aggregation)

    if gradient_weighted:
        scores = over_gradients(task, start_layer, torch.mul, how, composite, discard_ratio=discard_ratio, signed=False)
        return replace(scores, diagnostics={"class_specific": True})
    return over_attention(task, how, start_layer, discard_ratio)


def over_attention(task: Task, how: Aggregation, start: int = 0, discard_ratio: float = 0.0) -> Scores:
    """Fuse the heads of each map in turn (one map in memory at a time), then reduce layers and rows.

    Args:
        task: the task.
        how: the reduction of heads, layers and rows.
        start: first block used.
        discard_ratio: fraction of the smallest entries of each fused map that is set to 0.
    """
    work = stream_maps.begin(task, row_alone=how.rows == "readout" and not discard_ratio)
    maps, (logits, readouts) = dict[int, Tensor](), work.read_rows()
    for number in work.attentions_for(how, start):
        maps[number] = _pruned(work, number, how.fuse(work.map_pass.map(number)), discard_ratio)
        work.map_pass.release()
    return work.scores(stream_maps.reduce(task, how, work.paths(maps, readouts)), logits)


def over_gradients(
    task: Task, start: int, weigh: Callable[[Tensor, Tensor], Tensor], how: Aggregation, composite: CompositeName,
    scores: bool = False, signed: bool = True, discard_ratio: float = 0.0,
) -> Scores:  # fmt: skip
    """Reduce layers and rows of fuse_h weigh(A_b, ∇A_b) of the blocks from ``start``, with one forward and one backward
    pass. With ``scores``, the attention scores before the softmax replace A_b; without ``signed``, negative entries of
    the fused maps are set to 0; ``discard_ratio`` as for :func:`over_attention`.

    Each A is recomputed when its gradient arrives, and fused immediately, so that no map is stored.
    """
    rules, maps = COMPOSITES[composite], dict[int, Tensor]()
    work = stream_maps.begin(task, rules, row_alone=how.rows == "readout" and not discard_ratio)

    def observe(index: int, weights: Tensor, flow: Tensor) -> None:
        fused = how.fuse(weigh(weights, flow))
        maps[index] = _pruned(work, index, fused if signed else fused.clamp(min=0), discard_ratio)

    walked = work.walk(rules, observe, work.attentions_for(how, start), scores=scores)
    paths = work.paths(maps, walked.readouts)
    return work.scores(stream_maps.reduce(task, how, paths), walked.logits)


def _pruned(work: stream_maps.StreamTask, number: int, fused: Tensor, share: float) -> Tensor:
    """Set the share of the smallest entries of each map ``[B, Q, K]`` to 0, without counting those of padding."""
    if not share:
        return fused
    attention = work.attentions[number]
    queries, keys = (
        work.task.real_rows(key, (len(fused), rows)).to(fused.device)
        for key, rows in zip((attention.queries, attention.keys), fused.shape[1:], strict=True)
    )
    real = queries[..., None] & keys[:, None]
    counts = (real.sum((1, 2)).double() * share).long()
    ranks = fused.masked_fill(~real, float("inf")).flatten(1).argsort(stable=True).argsort()
    return fused.masked_fill((ranks < counts[:, None]).view_as(fused), 0)

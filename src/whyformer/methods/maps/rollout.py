"""Methods that read attention maps alone: raw attention, rollout, attention flow. They do not depend on the class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from whyformer.composites.gradient import GRADIENT
from whyformer.engine.probes import AttentionCall, Flows, Maps
from whyformer.engine.run import Recording
from whyformer.errors import InputError, MissingExtra
from whyformer.methods.maps.aggregation import Aggregation, Choices
from whyformer.methods.registry import Block, Count, method
from whyformer.methods.task import Scores, Task

Fusion = Literal["mean", "max", "min"]
Share = Annotated[float, ("a number from 0 up to (not including) 1", lambda v: not isinstance(v, bool) and 0 <= v < 1)]
_ROLLOUT = "Abnar, Zuidema: Quantifying Attention Flow in Transformers, ACL 2020"


@method(
    "attention of one block, averaged over heads (default: the last block)",
    family="attention",
    citation="baseline of Chefer et al., CVPR 2021; survey 1.1",
    class_specific=False,
)
def raw_attention(task: Task, *, block: Block = -1, aggregation: Choices = None) -> Scores:
    """mean_h A_b, the readout row (CLS, or the rows that are pooled).

    Args:
        block: the block; negative numbers count from the last.
        aggregation: see :mod:`whyformer.methods.maps.aggregation`.
    """
    task.block(block, "block")
    return over_attention(task, Aggregation(layers=block).with_choices(aggregation).within(task.blocks()))


@method(
    "product over blocks of head-averaged attention plus identity",
    family="attention",
    citation=_ROLLOUT + "; survey 1.2",
    class_specific=False,
)
def rollout(
    task: Task,
    *,
    head_fusion: Fusion = "mean",
    discard_ratio: Share = 0.0,
    start_layer: Block = 0,
    normalize_rows: bool = True,
    gradient_weighted: bool = False,
    aggregation: Choices = None,
) -> Scores:
    """Â_b = rownorm(fuse_h A_b + I), J = Â_L ⋯ Â_start; the scores are the readout row of J.

    Args:
        head_fusion: "mean" (published), "max" or "min" over heads.
        discard_ratio: share of each sample's smallest map entries set to 0 before the identity is added.
        start_layer: first block used, from 0. The published perturbation figures were made with 1.
        normalize_rows: divide rows by their sums.
        gradient_weighted: use (fuse_h A ⊙ ∇A)⁺ instead of A, so that the map depends on the class.
        aggregation: see :mod:`whyformer.methods.maps.aggregation`.

    vit-explain divides *columns* by row sums and pairs maps with the wrong block's gradients; this does not
    (methods.md §8 #1–3). Its discard spares the attention of CLS to itself, the first entry; here all entries can go.
    """
    start = task.block(start_layer)
    how = Aggregation(head_fusion, "rollout" if normalize_rows else "sum_product").with_choices(aggregation)
    how = how.within(task.blocks())

    def prune(fused: Tensor) -> Tensor:
        count = int(fused.shape[-1] * fused.shape[-2] * discard_ratio)
        if not count:
            return fused
        flat = fused.flatten(1)
        return flat.scatter(1, flat.argsort(dim=1, stable=True)[:, :count], 0).view_as(fused)

    if gradient_weighted:
        recording, maps, row = observe_gradients(task, start, torch.mul, how, lambda f: prune(f.clamp(min=0)))
        values = how.reduce(maps, row, task.inputs.mask)
        return Scores(values, recording.logits, diagnostics={"class_specific": True})
    return over_attention(task, how, start, prune)


def over_attention(task: Task, how: Aggregation, start: int = 0, prune: Any = lambda fused: fused) -> Scores:
    """Fuse heads as each map appears (one block's map alive at a time), then reduce layers and rows."""
    kept: dict[int, Tensor] = {}

    def watch(call: AttentionCall) -> None:
        if call.index >= 0 and how.wants(call.index, start):
            kept[call.index] = prune(how.fuse(call.map()))

    recording, row = task.readout_pass(Maps(watch))
    maps = task.global_maps(kept, row.shape[-1])
    return Scores(how.reduce(maps, row, task.inputs.mask), recording.logits)


def observe_gradients(
    task: Task,
    start: int,
    weigh: Callable[[Tensor, Tensor], Tensor],
    how: Aggregation,
    finish: Callable[[Tensor], Tensor] = lambda fused: fused,
    **options: Any,
) -> tuple[Recording, list[Tensor], Tensor]:
    """(recording, finish(fuse_h weigh(A_b, ∇A_b)) of each block from ``start``, readout row): one forward and one
    backward pass.

    A is recomputed where its gradient arrives and fused at once, so that no block's map is kept; of long inputs only a
    few heads are there at a time.
    """
    maps: dict[int, Tensor] = {}
    heads: dict[int, int] = {}

    def observe(index: int, weights: Tensor, flow: Tensor) -> None:
        if not how.wants(index, start):
            return
        fused, new = how.fuse(weigh(weights, flow)), weights.shape[1]
        maps[index] = how.join(maps[index], heads[index], fused, new) if index in maps else fused
        heads[index] = heads.get(index, 0) + new

    recording = task.record(GRADIENT, Flows(observe, how.first(start), how.by_heads), **options)
    _, row = task.gradient_pass(recording)
    finished = {index: finish(fused) for index, fused in maps.items()}
    return recording, task.global_maps(finished, row.shape[-1]), row


@method(
    "maximum flow from the readout token to each input token through the attention graph",
    family="attention",
    citation=_ROLLOUT + "; baseline of Ali et al., ICML 2022",
    class_specific=False,
)
def attention_flow(task: Task, *, head_fusion: Fusion = "mean", limit: Count = 4096) -> Scores:
    """Max-flow from the readout tokens at the top to token j at the bottom; capacities Â_b = rownorm(fuse_h A_b + I).

    Solved by scipy (Dinic) with capacities in units of 1e-6, one problem for each input token. Each score is a flow by
    itself; the authors' code divides the flows by their sum, so scale the scores to sum 1 to compare.

    Args:
        limit: largest tokens × blocks accepted; ViT-B/16 is 197 × 12 = 2364 and takes tens of seconds a picture.

    Raises:
        InputError: the problem is larger than ``limit``.
        MissingExtra: scipy is not installed.
    """
    try:
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import maximum_flow
    except ImportError as error:
        raise MissingExtra('attention_flow needs scipy: pip install "whyformer[methods]"') from error
    how = Aggregation(head_fusion)
    kept: dict[int, Tensor] = {}

    def watch(call: AttentionCall) -> None:
        tokens, blocks = call.value.shape[-2], task.blocks()
        if tokens * blocks > limit:
            raise InputError(
                f"attention_flow: {tokens} tokens × {blocks} blocks = {tokens * blocks} is more "
                f"than limit={limit}; raise limit to "
                "accept the time (it grows with tokens³ × blocks), or use rollout"
            )
        if call.index >= 0:
            kept[call.index] = how.fuse(call.map())

    recording, row = task.readout_pass(Maps(watch))
    maps = task.global_maps(kept, row.shape[-1])
    identity = torch.eye(row.shape[-1], dtype=torch.float64)
    flows = torch.zeros_like(row, dtype=torch.float64)
    samples = task.progress(range(len(row)), "attention flow", len(row))
    for b in samples:
        capacities = [m[b].double().cpu() + identity for m in maps]
        flows[b] = flow_to_inputs(
            [c / c.sum(-1, keepdim=True) for c in capacities], row[b].double().cpu(), coo_array, maximum_flow
        )
    return Scores(flows.to(row.dtype), recording.logits)


def flow_to_inputs(capacities: list[Tensor], row: Tensor, coo_array: Any, maximum_flow: Any) -> Tensor:
    """``[N]`` maximum flow to each input token; a source feeds the top level with the readout row's weights."""
    import numpy as np

    unit, blocks, n = 1_000_000, len(capacities), len(row)
    source = (blocks + 1) * n
    starts, ends, sizes = [], [], []
    for level, capacity in enumerate(capacities):  # level b: edges from node b+1 (output of block b) down to b
        i, j = np.nonzero(capacity.numpy() > 0)
        starts.append((level + 1) * n + i)
        ends.append(level * n + j)
        sizes.append(capacity.numpy()[i, j])
    top = np.nonzero(row.numpy() > 0)[0]
    starts.append(np.full(len(top), source))
    ends.append(blocks * n + top)
    sizes.append(row.numpy()[top])
    amounts = np.round(np.concatenate(sizes) * unit).astype(np.int32)
    graph = coo_array((amounts, (np.concatenate(starts), np.concatenate(ends))), shape=(source + 1, source + 1)).tocsr()
    return torch.tensor([maximum_flow(graph, source, j).flow_value / unit for j in range(n)], dtype=torch.float64)

"""Attention flow: maximum flow from the readout to each token through the graph of all attention maps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from whyformer.errors import InputError, MissingExtra
from whyformer.methods.maps import stream_maps
from whyformer.methods.maps.aggregation import Aggregation
from whyformer.methods.maps.rollout import ROLLOUT, HeadFusion
from whyformer.methods.registry import Count, method
from whyformer.methods.task import Scores, Task


@method(
    "maximum flow from the readout token to each input token through the attention graph",
    family="attention",
    citation=ROLLOUT + "; baseline of Ali et al., ICML 2022",
    class_specific=False,
)
def attention_flow(task: Task, *, head_fusion: HeadFusion = "mean", limit: Count = 4096) -> Scores:
    """Max-flow from the readout tokens at the top to token j at the bottom; capacities Â_b = rownorm(fuse_h A_b + I).

    Solved by scipy (Dinic) with capacities in units of 1e-6, one problem per input token. The scores are flows; the
    authors' code divides them by their sum, so scale the scores to sum 1 to compare.

    Args:
        head_fusion: "mean", "max" or "min" over heads.
        limit: maximum of tokens × blocks; ViT-B/16 has 197 × 12 = 2364 and takes tens of seconds per picture.

    Raises:
        InputError: the problem is larger than ``limit``.
        MissingExtra: scipy is not installed.
    """
    try:
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import maximum_flow
    except ImportError as error:
        raise MissingExtra('attention_flow needs scipy: pip install "whyformer[methods]"') from error
    task.refuse_streams()
    work, how = stream_maps.begin(task, only=task.structure.tower(task.inputs.name)), Aggregation(head_fusion)
    attention_indices, (logits, readouts) = work.attentions_for(how), work.read_rows()
    _refuse_large(max(row.shape[1] for row in readouts.values()), task.structure.layers, limit)
    fused = {}
    for number in attention_indices:
        fused[number] = how.fuse(work.map_pass.map(number))
        work.map_pass.release()
    steps, flows = work.steps(fused), {}
    for key, row in readouts.items():
        maps = [step[key, key] for step in steps if (key, key) in step]
        identity = torch.eye(row.shape[1], dtype=torch.float64)
        totals = torch.zeros_like(row, dtype=torch.float64)
        for b in task.progress(range(len(row)), "attention flow", len(row)):
            capacities = [m[b].double().cpu() + identity for m in maps]
            capacities = [c / c.sum(-1, keepdim=True) for c in capacities]
            totals[b] = flow_to_inputs(capacities, row[b].double().cpu(), coo_array, maximum_flow)
        flows[key] = totals.to(row.dtype)
    return work.scores(flows, logits)


def _refuse_large(tokens: int, blocks: int, limit: int) -> None:
    if tokens * blocks > limit:
        raise InputError(
            f"attention_flow: {tokens} tokens × {blocks} blocks = {tokens * blocks} is more than limit={limit}: "
            "increase limit to accept the run time (it grows with tokens³ × blocks), or use rollout"
        )


def flow_to_inputs(capacities: list[Tensor], row: Tensor, coo_array: Any, maximum_flow: Any) -> Tensor:
    """Return the maximum flow ``[N]`` to each input token from a source that feeds the top level by the readout row."""
    import numpy as np

    unit, blocks, n = 1_000_000, len(capacities), len(row)
    source = (blocks + 1) * n
    starts, ends, sizes = [], [], []
    for level, capacity in enumerate(capacities):  # level b: edges from nodes b + 1 (output of block b) to nodes b
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

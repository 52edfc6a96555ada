"""Grad-CAM on the last attention."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from whyformer.methods.map_passes import RowsName
from whyformer.methods.maps import stream_maps
from whyformer.methods.maps.aggregation import Aggregation
from whyformer.methods.registry import Block, method
from whyformer.methods.task import Scores, Task
from whyformer.rules.multipliers import COMPOSITES, CompositeName


@method(
    "Grad-CAM with the heads of the last attention as channels",
    family="attention",
    citation="Selvaraju et al., ICCV 2017, as baseline of Chefer et al., CVPR 2021",
)
def gradcam_attention(
    task: Task, *, block: Block = -1, count_padding: bool = False, composite: CompositeName = "plain"
) -> Scores:
    """(mean_h w_h a_h)⁺ with a_h the readout row of A_h, and w_h the mean of ∇A_h: over the patches of its readout row
    for pictures, over the whole map for text (as the reference code does for ViT and for BERT). No min–max. Rows that
    also attend to another stream (in a decoder) have one map per stream, whose head weights are taken over its rows.

    Args:
        block: index of the block; negative ones count from the last. The backward pass stops at this block.
        count_padding: also average ∇A over padded tokens, as the reference code does; the scores of a sentence then
            depend on the amount of padding.
        composite: the rules of the backward pass, see :mod:`whyformer.rules.multipliers`.
    """
    task.layer(block, "block")
    rules = COMPOSITES[composite]
    work = stream_maps.begin(task, rules)
    attention_indices = work.attentions_for(Aggregation(layers=block))
    observed: dict[int, tuple[Tensor, Tensor]] = {}

    def observe(index: int, weights: Tensor, flow: Tensor) -> None:
        observed[index] = (weights, flow)

    walked = work.walk(rules, observe, attention_indices)
    readouts = walked.readouts
    maps: dict[RowsName, list[Tensor]] = defaultdict(list)
    for number, (weights, gradient) in sorted(observed.items()):
        queries, keys = work.attentions[number].queries, work.attentions[number].keys
        if queries not in readouts:
            continue
        row = readouts[queries].to(weights)
        mixed = torch.einsum("bq,bhqk->bhk", row, weights)
        picture = next((n for n, side in task.sources.items() if n in keys and side.modality == "image"), None)
        if picture is not None:
            along_row = torch.einsum("bq,bhqk->bhk", row, gradient)
            cells = task.cells(picture, keys).rows.to(mixed.device)[:, None]
            head = along_row.gather(-1, cells.expand(*along_row.shape[:2], -1)).mean(-1)
        else:
            shapes = ((queries, (len(row), weights.shape[-2])), (keys, (len(row), weights.shape[-1])))
            real = [
                (torch.ones(shape) if count_padding else task.real_rows(key, shape)).to(gradient)
                for key, shape in shapes
            ]
            head = torch.einsum("bhqk,bq,bk->bh", gradient, *real) / (real[0].sum(-1) * real[1].sum(-1))[:, None]
        maps[keys].append((mixed * head[..., None]).to(task.inputs.tensor.device))
    if not maps:
        raise task.refuse(f"its block {block} has no recognizable attention")
    rows = {keys: torch.cat(heads, 1).mean(1).clamp(min=0) for keys, heads in maps.items()}
    return work.scores(rows, walked.logits)

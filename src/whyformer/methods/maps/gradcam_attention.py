"""Grad-CAM on the last attention."""

from __future__ import annotations

import torch
from torch import Tensor

from whyformer.composites.gradient import GRADIENT
from whyformer.engine.probes import Flows
from whyformer.methods.registry import Block, method
from whyformer.methods.task import Scores, Task


@method(
    "Grad-CAM with the heads of the last attention as channels",
    family="attention",
    citation="Selvaraju et al., ICCV 2017, as baseline of Chefer et al., CVPR 2021",
)
def gradcam_attention(task: Task, *, block: Block = -1, count_padding: bool = False) -> Scores:
    """(mean_h w_h A_h)⁺, the readout row, with w_h the mean of ∇A_h: over the patches of the readout row for pictures,
    over the whole map for text (as the reference code does for ViT and for BERT). No min–max.

    Args:
        block: the block; negative numbers count from the last. Nothing below it is differentiated.
        count_padding: also average ∇A over padded tokens, as the reference code does; then the scores of a sentence
            depend on how far it is padded.
    """
    first = task.block(block, "block")
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def observe(index: int, weights: Tensor, flow: Tensor) -> None:
        if index == first:
            seen[index] = (weights, flow)

    recording = task.record(GRADIENT, Flows(observe, first))
    _, row = task.gradient_pass(recording)
    if first not in seen:
        raise task.refuse(f"no attention was seen in its block {first}")
    weights, gradient = seen[first]
    task.global_maps({first: weights[:, 0]}, row.shape[-1])
    mixed = torch.einsum("bq,bhqk->bhk", row.to(weights.dtype), weights)
    if task.inputs.modality == "image":
        along_row = torch.einsum("bq,bhqk->bhk", row.to(weights.dtype), gradient)
        cells = task.cells(mixed.shape[-1]).to(mixed.device)[:, None]
        head = along_row.gather(-1, cells.expand(*along_row.shape[:2], -1)).mean(-1)
    elif task.inputs.row_mask is not None and not count_padding:
        real = task.inputs.row_mask.to(gradient.dtype)
        head = torch.einsum("bhqk,bq,bk->bh", gradient, real, real) / real.sum(-1, keepdim=True).square()
    else:
        head = gradient.mean((-1, -2))
    values = (mixed * head[..., None]).mean(1).clamp(min=0)
    return Scores(values, recording.logits)

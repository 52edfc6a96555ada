"""Attention weighted by the class's gradient: GAE and Grad-CAM on the last attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from whyformer import views
from whyformer.composites import GRADIENT
from whyformer.intercept.mode import Plan
from whyformer.methods.aggregation import AGGREGATION, Aggregation
from whyformer.methods.attention import observe_gradients
from whyformer.methods.registry import BLOCK, FLAG, method
from whyformer.methods.task import Scores, Task, readout_row


@method(
    "attention × its gradient in every block, rolled out (Generic Attention Explainability)",
    family="attention",
    citation="Chefer, Gur, Wolf: Generic Attention-model Explainability, ICCV 2021; survey 1.3",
    checks={"start_layer": BLOCK, "aggregation": AGGREGATION},
)
def gae(task: Task, *, start_layer: int = 0, aggregation: Mapping[str, Any] | None = None) -> Scores:
    """Ā_b = mean_h (∇A_b ⊙ A_b)⁺, R ← R + Ā_b R from R = I; the scores are the readout row of R.

    One forward and one backward pass; row vectors instead of matrices, and no attention map is kept.

    Args:
        start_layer: first block used, from 0.
        aggregation: see :mod:`whyformer.methods.aggregation`; over (∇A ⊙ A)⁺ of each head.
    """
    how = Aggregation(layers="sum_product").with_choices(aggregation)
    how.check(task.blocks())
    recording, maps, row = observe_gradients(task, task.block(start_layer), lambda a, g: how.fuse((a * g).clamp_(min=0)))
    return Scores(how.reduce(maps, row, task.inputs.mask), recording.logits, grid=recording.mode.convolution_grid)


@method(
    "Grad-CAM with the heads of the last attention as channels",
    family="attention",
    citation="Selvaraju et al., ICCV 2017, as baseline of Chefer et al., CVPR 2021",
    checks={"block": BLOCK, "count_padding": FLAG},
)
def gradcam_attention(task: Task, *, block: int = -1, count_padding: bool = False) -> Scores:
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

    recording = task.record(Plan(GRADIENT, first=first, observe=observe))
    if not recording.attentions:
        raise task.refuse("no attention was seen in its forward pass")
    recording.backward(task.seed(recording.logits))
    if recording.readout is None or first not in seen:
        raise task.refuse("the output of its last block is unknown or does not reach the logits")
    row = readout_row(recording.readout)
    weights, gradient = seen[first]
    task.global_maps({first: weights[:, 0]}, row.shape[-1])
    mixed = torch.einsum("bq,bhqk->bhk", row.to(weights.dtype), weights)
    if task.inputs.modality == "image":
        found = views.patch_grid(mixed.shape[-1], recording.mode.convolution_grid, None)
        along_row = torch.einsum("bq,bhqk->bhk", row.to(weights.dtype), gradient)
        head = along_row[..., found[0] if found else 0 :].mean(-1)
    elif task.inputs.mask is not None and not count_padding:
        real = task.inputs.mask.to(gradient.dtype)
        head = torch.einsum("bhqk,bq,bk->bh", gradient, real, real) / real.sum(-1, keepdim=True).square()
    else:
        head = gradient.mean((-1, -2))
    values = (mixed * head[..., None]).mean(1).clamp(min=0)
    return Scores(values, recording.logits, grid=recording.mode.convolution_grid)

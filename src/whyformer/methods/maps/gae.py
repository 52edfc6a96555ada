"""Generic Attention Explainability (Chefer, Gur, Wolf, ICCV 2021): one tower, two towers, encoder and decoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from whyformer.composites.gradient import GRADIENT
from whyformer.engine.probes import Flows
from whyformer.errors import InputError
from whyformer.explanation.features import Features
from whyformer.inputs import Inputs
from whyformer.methods.maps.aggregation import Aggregation, Choices
from whyformer.methods.maps.rollout import observe_gradients
from whyformer.methods.registry import Block, method
from whyformer.methods.task import Scores, Task
from whyformer.models.structure import block_groups


@method(
    "attention × its gradient in every block, rolled out (Generic Attention Explainability)",
    family="attention",
    citation="Chefer, Gur, Wolf: Generic Attention-model Explainability, ICCV 2021; survey 1.3",
)
def gae(
    task: Task, *, start_layer: Block = 0, aggregation: Choices = None, side: Literal["auto", "image", "text"] = "auto"
) -> Scores:
    """Ā_b = mean_h (∇A_b ⊙ A_b)⁺, R ← R + Ā_b R from R = I; the scores are the readout row of R.

    One forward and one backward pass; row vectors instead of matrices, and no attention map is kept.
    Encoder–decoder models (T5, BART) follow the paper's cross-attention rules; the scores are those of the encoder's
    tokens, and ``diagnostics["decoder_scores"]`` those of the decoder's. Two-tower models (CLIP) are explained one
    tower at a time; the target is the index of the text that a picture is compared with.

    Args:
        start_layer: first block used, from 0. The published CLIP figures use the last block only (−1).
        aggregation: see :mod:`whyformer.methods.maps.aggregation`; over (∇A ⊙ A)⁺ of each head.
        side: the tower of a two-tower model: "auto" (pictures), "image" or "text".

    Where a row of R − I is all zero, cross-attention leaves that row at zero. The authors' code for DETR divides 0 by 0
    there and then drops the whole block's share, so its map of such a query is lower.
    """
    how = Aggregation(layers="sum_product").with_choices(aggregation)
    groups = block_groups(task.model)
    encoder, decoder = _halves(groups)
    if encoder and decoder:
        return _encoder_decoder(task, encoder, decoder)
    towers = {kind: _tower(groups, kind) for kind in ("image", "text")}
    if all(towers.values()) and "pixel_values" in task.inputs.kwargs and "input_ids" in task.inputs.kwargs:
        return _tower_scores(task, towers, "image" if side == "auto" else side, how, start_layer)
    if side != "auto":
        raise InputError(f"gae: side={side!r} is for models with an image and a text tower; this model has one")
    start = task.block(start_layer)
    how = how.within(task.blocks())
    recording, maps, row = observe_gradients(task, start, positive_product, how)
    return Scores(how.reduce(maps, row, task.inputs.mask), recording.logits)


def positive_product(weights: Tensor, gradient: Tensor) -> Tensor:
    """(A ⊙ ∇A)⁺"""
    return (weights * gradient).clamp_(min=0)


def _halves(groups: dict[str, list[nn.Module]]) -> tuple[list[nn.Module], list[nn.Module]]:
    """(encoder blocks, decoder blocks), empty where the model has no such pair.

    The encoder is the one named as the decoder is, where there is one: convolutions may lie in an "encoder" too.
    """
    decoder = next((n for n in groups if "decoder" in n.split(".")), "")
    encoders = [n for n in groups if "encoder" in n.split(".") and "decoder" not in n.split(".")]
    encoders.sort(key=lambda name: name != decoder.replace("decoder", "encoder"))
    return groups[encoders[0]] if encoders else [], groups.get(decoder, [])


def _tower(groups: dict[str, list[nn.Module]], kind: str) -> list[nn.Module]:
    names = ("vision", "visual", "image") if kind == "image" else ("text",)
    return next((blocks for name, blocks in groups.items() if any(n in name for n in names)), [])


# -- two towers --------------------------------------------------------------------------------------------------
def _tower_scores(
    task: Task, towers: dict[str, list[nn.Module]], side: str, how: Aggregation, start_layer: int
) -> Scores:
    """One tower of a two-tower model; its attention does not meet the other's, so the one-tower rule holds."""
    blocks = towers[side]
    how = how.within(len(blocks))
    if not -len(blocks) <= start_layer < len(blocks):
        raise InputError(f"gae: start_layer={start_layer} is outside the {side} tower, which has {len(blocks)} blocks")
    inputs = task.inputs if side == "image" else _text_inputs(task.inputs)

    pairs = replace(task, inputs=replace(inputs, kwargs=inputs.kwargs))
    recording, maps, row = observe_gradients(pairs, start_layer % len(blocks), positive_product, how, blocks=blocks)
    values = how.reduce(maps, row, inputs.mask)
    if side == "text":  # the scores of the text that each picture is compared with
        values = values[task.value_index(recording.logits)]
        chosen = task.value_index(recording.logits).tolist()
        if len(set(chosen)) < len(chosen):
            raise InputError(
                "gae: with side='text', several pictures share one text, whose gradients would "
                "add up; explain them one at a time"
            )
        tokens = inputs.features.tokens
        features = Features(None if tokens is None else [tokens[i] for i in chosen])
        inputs = replace(inputs, features=features)
    return Scores(values, recording.logits, inputs=inputs)


def _text_inputs(inputs: Inputs) -> Inputs:
    mask = inputs.kwargs.get("attention_mask")
    return replace(inputs, modality="text", scored="input_ids", mask=None if mask is None else mask.bool())


# -- encoder and decoder -----------------------------------------------------------------------------------------
def normalised_excess(relevance: Tensor) -> Tensor:
    """N(R) = R̂ / rowsum(R̂) + I with R̂ = R − I; a row of R̂ that is all zero stays zero (ICCV 2021, Eq. 8–9)."""
    identity = torch.eye(relevance.shape[-1], dtype=relevance.dtype, device=relevance.device)
    excess = relevance - identity
    sums = excess.sum(-1, keepdim=True)
    return torch.where(sums != 0, excess / torch.where(sums != 0, sums, 1), 0) + identity


def _encoder_decoder(task: Task, encoder: list[nn.Module], decoder: list[nn.Module]) -> Scores:
    """Encoder: R_ii += Ā R_ii. Each decoder block: R_qi += Ā R_qi and R_qq += Ā R_qq, then across
    R_qi += N(R_qq)ᵀ Ā_qi N(R_ii)."""
    maps: dict[int, Tensor] = {}

    def observe(index: int, weights: Tensor, flow: Tensor) -> None:
        maps[index] = positive_product(weights, flow).mean(1)

    recording = task.record(GRADIENT, Flows(observe), blocks=[*encoder, *decoder])
    _, row = task.gradient_pass(recording)
    blocks = recording.mode.attention_blocks
    inside = [maps[i] for i in sorted(maps) if blocks[i] is not None and (blocks[i] or 0) < len(encoder)]
    task.global_maps(dict(enumerate(inside)))
    batch, n, q = task.inputs.batch, inside[0].shape[-1], row.shape[-1]
    eye_n, eye_q = (torch.eye(m, dtype=row.dtype, device=row.device).expand(batch, m, m) for m in (n, q))
    r_ii, r_qq, r_qi = eye_n.clone(), eye_q.clone(), row.new_zeros(batch, q, n)
    for one in inside:
        r_ii = r_ii + one @ r_ii
    seen: set[int] = set()
    for index in sorted(maps):
        block = blocks[index]
        if block is None or block < len(encoder):
            continue
        one = maps[index]
        if block in seen:  # the second attention of a decoder block looks at the encoder
            r_qi = r_qi + normalised_excess(r_qq).transpose(-2, -1) @ one @ normalised_excess(r_ii)
        else:
            r_qi, r_qq = r_qi + one @ r_qi, r_qq + one @ r_qq
        seen.add(block)
    own = torch.einsum("bq,bqk->bk", row, r_qq)
    return Scores(torch.einsum("bq,bqn->bn", row, r_qi), recording.logits, diagnostics={"decoder_scores": own.tolist()})

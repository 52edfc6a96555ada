"""Several readings of one forward and one backward pass, joined: blocks' products, attention × its gradient."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from whyformer.composites.named import COMPOSITES, CompositeName
from whyformer.engine.probes import BlockFlows, Flows, Probe
from whyformer.engine.run import Recording
from whyformer.explanation.views import carry
from whyformer.methods.maps.gae import positive_product
from whyformer.methods.registry import method
from whyformer.methods.task import Scores, Task


@method(
    "attention × its gradient under LibraGrad's rules: of the readout row, joined with GAE",
    family="attention",
    signed=True,
    citation="rules: Mehri et al., CVPR 2025; GAE: Chefer, Gur, Wolf, ICCV 2021; the sum of both has no source",
)
def libra_attention(
    task: Task, *, of: Literal["both", "readout"] = "both", composite: CompositeName = "libra"
) -> Scores:
    """S = z(Σ_b mean_h (A_b ⊙ ∇A_b)[readout row]) + z(GAE), z(s) = (s − mean) / deviation over the patches or words of
    each sample; the first part is signed. One forward and one backward pass.

    Args:
        of: "both", or "readout" for the first part alone, not scaled.
        composite: the rules under which ∇A is taken, see :mod:`whyformer.composites.named`.
    """
    if of == "readout":
        recording, (values,) = _readings(task, composite, "readout")
        return Scores(values, recording.logits)
    recording, found = _readings(task, composite, "readout", "gae")
    return _joined(task, recording, found)


@method(
    "FullGrad⁺ joined with attention × its gradient of the readout row, under LibraGrad's rules",
    family="gradient",
    signed=True,
    citation="parts: Mehri et al., CVPR 2025; their sum has no source",
)
def libra_joint(task: Task, *, composite: CompositeName = "libra") -> Scores:
    """S = z(Σ_b Σ_d h_b ⊙ ∂f/∂h_b) + z(Σ_b mean_h (A_b ⊙ ∇A_b)[readout row]), as ``libragrad`` and
    ``libra_attention`` have them, from one forward and one backward pass; z(s) = (s − mean) / deviation over the
    patches or words of each sample. Signed.

    Args:
        composite: the rules of the backward pass, see :mod:`whyformer.composites.named`.
    """
    recording, found = _readings(task, composite, "blocks", "readout")
    return _joined(task, recording, found)


def _readings(task: Task, composite: CompositeName, *parts: str) -> tuple[Recording, list[Tensor]]:
    """(recording, ``[B, N]`` of each part) of one forward and one backward pass."""
    signed: dict[int, Tensor] = {}
    positive: dict[int, Tensor] = {}
    products: list[Tensor] = []

    def observe(index: int, weights: Tensor, flow: Tensor) -> None:
        signed[index] = (weights * flow).mean(1)
        if "gae" in parts:
            positive[index] = positive_product(weights, flow).mean(1)

    def entered(call: int, value: Tensor, flow: Tensor) -> None:
        products.append((value * flow).sum(-1))

    if "blocks" in parts:
        probes: tuple[Probe, ...] = (Flows(observe), BlockFlows(frozenset(range(task.blocks())), entered))
        recording = task.record(COMPOSITES[composite], *probes, root="embedding")
    else:
        recording = task.record(COMPOSITES[composite], Flows(observe))
    _, row = task.gradient_pass(recording)
    found: dict[str, Tensor] = {}
    maps = task.global_maps(signed, row.shape[-1])
    found["readout"] = torch.stack([torch.einsum("bq,bqk->bk", row.to(m.dtype), m) for m in maps]).sum(0)
    if "gae" in parts:
        found["gae"] = carry(row, task.global_maps(positive, row.shape[-1]))
    if "blocks" in parts:
        if any(one.shape != row.shape for one in products):
            raise task.refuse("its blocks do not all see the same rows, so their products cannot be summed")
        found["blocks"] = torch.stack(products).sum(0)
    return recording, [found[part] for part in parts]


def _joined(task: Task, recording: Recording, found: list[Tensor]) -> Scores:
    counted = _counted(task, found[0])
    return Scores(torch.stack([_standard(one, counted) for one in found]).sum(0), recording.logits)


def _counted(task: Task, values: Tensor) -> Tensor:
    """``[B, N]`` 1 at the rows that stand for a part of the picture, or for a word (neither padding nor special)."""
    inputs, counted = task.inputs, torch.ones_like(values)
    if inputs.modality == "image":
        cells = task.cells(values.shape[1]).to(values.device)
        return torch.zeros_like(values).scatter(1, cells.expand(len(values), -1), 1)
    for hidden in (None if inputs.mask is None else ~inputs.mask, inputs.special):
        if hidden is not None and hidden.numel() == values.numel():  # of multiple choice a row for each text
            counted = counted.masked_fill(hidden.reshape(values.shape).to(values.device), 0)
    return counted


def _standard(values: Tensor, counted: Tensor) -> Tensor:
    """z-scores over the rows that count; 0 where all of these are equal."""
    count = counted.sum(1, keepdim=True).clamp(min=1)
    centred = (values - (values * counted).sum(1, keepdim=True) / count) * counted
    deviation = (centred.square().sum(1, keepdim=True) / count).sqrt()
    return torch.where(deviation > 0, centred / torch.where(deviation > 0, deviation, 1), 0)

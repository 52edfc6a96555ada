"""Norm-based analysis of attention (Kobayashi et al. 2020, 2021)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from whyformer.engine.probes import AttentionCall, BlockInputs, Maps, Projection, Projections
from whyformer.methods.maps.aggregation import Aggregation, Choices
from whyformer.methods.registry import OptionalBlock, method
from whyformer.methods.task import Scores, Task

Scope = Literal["heads", "attention", "residual", "norm"]


@dataclass(frozen=True)
class Mixture:
    """The vectors that one attention mixes: Σ_j of v_ij plus the constant is what the layer puts out at token i.

    Attributes:
        weights: α ``[B, H, N, N]``.
        parts: f_h(x_j) = (x_j W_V^h + b_V^h) W_O^h, ``[B, H, N, D]``.
        residual: x_i ``[B, N, D]`` or None.
        constant: b_O ``[D]`` or None.
        projection: W_O and, for post-norm models, the normalisation that follows.
    """

    weights: Tensor
    parts: Tensor
    residual: Tensor | None
    constant: Tensor | None
    projection: Projection

    def normed(self) -> Mixture:
        """After LayerNorm taken apart: (v − mean v) ⊙ γ; the common 1/σ_i is applied in :meth:`norms`."""
        gamma = self.projection.norm_weight
        if gamma is None:
            return self

        def linear(v: Tensor) -> Tensor:
            return (v - v.mean(-1, keepdim=True)) * gamma

        residual = None if self.residual is None else linear(self.residual)
        constant = None if self.constant is None else linear(self.constant)
        return replace(self, parts=linear(self.parts), residual=residual, constant=constant)

    def inverse_deviation(self) -> Tensor | None:
        """1/σ_i ``[B, N]`` of the normalisation, or None without one."""
        summed = self.projection.norm_input
        if summed is None:
            return None
        return (summed.var(-1, unbiased=False) + self.projection.norm_eps).rsqrt()

    def norms(self) -> Tensor:
        """‖v_ij‖ ``[B, N, N]``, v_ij = Σ_h α^h_ij f_h(x_j) + 1[i=j] x_i, by the Gram matrix of the heads at each j:
        ‖Σ_h α^h f_h‖² = Σ_hh' α^h α^h' ⟨f_h, f_h'⟩, so that the N × N vectors are never formed."""
        gram = torch.einsum("bhjd,bgjd->bjhg", self.parts, self.parts)
        square = torch.einsum("bhij,bjhg,bgij->bij", self.weights, gram, self.weights)
        if self.residual is not None:
            own = torch.diagonal(self.weights, dim1=-2, dim2=-1)
            cross = torch.einsum("bhi,bhid,bid->bi", own, self.parts, self.residual)
            square = square + torch.diag_embed(2 * cross + self.residual.square().sum(-1))
        norms = square.clamp(min=0).sqrt()
        inverse = self.inverse_deviation()
        return norms if inverse is None or self.projection.norm_weight is None else norms * inverse[..., None]


@method(
    "norm of what each token really adds: attention × transformed value",
    family="attention",
    citation="Kobayashi et al., EMNLP 2020 and 2021; survey 1.5",
    class_specific=False,
)
def norm_attention(
    task: Task, *, scope: Scope = "norm", block: OptionalBlock = None, aggregation: Choices = None
) -> Scores:
    """‖v_ij‖ of every block, rolled out over the blocks (rows divided by their sums), readout row.

    Args:
        scope: what v_ij holds. "heads": each head's ‖α^h_ij f_h(x_j)‖, fused as ``aggregation`` says; "attention":
            Σ_h α^h_ij f_h(x_j) (2020); "residual": plus x_i at i = j; "norm": and through the LayerNorm after the sum
            in post-norm models (2021; pre-norm models have none, there it equals "residual").
        block: one block only instead of the rollout.
        aggregation: see :mod:`whyformer.methods.maps.aggregation`. The default rollout adds the identity where the
            residual is not part of v_ij ("heads", "attention") and does not where it is.
    """
    task.block(block if block is not None else 0, "block")
    own_residual = scope in ("residual", "norm")
    how = Aggregation(layers="product" if own_residual else "rollout").with_choices(aggregation)
    if block is not None:
        how = replace(how, layers=block)
    how = how.within(task.blocks())
    recording, mixtures, row = mixtures_of(task)
    maps: dict[int, Tensor] = {}
    for index, mixture in mixtures.items():
        if not how.wants(index):
            continue
        if scope == "heads":
            fused = how.fuse(mixture.weights * mixture.parts.norm(dim=-1)[:, :, None])
        elif scope == "norm":
            fused = mixture.normed().norms()
        else:
            bare = Projection(index, mixture.projection.weight, mixture.projection.bias)
            fused = replace(mixture, projection=bare, residual=mixture.residual if own_residual else None).norms()
        maps[index] = fused / fused.sum(-1, keepdim=True) if own_residual and block is None else fused
    values = how.reduce(task.global_maps(maps, row.shape[-1]), row, task.inputs.row_mask)
    return Scores(values, recording.logits)


def mixtures_of(task: Task) -> tuple[Any, dict[int, Mixture], Tensor]:
    """(recording, the mixture of each block, readout row) of one forward pass."""
    calls: dict[int, AttentionCall] = {}

    def watch(call: AttentionCall) -> None:
        if call.index >= 0:
            calls[call.index] = call

    projections, inputs = Projections(), BlockInputs()
    recording, row = task.readout_pass(Maps(watch), projections, inputs)
    mixtures: dict[int, Mixture] = {}
    for index, call in calls.items():
        if index not in projections.found:
            raise task.refuse("no output projection follows its attention, so a value's share of the output is unknown")
        projection = projections.found[index]
        weights, heads, width = call.map(), call.value.shape[1], call.value.shape[-1]
        if projection.weight.shape[1] != heads * width:
            raise task.refuse(
                f"its output projection takes {projection.weight.shape[1]} values where the heads give {heads * width}"
            )
        split = projection.weight.reshape(-1, heads, width)
        parts = torch.einsum("bhjd,ohd->bhjo", call.value, split)
        assert call.block is not None
        residual = inputs.found[call.block]
        mixtures[index] = Mixture(weights, parts, residual, projection.bias, projection)
    if not mixtures:
        raise task.refuse("no attention was seen in its forward pass")
    task.global_maps({i: m.weights[:, 0] for i, m in mixtures.items()}, row.shape[-1])
    return recording, mixtures, row

"""The vectors that attention mixes, as the engine's graph shows them, for models that are not walked over on a tape
yet."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from whyformer.engine.norms import MeasuredNorm
from whyformer.engine.probes import AttentionCall, BlockInputs, Maps, Projection, Projections
from whyformer.methods.task import Task
from whyformer.methods.vectors.mixtures import Mixture, Place

__all__ = ["GraphVectors", "WatchedAttentions", "behind"]


def behind(mixture: Mixture, norm: MeasuredNorm | None) -> Mixture:
    """The vectors behind a LayerNorm of their sum, (v − mean v) ⊙ γ / σ_i with σ_i of the true sum."""
    if norm is None:
        return mixture
    inverse = norm.inverse[..., 0]
    residual = None if mixture.residual is None else norm.of_part(mixture.residual) * norm.inverse
    constant = None if mixture.constant is None else norm.of_part(mixture.constant) * norm.inverse
    if norm.bias is not None:
        constant = norm.bias if constant is None else constant + norm.bias
    return Mixture(mixture.weights * inverse[:, None, :, None], norm.of_part(mixture.parts), residual, constant)


class GraphVectors:
    """The vectors of all blocks of one pass of the engine."""

    def __init__(self, task: Task) -> None:
        self.task, self.watched = task, WatchedAttentions()
        recording, self._row = task.readout_pass(*self.watched.probes)
        self._logits = recording.logits
        self.groups = {group[0]: group for group in self.watched.groups(task)}
        if not self.groups:
            raise task.refuse("no attention was seen in its forward pass")
        shapes = {n: torch.empty(self.watched.calls[n].shape, device="meta") for n in self.groups}
        task.global_maps(shapes, self._row.shape[-1])

    @property
    def logits(self) -> Tensor:
        return self._logits

    @property
    def row(self) -> Tensor:
        return self._row

    @property
    def blocks(self) -> list[int]:
        return list(self.groups)

    @cached_property
    def mixtures(self) -> dict[int, Mixture]:
        return {number: self.watched.mixture(self.task, group) for number, group in self.groups.items()}

    def at(self, block: int, place: Place) -> Mixture:
        projection, mixture = self.watched.projection(self.groups[block]), self.mixtures[block]
        if place != "sum":
            mixture = behind(mixture, projection.norm)
        return behind(mixture, projection.second) if place == "output" else mixture

    def is_state(self, block: int) -> bool:
        found = self.watched.projection(self.groups[block]).summed
        return found is not None and self.task.same_rows(self.mixtures[block].total(), found)


class WatchedAttentions:
    """What one pass shows of its attentions (all, or some by number), and of what becomes of their outputs."""

    def __init__(self, wanted: Collection[int] | None = None) -> None:
        self.calls: dict[int, AttentionCall] = {}
        self.blocks: list[int | None] = []
        self.projections, self.inputs = Projections(), BlockInputs()

        def watch(call: AttentionCall) -> None:
            if call.index >= 0:
                self.blocks.append(call.block)
            if call.index >= 0 and (wanted is None or call.index in wanted):
                self.calls[call.index] = call

        self.probes = (Maps(watch), self.projections, self.inputs)

    def groups(self, task: Task) -> list[tuple[int, ...]]:
        """Numbers of the attentions that one projection takes together."""
        found = self.projections.found
        taken = {number for projection in found.values() for number in projection.joined}
        if not taken >= self.calls.keys():
            raise task.refuse("no output projection follows its attention, so a value's share of the output is unknown")
        return [one.joined for one in found.values() if one.joined[0] in self.calls]

    def projection(self, group: tuple[int, ...]) -> Projection:
        """The projection that takes these attentions."""
        return next(one for one in self.projections.found.values() if one.joined == group)

    def mixture(self, task: Task, group: tuple[int, ...]) -> Mixture:
        """The mixture of all heads that one projection takes."""
        projection = self.projection(group)
        calls = [self.calls[number] for number in group]
        weights, values = (torch.cat(one, 1) for one in zip(*((c.map(), c.value) for c in calls), strict=True))
        heads, width = values.shape[1], values.shape[-1]
        if projection.weight.shape[1] != heads * width:
            raise task.refuse(
                f"its output projection takes {projection.weight.shape[1]} values where the heads give {heads * width}"
            )
        split = projection.weight.reshape(-1, heads, width)
        parts = torch.einsum("bhjd,ohd->bhjo", values, split)
        block = calls[0].block
        assert block is not None
        bare = Mixture(weights, parts, None, projection.bias)
        for norm in projection.behind:  # of the attention's output alone
            bare = behind(bare, norm)
        return replace(bare, residual=self._residual(task, bare, projection, self.inputs.found[block]))

    def _residual(self, task: Task, bare: Mixture, projection: Projection, entered: Tensor) -> Tensor:
        """What the attention's output is added to: what entered the block, that normalised or scaled, or what an
        attention before it made of it. Where another branch is added first, what is added next."""
        total = bare.total()
        branch, summed, further = projection.branch, projection.summed, projection.further
        if branch is None or summed is None:
            raise task.refuse("what its attention's output is added to was not seen", verdict="is not supported yet")
        if branch.shape != total.shape:
            raise task.refuse(
                "its attention works in windows or over other rows than its blocks pass on, so what a row keeps of "
                "itself is no part of the map"
            )
        if not task.same_rows(total, branch):
            raise task.refuse(
                "what its attention puts out is changed behind its projection before it is added, in a way that these "
                "vectors do not follow"
            )
        residual = summed - branch
        if further is not None and further.shape == entered.shape and task.same_rows(further - summed, entered):
            return entered
        return residual

"""Norm-based analysis of attention (Kobayashi et al. 2020, 2021)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from whyformer.engine.norms import MeasuredNorm
from whyformer.engine.probes import AttentionCall, BlockInputs, Maps, Projection, Projections
from whyformer.methods.maps import streams
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
        projection: W_O and the sums and normalisations behind it.
        factor: ``[B, N]`` what all of a token's vectors are multiplied by, or None.
    """

    weights: Tensor
    parts: Tensor
    residual: Tensor | None
    constant: Tensor | None
    projection: Projection
    factor: Tensor | None = None

    def normed(self, norm: MeasuredNorm | None) -> Mixture:
        """After a LayerNorm taken apart, (v − mean v) ⊙ γ / σ_i with σ_i of the true sum; β belongs to no part."""
        if norm is None:
            return self
        inverse = norm.inverse[..., 0]
        residual = None if self.residual is None else norm.of_part(self.residual)
        constant = None if self.constant is None else norm.of_part(self.constant)
        factor = inverse if self.factor is None else self.factor * inverse
        return replace(self, parts=norm.of_part(self.parts), residual=residual, constant=constant, factor=factor)

    def branch(self, norm: MeasuredNorm) -> Mixture:
        """After a norm of the attention's output alone, before it is added: 1/σ_i is part of α_ij."""
        constant = None if self.constant is None else norm.of_part(self.constant) * norm.inverse
        if norm.bias is not None:
            constant = norm.bias if constant is None else constant + norm.bias
        weights = self.weights * norm.inverse[:, None]
        return replace(self, weights=weights, parts=norm.of_part(self.parts), constant=constant)

    def by_heads(self) -> Tensor:
        """‖α^h_ij f_h(x_j)‖ ``[B, H, N, N]``."""
        return self.weights * self.parts.norm(dim=-1)[:, :, None]

    def own_norms(self) -> Tensor:
        """‖x_i‖ ``[B, N]`` (behind the normalisation), where no key is the query itself."""
        assert self.residual is not None
        norms = self.residual.norm(dim=-1)
        return norms if self.factor is None else norms * self.factor

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
        return norms if self.factor is None else norms * self.factor[..., None]

    def vectors(self, token: int) -> Tensor:
        """v_ij ``[B, N, D]`` of one token i."""
        mixed = torch.einsum("bhj,bhjd->bjd", self.weights[:, :, token], self.parts)
        if self.residual is not None:
            mixed[:, token] += self.residual[:, token]
        return mixed if self.factor is None else mixed * self.factor[:, token, None, None]

    def total(self) -> Tensor:
        """Σ_j v_ij + the constant, ``[B, N, D]``."""
        summed = torch.einsum("bhij,bhjd->bid", self.weights, self.parts)
        summed = summed if self.residual is None else summed + self.residual
        summed = summed if self.constant is None else summed + self.constant
        return summed if self.factor is None else summed * self.factor[..., None]


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

    In cross-attention v_ij is what row i gets from row j of the other stream, v_ii = x_i what it keeps.

    Args:
        scope: what v_ij holds. "heads": each head's ‖α^h_ij f_h(x_j)‖, fused as ``aggregation`` says; "attention":
            Σ_h α^h_ij f_h(x_j) (2020); "residual": plus x_i at i = j; "norm": and through the LayerNorm after the sum
            in post-norm models (2021; pre-norm models have none, there it equals "residual").
        block: one block only instead of the rollout.
        aggregation: see :mod:`whyformer.methods.maps.aggregation`. The default rollout adds the identity where the
            residual is not part of v_ij ("heads", "attention") and does not where it is.
    """
    task.layer(block if block is not None else 0, "block")
    own_residual = scope in ("residual", "norm")
    how = Aggregation(layers="product" if own_residual else "rollout").with_choices(aggregation)
    if block is not None:
        how = replace(how, layers=block)
    if not task.one_sequence:
        return _across(task, scope, how, rolled_out=block is None)
    how = how.within(task.blocks())
    recording, mixtures, row = mixtures_of(task)
    maps: dict[int, Tensor] = {}
    for index, mixture in mixtures.items():
        if not how.wants(index):
            continue
        fused = how.fuse(mixture.by_heads()) if scope == "heads" else _within(mixture, scope).norms()
        maps[index] = fused / fused.sum(-1, keepdim=True) if own_residual and block is None else fused
    values = how.reduce(task.global_maps(maps, row.shape[-1]), row, task.inputs.row_mask)
    return Scores(values, recording.logits)


def _within(mixture: Mixture, scope: Scope) -> Mixture:
    """What is looked at: the attention alone, with what it is added to, or behind the normalisation too."""
    if scope == "norm":
        return mixture.normed(mixture.projection.norm)
    return replace(mixture, residual=mixture.residual if scope == "residual" else None)


def _across(task: Task, scope: Scope, how: Aggregation, *, rolled_out: bool) -> Scores:
    """Streams that look at one another: where rows of q look at rows of k, v_ij is what they get from there and v_ii
    what they keep, x_i; the rows of [‖v_ii‖, ‖v_ij‖] are divided by their sums together."""
    how, kept = streams.within(task, how), scope in ("residual", "norm")
    chosen, structure = streams.wanted(task, how), task.structure
    watched = _Watched(chosen)
    recording, readouts = streams.readout_pass(task, *watched.probes)
    maps: dict[int, Tensor] = {}
    own: dict[int, Tensor] = {}
    for group in watched.groups(task):
        first = structure.attentions[group[0]]
        if len({(structure.attentions[n].queries, structure.attentions[n].keys, chosen.get(n)) for n in group}) > 1:
            raise task.refuse("one projection takes what several attentions mix", verdict="is not supported yet")
        mixture = watched.mixture(task, group)
        if scope == "heads":
            maps[group[0]] = how.fuse(mixture.by_heads())
            continue
        mixture = _within(mixture, scope)
        if first.queries != first.keys and mixture.residual is not None:
            own[group[0]] = mixture.own_norms()
            mixture = replace(mixture, residual=None)
        maps[group[0]] = mixture.norms()
    steps = streams.by_depth(structure, maps)
    for numbers in structure.layers():
        alike = [(structure.attentions[n].queries, structure.attentions[n].keys) for n in numbers if n in maps]
        if len(set(alike)) < len(alike):  # with a residual and a projection each
            raise task.refuse(
                "attentions that are heads of one have projections of their own", verdict="is not supported yet"
            )
    for number, norms in own.items():
        queries, keys = structure.attentions[number].queries, structure.attentions[number].keys
        step = next(step for step in steps if step.get((queries, keys)) is maps[number])
        step[queries, queries] = torch.diag_embed(norms)
    if kept and rolled_out:
        steps = [streams.normalised(step) for step in steps]
    found = streams.reduce(task, how, streams.Paths(steps, readouts), kept=kept)
    return task.of_sources(found, recording.logits, {})


def mixtures_of(task: Task) -> tuple[Any, dict[int, Mixture], Tensor]:
    """(recording, the mixture of each block, readout row) of one forward pass."""
    watched = _Watched()
    recording, row = task.readout_pass(*watched.probes)
    mixtures = {group[0]: watched.mixture(task, group) for group in watched.groups(task)}
    if not mixtures:
        raise task.refuse("no attention was seen in its forward pass")
    task.global_maps({i: m.weights[:, 0] for i, m in mixtures.items()}, row.shape[-1])
    return recording, mixtures, row


class _Watched:
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

    def mixture(self, task: Task, group: tuple[int, ...]) -> Mixture:
        """The mixture of all heads that one projection takes."""
        projection = next(one for one in self.projections.found.values() if one.joined == group)
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
        bare = Mixture(weights, parts, None, projection.bias, projection)
        for norm in projection.behind:
            bare = bare.branch(norm)
        return replace(bare, residual=self._residual(task, bare, self.inputs.found[block]))

    def _residual(self, task: Task, bare: Mixture, entered: Tensor) -> Tensor:
        """What the attention's output is added to: what entered the block, that normalised or scaled, or what an
        attention before it made of it. Where another branch is added first, what is added next."""
        projection, total = bare.projection, bare.total()
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


def over_mixtures(
    task: Task, block: int | None, aggregation: Mapping[str, Any] | None, fuse: Callable[[Mixture], Tensor]
) -> Scores:
    """The readout row of the product of the maps ``[B, N, N]`` that ``fuse`` makes of blocks, or of one block's map."""
    task.block(block if block is not None else 0, "block")
    how = Aggregation(layers="product" if block is None else block).with_choices(aggregation).within(task.blocks())
    how.without_heads(task.method, "summed as the model sums them")
    recording, mixtures, row = residual_mixtures(task)
    wanted = [index for index in mixtures if how.wants(index)]
    maps = {index: fuse(mixtures[index]) for index in task.progress(wanted, task.method, len(wanted))}
    return Scores(how.reduce(task.global_maps(maps, row.shape[-1]), row, task.inputs.row_mask), recording.logits)


def residual_mixtures(task: Task) -> tuple[Any, dict[int, Mixture], Tensor]:
    """The mixtures of blocks whose attention is added to what entered them, which is checked on the run's own values.

    Raises:
        MethodNotApplicable: the sum of the vectors is no state of the model (a norm on the branch, parallel branches).
    """
    recording, mixtures, row = mixtures_of(task)
    for index, mixture in mixtures.items():
        found = mixture.projection.summed
        if found is None or not task.same_rows(mixture.total(), found):
            raise task.refuse(
                f"in block {index}, what its attention puts out is not simply added to what entered the block, so no "
                "state of the model is the sum of these vectors"
            )
    return recording, mixtures, row

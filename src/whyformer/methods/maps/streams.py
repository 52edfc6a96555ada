"""Attention maps over several streams of tokens: encoder and decoder, towers, pictures and words in one sequence."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whyformer.composites.gradient import GRADIENT
from whyformer.engine.probes import AttentionCall, AttentionScores, Flows, Maps, Probe
from whyformer.engine.run import Recording
from whyformer.engine.survey import Structure
from whyformer.engine.trace import Key
from whyformer.methods.graphs import shown
from whyformer.methods.maps.aggregation import Aggregation
from whyformer.methods.task import Scores, Task, readout_row
from whyformer.rules.core import Composite

Fused = dict[int, Tensor]
Step = dict[tuple[Key, Key], Tensor]  # (queries, keys) -> ``[B, Q, K]`` what rows hand on to others


@dataclass(frozen=True)
class Paths:
    """What attentions let through, from the rows that are read out down to the rows that enter.

    Attributes:
        steps: from the input on.
        readouts: rows -> ``[B, N]`` how much each feeds the target.
    """

    steps: Sequence[Step]
    readouts: Mapping[Key, Tensor]

    def carry(self, *, identity: bool = True, normalize_rows: bool = False) -> dict[Key, Tensor]:
        """``[B, N]`` for all rows: r ← r + r Ē among the rows of one stream, r_k ← r_k + r_q Ē from queries q to keys k
        of another, step by step from the last.

        Args:
            identity: that r is kept; else what a row keeps is a part of the maps, r ← r Ē.
            normalize_rows: r_q and what it hands on are divided by 1 + ΣĒ, the row sums of [I, Ē] (without I: by ΣĒ).
        """
        rows = dict(self.readouts)
        for step in reversed(self.steps):
            before = dict(rows)
            for queries in {q for q, _ in step if q in before}:
                own = {k: one for (q, k), one in step.items() if q == queries}
                row = before[queries]
                if normalize_rows:
                    sums = int(identity) + torch.stack([one.sum(-1) for one in own.values()]).sum(0)
                    row = torch.where(sums != 0, row / torch.where(sums != 0, sums, 1), 0)
                rows[queries] = rows[queries] - before[queries] + (row if identity else 0)
                for keys, one in own.items():
                    moved = torch.bmm(row[:, None].to(one.dtype), one)[:, 0]
                    rows[keys] = rows[keys] + moved if keys in rows else moved
        return rows

    def mean_of_rows(self) -> dict[Key, Tensor]:
        """``[B, N]`` mean over the steps of r Ē, from each stream that is read out to its own rows and to others'."""
        found: dict[Key, list[Tensor]] = defaultdict(list)
        for step in self.steps:
            for (queries, keys), one in step.items():
                if queries in self.readouts:
                    row = self.readouts[queries].to(one.dtype)
                    found[keys].append(torch.bmm(row[:, None], one)[:, 0])
        return {keys: torch.stack(rows).mean(0) for keys, rows in found.items()}


def by_depth(structure: Structure, maps: Mapping[int, Tensor]) -> list[Step]:
    """Maps by the number of their attention, heads fused, as steps; several attentions of the same rows at one depth
    are heads of one."""
    found = []
    for numbers in structure.layers():
        heads: dict[tuple[Key, Key], list[Tensor]] = defaultdict(list)
        for number in (n for n in numbers if n in maps):
            attention = structure.attentions[number]
            heads[attention.queries, attention.keys].append(maps[number])
        found.append({pair: torch.stack(some).mean(0) if len(some) > 1 else some[0] for pair, some in heads.items()})
    return [step for step in found if step]


def normalised(step: Step) -> Step:
    """Rows divided by their sums over all that their stream looks at."""
    sums = {q: torch.stack([one.sum(-1) for (p, _), one in step.items() if p == q]).sum(0) for q, _ in step}
    return {(q, k): one / torch.where(sums[q] > 0, sums[q], 1)[..., None] for (q, k), one in step.items()}


def reduce(task: Task, how: Aggregation, paths: Paths, *, kept: bool = False) -> dict[Key, Tensor]:
    """``[B, N]`` of all rows, as ``how`` says; ``kept`` where what a row keeps is a part of the maps."""
    if how.rows != "readout" or (how.layers == "product" and not kept):
        raise task.refuse(
            "aggregation by columns, or by a product without the identity, is not defined over several inputs",
            verdict="is not supported yet",
        )
    if how.layers in ("rollout", "sum_product", "product"):
        return paths.carry(identity=how.layers != "product", normalize_rows=how.layers == "rollout")
    return paths.mean_of_rows()


def within(task: Task, how: Aggregation) -> Aggregation:
    """Layers that are numbers, counted in the stream that is read out."""
    structure = task.structure
    return how.within(max((structure.depth_of(key) for key in structure.ends()), default=0))


def wanted(task: Task, how: Aggregation, start: int = 0) -> dict[int, int]:
    """Number of each attention whose map is needed -> its level; refuses maps that are not over all tokens."""
    structure = task.structure
    if structure.windowed:
        raise task.refuse(
            "its attention works in windows or at several resolutions, so there is no map over all tokens"
        )
    if structure.partly is not None:
        attending, blocks = structure.partly
        raise task.refuse(
            f"only {attending} of its {blocks} blocks attend, the others mix tokens in ways without a map"
        )
    levels = {number: structure.level(number) for number in range(len(structure.attentions))}
    return {number: level for number, level in levels.items() if how.wants(level, start)}


def over_attention(task: Task, how: Aggregation, start: int, prune: Callable[[Tensor], Tensor]) -> Scores:
    """Fuse the heads of each map as it appears; the readouts come from the gradient of ½‖logits‖²."""
    how = within(task, how)
    chosen, maps = wanted(task, how, start), {}

    def watch(call: AttentionCall) -> None:
        if call.index in chosen:
            maps[call.index] = prune(how.fuse(call.map()))

    recording, readouts = readout_pass(task, Maps(watch))
    found = reduce(task, how, Paths(by_depth(task.structure, maps), readouts))
    return task.of_sources(found, recording.logits, {})


def readout_pass(task: Task, *probes: Probe) -> tuple[Recording, dict[Key, Tensor]]:
    """(recording, rows -> ``[B, N]`` readout), as :meth:`Task.readout_pass` for each stream that is read out."""
    task.blocks("the last block")
    ends = task.structure.ends()
    recording = task.record(GRADIENT, *probes, root="output", blocks=task.all_blocks, ends=ends)
    flows = recording.backward(recording.logits.detach())
    return recording, readouts(task, dict(zip(recording.ended, flows, strict=True)))


def record(task: Task, *probes: Probe, composite: Composite = GRADIENT) -> Recording:
    """Record a forward pass whose readouts are kept at the last block of every stream that is read out."""
    return task.record(composite, *probes, blocks=task.all_blocks, ends=task.structure.ends())


def observed(
    task: Task,
    composite: Composite,
    seen: Callable[[int, Tensor, Tensor], None],
    chosen: Collection[int],
    by_heads: bool = False,
    scores: bool = False,
) -> Recording:
    """A recording after a gradient pass, in which ``seen`` was called with the chosen attentions, A and what flows to
    it; see :meth:`Task.walk`."""
    asked = AttentionScores()

    def observe(index: int, weights: Tensor, flow: Tensor) -> None:
        if index in chosen:
            seen(index, shown(task, asked, index, weights) if scores else weights, flow)

    flows = Flows(observe, min(chosen, default=0), by_heads and not scores)
    recording = record(task, flows, *([asked] if scores else []), composite=composite)
    recording.backward(task.seed(recording.logits))
    return recording


def both_passes(
    task: Task,
    composite: Composite,
    seen: Callable[..., None],
    chosen: Collection[int],
    gradient: bool = False,
) -> Recording:
    """A recording after a pass of gradients and one of relevance, in which ``seen`` was called with the chosen
    attentions; see :meth:`Task.walk`."""
    gradients: dict[int, Tensor] = {}

    def observe(index: int, weights: Tensor, flow: Tensor) -> None:
        if index in chosen and recording.run.relevance:
            seen(index, weights, flow, *([gradients.pop(index)] if gradient else []))
        elif index in chosen and gradient:
            gradients[index] = flow

    recording = record(task, Flows(observe, min(chosen, default=0)), composite=composite)
    seed = task.seed(recording.logits)
    recording.backward(seed, keep=True)
    recording.backward(seed, relevance=True)
    return recording


def paths(task: Task, recording: Recording, maps: Fused) -> Paths:
    """Those over fused maps, after a gradient pass."""
    return Paths(by_depth(task.structure, maps), readouts(task, recording.readouts))


def readouts(task: Task, gradients: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Rows -> ``[B, N]`` how much each feeds the target, from the gradients at the last block of their stream."""
    found = {key: readout_row(gradient) for key, gradient in gradients.items() if bool(gradient.any())}
    if not found:
        raise task.refuse(
            "the output of its last block is unknown or does not reach the logits", verdict="is not supported yet"
        )
    return found

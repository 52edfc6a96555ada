"""Attention maps over several streams of tokens: encoder and decoder, towers, pictures and words in one sequence."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from whyformer.composites.gradient import GRADIENT
from whyformer.engine.probes import AttentionCall, AttentionScores, BlockFlows, Flows, Maps, Probe
from whyformer.engine.run import Recording
from whyformer.engine.survey import Structure
from whyformer.engine.trace import Key
from whyformer.methods.attended import MapPass
from whyformer.methods.conservation import Balance
from whyformer.methods.graphs import NOT_YET, UNREAD, shown
from whyformer.methods.maps.aggregation import Aggregation
from whyformer.methods.task import MapWatch, Rules, Scores, Task, readout_row
from whyformer.rules.core import Composite
from whyformer.tape.walking import GRADIENT as GRADIENT_ON_TAPE

Fused = dict[int, Tensor]
Entering = Callable[[int, Tensor, Tensor], None]
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
    chosen, maps = wanted(task, how, start), dict[int, Tensor]()
    passed = task.map_pass_of_streams()
    if passed is not None:
        for number in chosen.keys() & passed.attentions.keys():
            maps[number] = prune(how.fuse(passed.map(number)))
            passed.release()
        logits, rows = passed.logits, _read(task, passed.walk(passed.logits, [GRADIENT_ON_TAPE]).read)
    else:

        def watch(call: AttentionCall) -> None:
            if call.index in chosen:
                maps[call.index] = prune(how.fuse(call.map()))

        recording, rows = readout_pass(task, Maps(watch))
        logits = recording.logits
    found = reduce(task, how, Paths(by_depth(task.structure, maps), rows))
    return task.of_sources(found, logits, {})


# -- walks back from the target ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class StreamWalk:
    """What a method knows besides maps of attention over several streams.

    Attributes:
        logits: ``[B, C]`` of the plain forward pass.
        readouts: rows -> ``[B, N]`` how much each feeds the target.
        balance: of relevance, where the rules carry it.
    """

    logits: Tensor
    readouts: Mapping[Key, Tensor]
    balance: Balance | None = None

    def paths(self, task: Task, maps: Fused) -> Paths:
        """Those over fused maps, by the number of their attention."""
        return Paths(by_depth(task.structure, maps), self.readouts)


def walk(task: Task, rules: Rules, watch: MapWatch) -> StreamWalk:
    """Do :meth:`Task.walk` over several streams: ``watch`` names attentions, in the order of execution."""
    relevance, on_tape = rules.graph.carrier == "relevance", task.tape_rules(rules)
    passed = None if on_tape is None else task.map_pass_of_streams(relevance=relevance)
    if passed is None or on_tape is None:
        return _walk_graph(task, rules.graph, watch)
    first_run = [GRADIENT_ON_TAPE] if watch.gradient or relevance else []

    def at_map(number: int, *flows: Tensor) -> None:
        shown = passed.scores(number) if watch.scores else passed.map(number)
        assert watch.seen is not None
        watch.seen(number, shown, flows[-1], *(flows[:1] if watch.gradient else ()))

    walked = passed.walk(task.seed(passed.logits), [*first_run, on_tape], at_map, watch.blocks)
    balance = None if walked.sums is None else replace(walked.sums.balance, precision=passed.whole.precision)
    return StreamWalk(passed.logits, _read(task, walked.read), balance)


def _walk_graph(task: Task, composite: Composite, watch: MapWatch) -> StreamWalk:
    """The same by the engine."""
    asked, gradients, chosen = AttentionScores(), dict[int, Tensor](), watch.blocks
    relevance = composite.carrier == "relevance"

    def observe(index: int, weights: Tensor, flow: Tensor) -> None:
        if index not in chosen or watch.seen is None:
            return
        if relevance and not recording.run.relevance:
            gradients.update({index: flow} if watch.gradient else {})
        else:
            looked_at = shown(task, asked, index, weights) if watch.scores else weights
            watch.seen(index, looked_at, flow, *([gradients.pop(index)] if relevance and watch.gradient else []))

    flows = Flows(observe, min(chosen, default=0), watch.by_heads and not watch.scores and not relevance)
    probes: list[Probe] = [flows, *([asked] if watch.scores else [])]
    recording = task.record(composite, *probes, blocks=task.all_blocks, ends=task.structure.ends())
    seed = task.seed(recording.logits)
    recording.backward(seed, keep=relevance)
    if relevance:
        recording.backward(seed, relevance=True)
    balance = Balance.of_recording(recording) if relevance else None
    return StreamWalk(recording.logits, readouts(task, recording.readouts), balance)


def walk_to_blocks(task: Task, composite: Composite, wanted: Mapping[int, Key], seen: Entering) -> Tensor:
    """Walk back to what enters some blocks, and return the logits ``[B, C]``.

    Args:
        composite: rules of multipliers.
        wanted: call of a block -> the rows that enter it.
        seen: called with the call of a block, what enters it, and what flows there, ``[B, N, D]``.
    """
    rules = task.tape_rules(Rules.of(composite))
    passed = None if rules is None else task.map_pass_of_streams()
    places = None if passed is None else _entries(task, passed, wanted)
    if passed is None or rules is None or places is None:
        recording = task.begin(composite, BlockFlows(frozenset(wanted), seen))
        recording.backward(task.seed(recording.logits))
        return recording.logits

    def arrive(number: int, flow: Tensor | None) -> None:
        call, own = places[number]
        value, rows = passed.whole.tape[number], passed.layout.rows
        flow = torch.zeros_like(value) if flow is None else flow
        seen(call, *(rows.features(number, t, own).flatten(2) for t in (value, flow)))

    passed.walk(task.seed(passed.logits), [rules], at={number: partial(arrive, number) for number in places})
    return passed.logits


def _entries(task: Task, passed: MapPass, wanted: Mapping[int, Key]) -> dict[int, tuple[int, Tensor]] | None:
    """Number of what enters each block -> (its call, ``[B, N]`` its rows); None if a block is not found on the tape."""
    found: dict[int, tuple[int, Tensor]] = {}
    for call, key in wanted.items():
        own = (i for i, a in enumerate(task.structure.attentions) if (a.block, a.queries) == (call, key))
        number = next((i for i in own if i in passed.attentions), None)
        if number is None:
            return None
        stream, block = passed.block_of(number)
        found[block.entry] = call, stream.rows
    return found if len(found) == len(wanted) else None


def readout_pass(task: Task, *probes: Probe) -> tuple[Recording, dict[Key, Tensor]]:
    """(recording, rows -> ``[B, N]`` readout), as :meth:`Task.readout_pass` for each stream that is read out."""
    task.blocks("the last block")
    ends = task.structure.ends()
    recording = task.record(GRADIENT, *probes, root="output", blocks=task.all_blocks, ends=ends)
    flows = recording.backward(recording.logits.detach())
    return recording, readouts(task, dict(zip(recording.ended, flows, strict=True)))


def readouts(task: Task, gradients: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Rows -> ``[B, N]`` how much each feeds the target, from the gradients at the last block of their stream."""
    return _read(task, {key: readout_row(gradient) for key, gradient in gradients.items() if bool(gradient.any())})


def _read(task: Task, found: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """The rows that are read out.

    Raises:
        MethodNotApplicable: there are none.
    """
    rows = {key: row for key, row in found.items() if bool(row.any())}
    if not rows:
        raise task.refuse(UNREAD, verdict=NOT_YET)
    return rows

"""Attention maps over streams of tokens: a single one, encoder and decoder, two towers, pictures and text.

    streams = begin(task, composite)
    walked = streams.walk(composite, on_map, streams.attentions_for(how))
    scores = streams.scores(reduce(task, how, streams.paths(maps, walked.readouts)), walked.logits)

A model with one encoder has one stream, whose name is that of its input.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from whyformer.methods.conservation import Sums
from whyformer.methods.map_passes import MapPass, NamedAttention, RowsName, WalkResult
from whyformer.methods.maps.aggregation import Aggregation
from whyformer.methods.passes import Callback
from whyformer.methods.structure import MERGED, NOT_YET, UNREAD
from whyformer.methods.task import Scores, Task
from whyformer.models.readout import without_excluded
from whyformer.tape.shared_rows import same_rows
from whyformer.tape.walking import GRADIENT, Composite

MapStep = dict[tuple[RowsName, RowsName], Tensor]  # (queries, keys) -> map ``[B, Q, K]``


class Copies(MapStep):
    """A step in which the rows of a stream are rows of another stream, or sums of these with the weights S."""

    def moved(self, rows: Mapping[RowsName, Tensor]) -> dict[RowsName, Tensor]:
        """Return rows ``[B, ..., N]`` with r S added to those of the other stream."""
        return _plus(rows, [(keys, _times(rows[q], weights)) for (q, keys), weights in self.items() if q in rows])


@dataclass(frozen=True)
class Paths:
    """The maps of all steps between the input rows and the readout rows.

    Attributes:
        steps: the steps, from the input on.
        readouts: name of rows -> ``[B, N]`` weight of each row in the target.
    """

    steps: Sequence[MapStep]
    readouts: Mapping[RowsName, Tensor]

    def roll_out(self, *, identity: bool = True, normalize_rows: bool = False) -> dict[RowsName, Tensor]:
        """Roll out the readouts, step by step from the last: r ← r + r Ē within a stream, r_k ← r_k + r_q Ē from
        queries q to keys k of another stream. Returns ``[B, N]`` for all rows.

        Args:
            identity: add r itself; otherwise r ← r Ē, for maps that contain the residual.
            normalize_rows: divide r_q by the row sums of [I, Ē], which are 1 + ΣĒ (without I, ΣĒ), before each step.
        """
        rows = dict(self.readouts)
        for step in reversed(self.steps):
            if isinstance(step, Copies):
                rows = step.moved(rows)
                continue
            before = dict(rows)
            for queries in {q for q, _ in step if q in before}:
                maps = {k: fused for (q, k), fused in step.items() if q == queries}
                row = before[queries]
                if normalize_rows:
                    sums = int(identity) + torch.stack([fused.sum(-1) for fused in maps.values()]).sum(0)
                    factors = torch.where(sums != 0, 1 / torch.where(sums != 0, sums, 1), 0)
                    row = torch.einsum("b...q,bq->b...q", row, factors.to(row))
                rows[queries] = rows[queries] - before[queries] + (row if identity else 0)
                rows = _plus(rows, [(keys, _times(row, fused)) for keys, fused in maps.items()])
        return rows

    def mean_of_rows(self) -> dict[RowsName, Tensor]:
        """Return the mean ``[B, N]`` over the steps of r Ē, for all rows that a stream in ``readouts`` attends to, or a
        stream whose rows it copies or reduces."""
        rows, sums, counts = dict(self.readouts), dict[RowsName, Tensor](), Counter[RowsName]()
        for step in reversed(self.steps):
            if isinstance(step, Copies):
                rows, sums = step.moved(rows), step.moved(sums)
                before = Counter(counts)
                for queries, keys in step:
                    counts[keys] += before[queries]
            else:
                products = [(keys, _times(rows[q], fused)) for (q, keys), fused in step.items() if q in rows]
                sums = _plus(sums, products)
                counts.update(keys for keys, _ in products)
        return {keys: total / counts[keys] for keys, total in sums.items()}


def _plus(rows: Mapping[RowsName, Tensor], others: Iterable[tuple[RowsName, Tensor]]) -> dict[RowsName, Tensor]:
    """Return rows with others added to those of the same name."""
    total = dict(rows)
    for name, other in others:
        total[name] = total[name] + other if name in total else other
    return total


def _times(rows: Tensor, fused: Tensor) -> Tensor:
    """Return r Ē for rows ``[B, ..., Q]`` and a map ``[B, Q, K]``, or r S."""
    fused = fused.to(rows) if fused.dtype == torch.bool else fused
    return torch.einsum("b...q,bqk->b...k", rows.to(fused.dtype), fused)


def normalised(step: MapStep) -> MapStep:
    """Divide rows by their sums over all keys of their stream."""
    sums = {q: torch.stack([fused.sum(-1) for (p, _), fused in step.items() if p == q]).sum(0) for q, _ in step}
    return {(q, k): fused / torch.where(sums[q] > 0, sums[q], 1)[..., None] for (q, k), fused in step.items()}


def reduce(task: Task, how: Aggregation, paths: Paths, *, has_residual: bool = False) -> dict[RowsName, Tensor]:
    """Reduce the fused maps of all steps to ``[B, N]`` of all rows.

    Args:
        task: the task.
        how: the reduction of layers and rows.
        paths: the maps.
        has_residual: whether the maps contain the residual, so that no identity is added.

    Raises:
        MethodNotApplicable: a reduction that is defined for a single stream only.
    """
    crosses = any(queries != keys for step in paths.steps for queries, keys in step)
    if crosses and (how.rows != "readout" or (how.layers == "product" and not has_residual)):
        if task.structure.map_pass.reduced:
            raise task.refuse(MERGED)
        raise task.refuse(
            "aggregation by columns, or by a product without the identity, is not defined over several inputs",
            verdict="is not supported yet",
        )
    if how.rows == "readout":
        return _through(how, paths)
    columns = ((name, _columns(task, how, paths, name, row)) for name, row in paths.readouts.items())
    return {name: scores for name, scores in columns if scores is not None}


def _columns(task: Task, how: Aggregation, paths: Paths, rows_name: RowsName, row: Tensor) -> Tensor | None:
    """Return the mean or maximum ``[B, N]`` of the rows of all queries of a stream, except padding; None if none of its
    maps is used."""
    every = torch.eye(row.shape[-1], dtype=row.dtype, device=row.device).expand(len(row), -1, -1)
    matrix = _through(how, replace(paths, readouts={rows_name: every})).get(rows_name)
    if matrix is None:
        return None
    if how.rows == "column_mean":
        return task.mean_of_queries(matrix, rows_name)
    real = task.real_rows(rows_name, row.shape).to(row.device)
    return matrix.masked_fill(~real[..., None], float("-inf")).amax(1)


def _through(how: Aggregation, paths: Paths) -> dict[RowsName, Tensor]:
    """Propagate the readouts, ``[B, ..., N]``, through the maps to all rows."""
    if how.layers in ("rollout", "sum_product", "product"):
        return paths.roll_out(identity=how.layers != "product", normalize_rows=how.layers == "rollout")
    return paths.mean_of_rows()


# -- a task on streams -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class StreamTask:
    """A task with the attentions of its streams, by index in the order of execution.

    Attributes:
        task: the model, the inputs and the target.
        map_pass: a recorded pass.
        only: name of the rows to explain; None for those of all streams.
    """

    task: Task
    map_pass: MapPass
    only: RowsName | None = None

    @cached_property
    def attentions(self) -> Mapping[int, NamedAttention]:
        """Index of each attention of the streams to explain, and of rows that are merged into these -> the names of its
        rows, its depth and its layer."""
        if self.only is None:
            return self.map_pass.named
        return {
            number: attention
            for number, attention in self.map_pass.named.items()
            if attention.queries == self.only or (attention.is_merged and attention.queries & self.only)
        }

    def attentions_for(self, how: Aggregation, start: int = 0) -> list[int]:
        """Return the indices of the attentions whose maps are needed.

        Args:
            how: the layers; negative indices count from the last block of each stream that the target reads.
            start: first block used.

        Raises:
            InputError: an index is outside the model.
            MethodNotApplicable: the rows of one of the attentions are merged later.
        """
        structure = self.task.structure
        for number in how.numbers:
            self.task.layer(number, "aggregation")
        self.task.layer(start)
        counts = {name: structure.count(stream) for name, stream in structure.ends.items()}
        blocks = {n: counts.get(a.queries, structure.layers) for n, a in self.attentions.items()}
        needed = [n for n, a in self.attentions.items() if how.wants(a.layer, blocks[n], start)]
        followed = [number for number in needed if not self.attentions[number].is_merged]
        # maps before and after a merge cannot be multiplied, but a single block needs no product
        if len(followed) < len(needed) and not (followed and isinstance(how.layers, int)):
            raise self.task.refuse(MERGED)
        return followed

    def parts(self, number: int, fused: Tensor) -> MapStep:
        """Split the map ``[B, Q, K]`` of an attention, with fused heads, into one map for each stream of its keys. They
        are 0 at rows of the stream of the queries that do not attend, such as the text that a Q-Former reads."""
        attending, rows = self.map_pass.attentions[number].queries, self.map_pass.block_of(number)[0].rows
        if attending is not None and fused.shape[1] < rows.shape[1]:
            fused = same_rows(rows, attending).to(fused) @ fused
        queries, sides = self.attentions[number].queries, self.map_pass.key_streams[number]
        return {(queries, keys): fused if same is None else fused @ same.to(fused) for keys, same in sides.items()}

    def steps(self, maps: Mapping[int, Tensor]) -> list[MapStep]:
        """Turn fused maps, by the index of their attention, into steps; several attentions between the same rows at the
        same depth are averaged like heads."""
        heads: dict[int, dict[tuple[RowsName, RowsName], list[Tensor]]] = defaultdict(lambda: defaultdict(list))
        for number, fused in sorted(maps.items()):
            for pair, part in self.parts(number, fused).items():
                heads[self.attentions[number].depth][pair].append(part)
        return self.in_order(
            {
                depth: {p: torch.stack(maps).mean(0) if len(maps) > 1 else maps[0] for p, maps in step.items()}
                for depth, step in heads.items()
            }
        )

    def in_order(self, steps: Mapping[int, MapStep]) -> list[MapStep]:
        """Return steps sorted by the depth of their attentions. Rows that one stream copies from another, or reduces,
        are a separate step, before the steps of the first.

        Raises:
            MethodNotApplicable: there are no steps.
        """
        if not steps:
            raise self.task.refuse(UNREAD, verdict=NOT_YET)
        copies: dict[int, Copies] = {}
        home = self.task.inputs.tensor.device  # blocks may be on several devices
        for queries, keys, weights in self.map_pass.copies:
            depth = min(a.depth for a in self.attentions.values() if a.queries == queries)
            copies.setdefault(depth, Copies())[queries, keys] = weights.to(home)
        moved = {depth: {pair: fused.to(home) for pair, fused in step.items()} for depth, step in steps.items()}
        depths = sorted({*steps, *copies})
        return [table[depth] for depth in depths for table in (copies, moved) if depth in table]

    def paths(self, maps: Mapping[int, Tensor], readouts: Mapping[RowsName, Tensor]) -> Paths:
        """Return the paths over fused maps, by the index of their attention."""
        return Paths(self.steps(maps), readouts)

    def read_rows(self) -> tuple[Tensor, dict[RowsName, Tensor]]:
        """Return (logits, {name of rows: weight ``[B, N]`` of each row in ½‖logits‖²}), the same for every class."""
        map_pass = self.map_pass
        seed = without_excluded(map_pass.logits)
        return map_pass.logits, self._read(map_pass.walk(seed, [GRADIENT]).readouts)

    def scores(
        self,
        rows: Mapping[RowsName, Tensor],
        logits: Tensor,
        figures: Sums | dict[str, Any] | None = None,
        *,
        promised: bool = True,
    ) -> Scores:
        """Turn scores ``[B, N]`` of rows into those of inputs; ``promised`` as for :meth:`Sums.diagnostics`."""
        diagnostics = figures.diagnostics(promised=promised) if isinstance(figures, Sums) else figures or {}
        reduced = self.map_pass.reduced
        scored = {name: values for name, values in rows.items() if name not in reduced}
        return self.task.of_sources(scored, logits, diagnostics)

    def walk(
        self,
        composite: Composite,
        on_map: Callback,
        watched: Iterable[int],
        *,
        gradient: bool = False,
        scores: bool = False,
    ) -> WalkResult:
        """Return :meth:`Task.walk` over the pass, with the readouts of the streams to explain."""
        walked = self.task.walk(self.map_pass, composite, on_map, watched, gradient=gradient, scores=scores)
        return replace(walked, readouts=self._read(walked.readouts))

    def _read(self, readouts: Mapping[RowsName, Tensor]) -> dict[RowsName, Tensor]:
        """Return the readouts of those streams to explain on which the target depends; of all if it depends on none.

        Raises:
            MethodNotApplicable: there are none.
        """
        home = self.task.inputs.tensor.device
        rows = {name: row.to(home) for name, row in readouts.items() if self.only in (None, name)}
        if not rows:
            raise self.task.refuse(UNREAD, verdict=NOT_YET)
        return {name: row for name, row in rows.items() if bool(row.any())} or rows


def begin(
    task: Task, composite: Composite = GRADIENT, *, row_alone: bool = False, only: RowsName | None = None
) -> StreamTask:
    """Return the task with the attentions of a recorded pass.

    Args:
        task: the task.
        composite: the rules of the backward walk.
        row_alone: whether the result is independent of rows after the one that the target reads, so that all steps of a
            language model can share a pass.
        only: name of the rows to explain; None for those of all streams.

    Raises:
        MethodNotApplicable: some attention maps are unknown.
    """
    return StreamTask(task, task.map_pass(relevance=composite.propagates == "relevance", row_alone=row_alone), only)

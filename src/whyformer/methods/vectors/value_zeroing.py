"""Value Zeroing (Mohebbi et al., EACL 2023): what changes in a block when it may not use one token's values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor, nn

from whyformer.composites.gradient import GRADIENT
from whyformer.engine.hooks import batch_first, run_block
from whyformer.engine.mode import Interception
from whyformer.engine.probes import AttentionCall, BlockCalls, Edit, Maps
from whyformer.engine.run import Recording, running
from whyformer.engine.trace import Key
from whyformer.errors import MethodNotApplicable
from whyformer.methods.attended import MapPass
from whyformer.methods.maps import streams
from whyformer.methods.maps.aggregation import Aggregation, Choices
from whyformer.methods.registry import Count, OptionalBlock, method
from whyformer.methods.sequence import AttendedPass
from whyformer.methods.task import Scores, Task
from whyformer.rules.core import Pass
from whyformer.tape.rows import slim
from whyformer.tape.structure import positions
from whyformer.tape.walking import decisions, for_each, replay

Distance = Literal["cosine", "euclidean", "dot"]


@method(
    "change of each block's output when one token's values are zeroed",
    family="perturbation",
    citation="Mohebbi et al.: Quantifying Context Mixing in Transformers, EACL 2023; survey 2.3",
    class_specific=False,
)
def value_zeroing(
    task: Task,
    *,
    distance: Distance = "cosine",
    block: OptionalBlock = None,
    batch_size: Count = 16,
    aggregation: Choices = None,
) -> Scores:
    """S_b[i, t] = d(h_i^{¬t}, h_i), rows of S_b scaled to sum 1; the scores are the readout row of S_L ⋯ S_1.

    h is the output of block b, h^{¬t} the same block computed again from its own recorded input with the value vector
    of token t set to 0 in all heads (after the bias), the attention as it was. No identity is added: the residual
    connection is inside the block. In a block that looks at another stream too, its tokens' values are zeroed as well,
    and the rows [S_own, S_other] are scaled to sum 1 together. Costs one forward pass and, in each block for each token
    that is no padding, what follows the product of attention and values (three quarters of a usual block); what comes
    before is computed once for ``batch_size`` tokens. A block that vmap cannot run (it adds to its input in place, say)
    runs whole for each token, one after the other.

    Args:
        distance: d. "cosine" 1 − cos(u, v) (published), "euclidean" ‖u − v‖, "dot" |⟨v, v⟩ − ⟨u, v⟩|.
        block: use the map of this one block instead of the product over all (negative ones count from the last).
        batch_size: rows (tokens × samples) that go through the rest of a block at once.
        aggregation: see :mod:`whyformer.methods.maps.aggregation`; the default is ``{"layers": "product"}``. There are
            no heads to choose: values are zeroed in all of them.

    Raises:
        MethodNotApplicable: attention in windows, in some blocks only, from several sequences in one block, or none.
        InputError: ``block`` or ``aggregation`` outside the model.

    The survey's formula exchanges i and t; this is the paper's and its code's order. Differs from the
    code: padding gets exactly 0, and 1 − cos is computed as ½‖u/‖u‖ − v/‖v‖‖², which loses no digits near 0.
    """
    how = Aggregation(layers="product" if block is None else block).with_choices(aggregation)
    how.without_heads("value_zeroing", "zeroed all at once")
    if block is not None:
        task.layer(block, "block")
    if not task.one_sequence:
        several = streams.begin(task)
        if several.passed is not None and not _decides(several.passed):
            return _of_streams(task, several, several.passed, how, distance, int(batch_size))
        return _across(task, how, distance, int(batch_size))
    attended = task.attended()
    if attended is not None and not _decides(attended):
        return _on_tape(task, attended, how, distance, int(batch_size))
    return _on_graph(task, how, distance, int(batch_size))


def _real(task: Task, row: Tensor) -> Tensor:
    """``[B, N]`` True at rows that are no padding."""
    mask = task.inputs.row_mask
    return mask if mask is not None and mask.shape == row.shape else torch.ones_like(row, dtype=torch.bool)


def _scaled(maps: Tensor) -> Tensor:
    """Rows divided by their sums; rows of zeros stay."""
    sums = maps.sum(-1, keepdim=True)
    return maps / torch.where(sums > 0, sums, 1)


# -- on a tape -------------------------------------------------------------------------------------------------------
Sides = Mapping[int, tuple[Tensor, Tensor]]
"""Number of each attention -> which of its queries and of its keys are no padding, ``[B, Q]`` and ``[B, K]``."""


def _values(passed: MapPass, number: int) -> list[int]:
    """Numbers of what the maps of an attention weigh."""
    return [piece.value for piece in passed.attentions[number].pieces if piece.value is not None]


def _decides(passed: MapPass) -> bool:
    """True if a block decides by what attention made, as with experts, so that it cannot be repeated with a change; or
    if what its maps weigh is unknown."""
    tape = passed.whole.tape
    for number, attention in passed.attentions.items():
        values, last = _values(passed, number), tape.maker[passed.block_of(number)[1].exit].number
        if len(values) < len(attention.pieces) or any(call.number <= last for call in decisions(tape, values)):
            return True
    return False


def _on_tape(task: Task, attended: AttendedPass, how: Aggregation, distance: Distance, batch_size: int) -> Scores:
    how, row = how.within(len(attended.attentions)), task.row_read(attended)
    real = _real(task, row)
    sides = {b: (real, real) for b in range(len(attended.attentions)) if how.wants(b)}
    maps = _maps(task, attended, sides, distance, batch_size)
    values = how.reduce(list(map(_scaled, maps.values())), row, real)
    return Scores(values, attended.logits, diagnostics={"block_passes": _count(sides)})


def _of_streams(
    task: Task, several: streams.StreamTask, passed: MapPass, how: Aggregation, distance: Distance, batch_size: int
) -> Scores:
    """Streams that look at one another: what the rows of a block depend on, among themselves and elsewhere, is divided
    by its sum together."""
    how, (logits, readouts) = several.within(how), several.read_rows(passed)
    sides = {}
    for number in sorted(several.wanted(how)):
        named, own = several.attentions[number], passed.attentions[number]
        pairs = zip((named.queries, named.keys), (own.queries, own.keys), strict=True)
        queries, keys = (several.real_rows(key, rows.shape[1]) for key, rows in pairs if rows is not None)
        sides[number] = queries, keys
    depth: dict[int, int] = {}  # entry of a block -> the depth of its last attention
    for number in sides:
        entry = passed.block_of(number)[1].entry
        depth[entry] = max(depth.get(entry, 0), several.attentions[number].depth)
    steps: dict[int, streams.Step] = defaultdict(dict)
    for number, one in _maps(task, passed, sides, distance, batch_size).items():
        named, entry = several.attentions[number], passed.block_of(number)[1].entry
        steps[depth[entry]][named.queries, named.keys] = one
    paths = streams.Paths([streams.normalised(steps[d]) for d in sorted(steps)], readouts)
    return several.scores(streams.reduce(task, how, paths, kept=True), logits, {"block_passes": _count(sides)})


def _tokens(keys: Tensor) -> list[int]:
    return [t for t in range(keys.shape[1]) if bool(keys[:, t].any())]


def _count(sides: Sides) -> int:
    return sum(len(_tokens(keys)) for _, keys in sides.values())


def _maps(task: Task, passed: MapPass, sides: Sides, distance: Distance, batch_size: int) -> dict[int, Tensor]:
    """``[B, Q, K]`` of each attention: how far the rows of its block move without the value of each key."""
    step = max(1, batch_size // task.inputs.batch)
    listed = [(n, tokens) for n, (_, keys) in sides.items() if (tokens := _tokens(keys))]
    work = [(n, tokens[i : i + step]) for n, tokens in listed for i in range(0, len(tokens), step)]
    maps: dict[int, Tensor] = {}
    for n, some in task.progress(work, "value zeroing", len(work)):
        stream, block = passed.block_of(n)
        plain = passed.features_of(stream, block.exit, passed.whole.tape[block.exit])
        if n not in maps:
            shape = (*plain.shape[:2], sides[n][1].shape[1])
            maps[n] = torch.zeros(shape, dtype=_wide(plain), device=plain.device)
        changed = torch.stack([passed.features_of(stream, block.exit, one) for one in _without(passed, n, some)])
        maps[n][..., some] = _distance(changed, plain, distance).permute(1, 2, 0)
    passed.release()
    return {n: one * sides[n][1][:, None].to(one.device) for n, one in maps.items()}


def _without(passed: MapPass, number: int, tokens: list[int]) -> Tensor:
    """``[k, ...]`` what leaves a block if the values of each of k keys of its attention are zero."""
    tape, rows, keys = passed.whole.tape, passed.layout.rows, passed.attentions[number].keys
    leaving = passed.block_of(number)[1].exit
    assert keys is not None
    place, each = positions(keys, len(rows)), torch.arange(keys.shape[1])[:, None]
    labels = {n: rows.labels.get(n) for n in _values(passed, number)}  # none of values that are made of constants
    places = {n: (place[slim(rows.of(n))] if label else each).to(tape.device(n)) for n, label in labels.items()}

    def changed(token: Tensor) -> Tensor:
        return replay(tape, {n: torch.where(at == token, 0, tape[n]) for n, at in places.items()}, [leaving])[0]

    return for_each(changed, torch.tensor(tokens, device=tape.device(leaving)), at_once=len(tokens))


# -- on a graph ------------------------------------------------------------------------------------------------------
def _on_graph(task: Task, how: Aggregation, distance: Distance, batch_size: int) -> Scores:
    shapes: dict[int, Tensor] = {}

    def watch(call: AttentionCall) -> None:
        if call.index >= 0:
            shapes[call.index] = torch.empty(call.shape, device="meta")

    kept = BlockCalls()
    recording, row = task.readout_pass(Maps(watch), kept)
    how = how.within(len(kept.found))
    task.global_maps(shapes, row.shape[-1])
    if set(recording.mode.attention_blocks) != set(range(len(kept.found))):
        raise task.refuse("no attention was seen in some of its blocks")
    chosen = [b for b in range(len(kept.found)) if how.wants(b)]
    real = _real(task, row)
    jobs = [_Job(b, kept.found[b], None, real, real) for b in chosen]
    maps = _run(task, recording, kept, jobs, distance, batch_size)
    values = how.reduce(list(map(_scaled, maps)), row, real)
    return Scores(values, recording.logits, diagnostics={"block_passes": sum(len(job.tokens) for job in jobs)})


def _across(task: Task, how: Aggregation, distance: Distance, batch_size: int) -> Scores:
    """Streams that look at one another: of a block whose rows look at other rows too, the values of these are zeroed as
    well; what its rows depend on, among themselves and elsewhere, is divided by its sum together."""
    several, structure = streams.StreamTask(task, None), task.structure
    how, kept = several.within(how), BlockCalls()
    chosen = several.wanted(how)
    recording, readouts = streams.readout_pass(task, kept)
    pairs: dict[int, dict[tuple[Key, Key], list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, attention in enumerate(structure.attentions):
        if number in chosen and attention.block is not None:
            pairs[attention.block][attention.queries, attention.keys].append(number)
    jobs, places = [], []
    for b, found in sorted(pairs.items()):
        if len({queries for queries, _ in found}) > 1:
            raise task.refuse("a block of it attends from several sequences", verdict="is not supported yet")
        first = min(n for n, a in enumerate(structure.attentions) if a.block == b)
        for (queries, keys), numbers in found.items():
            attention, batch = structure.attentions[numbers[0]], len(recording.logits)
            sides = [
                task.real_rows(key, (batch, n)) for key, n in zip((queries, keys), attention.shape[1:], strict=True)
            ]
            if batch_first(kept.found[b][3], recording.run).shape[:2] != sides[0].shape:
                raise task.refuse("a block of it returns other rows than attend in it", verdict="is not supported yet")
            jobs.append(_Job(b, kept.found[b], frozenset(n - first for n in numbers), *sides))
            places.append((b, queries, keys))
    steps: dict[int, streams.Step] = defaultdict(dict)
    for (b, queries, keys), one in zip(places, _run(task, recording, kept, jobs, distance, batch_size), strict=True):
        steps[b][queries, keys] = one
    paths = streams.Paths([streams.normalised(steps[b]) for b in sorted(steps)], readouts)
    diagnostics = {"block_passes": sum(len(job.tokens) for job in jobs)}
    return task.of_sources(streams.reduce(task, how, paths, kept=True), recording.logits, diagnostics)


@dataclass(frozen=True)
class _Job:
    """One map to be made.

    Attributes:
        call: of the block, as :class:`BlockCalls` keeps it.
        which: the attentions of the block whose values are zeroed, by their order in it; None for all.
        queries, keys: ``[B, Q]`` and ``[B, K]`` True at rows that are no padding.
    """

    block: int
    call: Any
    which: frozenset[int] | None
    queries: Tensor
    keys: Tensor

    @property
    def tokens(self) -> list[int]:
        return [t for t in range(self.keys.shape[-1]) if bool(self.keys[:, t].any())]


def _run(
    task: Task, recording: Recording, calls: BlockCalls, jobs: list[_Job], distance: Distance, batch_size: int
) -> list[Tensor]:
    """``[B, Q, K]`` of each job."""
    step = max(1, batch_size // task.inputs.batch)
    work = [(n, job.tokens[i : i + step]) for n, job in enumerate(jobs) for i in range(0, len(job.tokens), step)]
    plain = [batch_first(job.call[3], recording.run) for job in jobs]
    maps = [
        torch.zeros(*job.queries.shape, job.keys.shape[-1], dtype=_wide(one), device=one.device)
        for job, one in zip(jobs, plain, strict=True)
    ]
    for n, tokens in task.progress(work, "value zeroing", len(work)):
        changed = _zeroed(recording, calls, jobs[n], tokens, task)
        maps[n][..., tokens] = _distance(changed, plain[n], distance).permute(1, 2, 0)
    for job, one in zip(jobs, maps, strict=True):
        one *= job.keys[:, None].to(one.device)
    return [recording.run.home(one) for one in maps]


def _zeroed(recording: Recording, calls: BlockCalls, job: _Job, tokens: list[int], task: Task) -> Tensor:
    """``[k, B, N, D]``: the output of the block with the values of each of the k tokens zeroed.

    One call of the block on its own arguments: what comes before the product of attention and values does not know of
    the token, so vmap computes it once, and all the rest for k tokens.
    """
    _, args, kwargs, plain = job.call
    edits, begun = 0, False

    def edit(token: Tensor, order: int, weights: Tensor, value: Tensor, mixed: Tensor) -> Tensor:
        nonlocal edits
        if not begun or (job.which is not None and order not in job.which):
            return mixed
        edits += 1
        token = token.to(value.device)  # that of an attention whose block lies elsewhere
        return mixed - weights.index_select(-1, token) * value.index_select(-2, token)

    def given(value: Any) -> Any:
        if hasattr(value, "get_seq_length"):  # a cache: this pass would append to it
            return None
        # the block may change its input in place
        return value.clone() if isinstance(value, Tensor) and value.shape == plain.shape else value

    def begin() -> None:
        nonlocal begun
        begun = True

    def without(token: Tensor) -> Tensor:
        nonlocal begun
        begun = False
        run = Pass(batch=task.inputs.batch, rows=recording.run.rows, sequence_first=recording.run.sequence_first)
        order = count()
        changed = Edit(lambda *attention: edit(token, next(order) if begun else -1, *attention))
        mode = Interception(task.model, GRADIENT, run, (changed,))
        with torch.no_grad(), running(mode):
            own = tuple(map(given, args)), {k: given(v) for k, v in kwargs.items()}
            output = run_block(mode, calls, job.block, own, task.fed(task.inputs), begin)
        return batch_first(output if isinstance(output, Tensor) else output[0], recording.run)

    each = torch.tensor(tokens, device=plain.device).unsqueeze(1)
    try:
        changed = torch.func.vmap(without)(each)
    except (RuntimeError, MethodNotApplicable):
        # vmap cannot run it: it adds to its input in place, asks for the value of a tensor, or a hook explains in it
        changed = torch.stack([without(token) for token in each])
    if not edits:
        raise task.refuse(f"no product of attention and values was seen in its block {job.block}")
    return changed


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _distance(changed: Tensor, plain: Tensor, distance: str) -> Tensor:
    """``[k, B, N]`` between vectors ``[k, B, N, D]`` and ``[B, N, D]``."""
    u, v = changed.to(_wide(changed)), plain.to(_wide(plain))
    if distance == "euclidean":
        return (u - v).norm(dim=-1)
    if distance == "dot":
        return ((v - u) * v).sum(-1).abs()
    return (nn.functional.normalize(u, dim=-1) - nn.functional.normalize(v, dim=-1)).square().sum(-1) / 2

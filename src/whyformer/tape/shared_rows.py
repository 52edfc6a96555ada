"""Find streams that share rows or reduce those of another stream, and keys that belong to several streams."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from whyformer.tape.attentions import Attention
from whyformer.tape.calls import needed_calls
from whyformer.tape.members import Members
from whyformer.tape.mixing import mixes
from whyformer.tape.program import Program
from whyformer.tape.rows import Rows
from whyformer.tape.state import bare
from whyformer.tape.streams import Block, Stream, path_to
from whyformer.tape.values import Tape
from whyformer.tape.walking import recomputed

__all__ = ["find_copies", "reduction_of", "same_rows", "split_keys"]


def find_copies(
    rows: Rows, attentions: Iterable[Attention], streams: Iterable[Stream]
) -> list[tuple[Stream, Stream, Tensor]]:
    """Return pairs of streams that share rows of learned vectors: the second stream creates them, and the first reads
    them, as a prompt contains the outputs of a Q-Former.

    Args:
        rows: the rows of the pass.
        attentions: all attentions of the pass.
        streams: all streams of the pass.

    Returns:
        For each pair, (first stream, second stream, ``[B, N, M]``, True where a row of the first is a row of the
        second).
    """
    attending, products = [s for s in streams if s.blocks], {n for a in attentions for n in a.products}
    matches = []
    for stream, before in ((s, t) for s in attending for t in attending if t.last < s.last and _are_alike(s, t)):
        same = same_rows(stream.rows, before.rows)
        families = [rows.families[f] for f in set(rows.family[stream.rows[same.any(2)]].tolist())]
        if families and all(not family.source or family.value in products for family in families):
            matches.append((stream, before, same))
    return matches


def reduction_of(program: Program, tape: Tape, rows: Rows, before: Stream, stream: Stream) -> Tensor | None:
    """Return the matrix S ``[B, N, M]`` with Y = S X + constants, if the M rows X at the end of a stream become the N
    rows Y at the beginning of a later one: tokens are removed, or merged into weighted sums of them. Choices that
    depend on values, such as which tokens are merged, are those of the pass; so are weights that X does not determine.

    Returns:
        S; None if Y is computed in another way, or if the first attention after it has no residual connection.
    """
    first, block = before.last, stream.blocks[0] if stream.blocks else None
    if block is None or not _is_residual(program, block):
        return None
    members = Members(stream.rows, rows)
    last = next((n for n in stream.spine if n <= block.entry and members.is_state(n)), -1)
    if last not in tape.maker or len(rows.labels.get(first, ())) != 1:
        return None
    if last != block.entry:  # such as an MLP between them
        is_passed = last in path_to(program.dominator, block.entry)
        if not is_passed or mixes(tape, rows, stream.rows, last, block.entry) is not False:
            return None
    x, y = rows.features(first, tape[first], before.rows), rows.features(last, tape[last], stream.rows)
    between = tape.calls[tape.maker[first].number + 1 : tape.maker[last].number + 1]
    fixed = {r: tape[r] for call in between for r in call.results if not tape.floating(r)}
    calls = needed_calls(between, [last], ends={first, *fixed})

    def reduced(values: Tensor) -> Tensor:
        changes = {**fixed, first: rows.with_features(first, tape[first], before.rows, values)}
        return rows.features(last, recomputed(tape, calls, changes)[last], stream.rows)

    with bare():
        is_only_path = last in program.dominator and first in path_to(program.dominator, last)
        return _weights(reduced, x, y, may_add=is_only_path)


def _weights(function: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, *, may_add: bool) -> Tensor | None:
    """Return the matrix S ``[B, N, M]`` of a function that returns y = S x + c for features x ``[B, M, D]``; None if it
    is not of this form, or if c ≠ 0 and not ``may_add``."""
    (_, m, *size), eps = x.shape, torch.finfo(y.dtype).eps
    if len(size) != 1 or list(y.shape[2:]) != size:
        return None
    tolerance = (64 if eps < 1e-6 else 4) * eps * y.abs().max()  # long sums round more often than half precision may
    constant = function(torch.zeros_like(x))
    is_linear = ((function(x / 2) - (constant + y) / 2).abs() <= tolerance).all()
    if not bool(is_linear) or not (may_add or bool((constant.abs() <= tolerance).all())):
        return None
    columns = list[Tensor]()
    for start in range(0, m, *size):  # each feature measures the weights of another row
        width = min(m - start, *size)
        unit = torch.zeros_like(x)
        unit[:, start : start + width, :width] = torch.eye(width).to(unit)
        columns.append((function(unit) - constant)[..., :width])
    matrix = torch.cat(columns, -1)
    explains = bool(((matrix @ x + constant - y).abs() <= tolerance).all())
    return matrix.to(torch.promote_types(matrix.dtype, torch.float32)) if explains else None


def _is_residual(program: Program, block: Block) -> bool:
    """Return True if the input of a block is added to the output of one of its branches."""
    same = {block.entry}
    for unit in program.units:
        if unit.kind == "view" and unit.entries[0] in same:
            same.update(unit.exits)
        elif unit.kind == "add" and unit.exit <= block.exit and not same.isdisjoint(unit.entries):
            return True
    return False


def split_keys(
    attention: Attention, queries: Stream, streams: Sequence[Stream]
) -> tuple[list[tuple[Stream, Tensor]], Tensor]:
    """Assign the keys of an attention to streams, if they belong to several: the stream of the queries, and streams
    that end before the attention, the latest first.

    Args:
        attention: an attention whose queries and keys are known.
        queries: the stream of its queries.
        streams: all streams.

    Returns:
        A list of (stream, ``[B, K, N]``, True where a key is a row of the stream), empty if all keys belong to one
        stream; and ``[B, K]``, True at keys that belong to none of the listed streams.
    """
    assert attention.keys is not None
    matches, rest = list[tuple[Stream, Tensor]](), attention.keys
    attending = [s for s in streams if s.blocks]
    if not any(s.rows is attention.keys for s in attending):
        before = [s for s in attending if s is not queries and s.last < attention.map and _are_alike(s, queries)]
        for stream in (queries, *reversed(before)):
            same = same_rows(rest, stream.rows)
            if bool(same.any()):
                matches.append((stream, same))
                rest = rest.masked_fill(same.any(2), 0)
    return matches, rest > 0


def _are_alike(first: Stream, second: Stream) -> bool:
    """Return True if two streams have the same number of samples; texts that are compared with pictures may differ."""
    return len(first.rows) == len(second.rows)


def same_rows(first: Tensor, second: Tensor) -> Tensor:
    """Return ``[B, N, M]``, True where a row of ``[B, N]`` equals a row of ``[B, M]``; 0 is no row."""
    return (first[:, :, None] == second[:, None, :]) & (first > 0)[:, :, None]

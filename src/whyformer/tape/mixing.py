"""Find the blocks of a stream that mix its rows without attention, such as convolutions or state spaces."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from whyformer.tape.calls import Call, needed_calls
from whyformer.tape.members import Members
from whyformer.tape.program import Program
from whyformer.tape.rows import Rows
from whyformer.tape.tables import EXTENSIONS, KINDS, SOFTMAXES
from whyformer.tape.values import Tape
from whyformer.tape.walking import decisions, replay

__all__ = ["find_mixing", "mixes", "multiplies_constants"]


def find_mixing(
    program: Program, tape: Tape, members: Members, states: Sequence[int], products: Container[int]
) -> list[int]:
    """Return the entries of the blocks that mix rows without attention.

    A branch that mixes rows begins such a block if the block has as many branches as a block with attention, or if it
    precedes the first attention and begins with a norm. A convolution that follows the attention in each block is part
    of that block, and a convolution for positions before the first block belongs to no block.

    Args:
        program, tape: program and tape of the pass.
        members: the rows of the stream.
        states: numbers of the values between the branches of the stream, in the order of execution.
        products: numbers of the products A·V of the attentions of the stream.
    """
    branches = [_calls_between(tape, *ends) for ends in pairwise(states)]
    attending = [i for i, calls in enumerate(branches) if any(_attends(c, members, products) for c in calls)]
    if not attending or len(states) < 3:
        return []
    candidates = [i for i, calls in enumerate(branches) if i not in attending and _may_mix(calls, program, members)]
    mixing = [i for i in candidates if mixes(tape, members.rows, members.queries, states[i], states[i + 1])]
    if all(i + 1 in mixing for i in attending):
        return []
    starts = sorted((*attending, *mixing))
    length = {i: end - i for i, end in zip(starts, [*starts[1:], len(branches)], strict=True)}
    alike = any(length[i] == length[j] for i in mixing for j in attending)
    normed = [i for i in mixing if i > attending[0] or _is_normed(program, states[i])]
    return [states[i] for i in normed] if alike or any(i < attending[0] for i in normed) else []


def _is_normed(program: Program, state: int) -> bool:
    """Return True if a norm reads a state, possibly through views."""
    same = {state}
    for unit in program.units:
        if any(e in same for e in unit.entries):
            if unit.kind == "norm":
                return True
            same.update(unit.exits if unit.kind == "view" else ())
    return False


def _calls_between(tape: Tape, first: int, last: int) -> list[Call]:
    """Return the calls on all paths from a value to a later one."""
    start = tape.maker[first].number + 1 if first in tape.maker else 0
    calls, dependent = tape.calls[start : tape.maker[last].number + 1], {first}
    for call in calls:
        if any(o in dependent for o in call.operands):
            dependent.update(call.results)
    return [c for c in needed_calls(calls, [last]) if any(o in dependent for o in c.operands)]


def _attends(call: Call, members: Members, products: Container[int]) -> bool:
    """Return True for a product with an attention map, and for a softmax over rows or unknown elements."""
    label = members.rows.labels.get(call.results[0], ())
    return call.results[0] in products or (call.name in SOFTMAXES and len(label) != 1)


def _may_mix(calls: Sequence[Call], program: Program, members: Members) -> bool:
    """Return True if the stream has a single row, or if some result has unknown rows, rows outside the stream, or pairs
    of rows."""
    if members.queries.shape[1] == 1:
        return True
    results = [r for call in calls for r in call.results if program.carry[r]]
    return not all(members.holds_only_rows(r) and len(members.rows.labels[r]) == 1 for r in results)


def mixes(tape: Tape, rows: Rows, numbers: Tensor, first: int, last: int) -> bool | None:
    """Return True if a change of every second row of a value changes the other rows of a later value, by more than
    rounding; None if it is unknown, because the model decides by the value, as when rows select experts.

    A single row has no other rows to change; then return True if a call between would combine it with rows beside it.

    Args:
        tape: the pass.
        rows: the rows of the pass.
        numbers: ``[B, N]`` row numbers.
        first, last: numbers of the two values, which hold these rows.
    """
    if any(call.number <= tape.maker[last].number for call in decisions(tape, [first])):
        return None
    if numbers.shape[1] == 1:
        return any(_reads_beside(call, tape, rows) for call in _calls_between(tape, first, last))
    before = rows.features(first, tape[first], numbers).clone()
    before[:, ::2] = before[:, ::2].roll(1, -1)
    (changed,) = replay(tape, {first: rows.with_features(first, tape[first], numbers, before)}, [last])
    plain, other = (rows.features(last, t, numbers)[:, 1::2] for t in (tape[last], changed))
    differ = (plain - other).abs() > 8 * torch.finfo(plain.dtype).eps * plain.abs()
    # rounding depends on the order of rows that are sorted by expert; it is relatively large where terms nearly cancel
    return bool((differ.flatten(2).double().mean(-1) > 0.05).any())


def _reads_beside(call: Call, tape: Tape, rows: Rows) -> bool:
    """Return True if a call combines a single row with places beside it, where a longer sequence has other rows: a
    convolution by a window of several elements, ``cat`` or a pad that extends an axis of size 1, or a product of two
    values that are computed from rows, such as q kᵀ or the state kᵀv of linear attention."""
    followed = [o for o in call.operands if o in rows.labels]
    if call.name == "convolution":
        return tape.shapes[call.operands[1]][2:].numel() > 1
    if call.name in EXTENSIONS and len(followed) == 1:
        sizes = zip(tape.shapes[followed[0]], tape.shapes[call.results[0]], strict=True)
        return any(before == 1 < after for before, after in sizes)
    return KINDS.get(call.name) == "linear" and len(followed) > 1


def multiplies_constants(program: Program, tape: Tape, value: int) -> bool:
    """Return True if a value depends on a product of two computed constants, such as the attention of learned vectors
    to one another. A weight, which is a parameter or a view of one, is not computed."""
    computed: set[int] = set()
    for call in needed_calls(tape.calls, [value]):
        inputs = [o for o in call.operands if o in computed]
        if program.carry[call.results[0]]:
            continue
        if KINDS.get(call.name) == "linear" and len(inputs) > 1:
            return True
        if inputs or KINDS.get(call.name) != "view":
            computed.update(call.results)
    return False

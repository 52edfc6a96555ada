"""Find sums of two values that are written as a reduction of their stack, by a sum or a mean."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Sequence

from whyformer.tape.calls import Call
from whyformer.tape.shapes import reduced_axes
from whyformer.tape.units import Unit
from whyformer.tape.values import Tape

__all__ = ["find_sums"]


def find_sums(tape: Tape, carry: Sequence[bool], live: Sequence[Call], ends: Container[int]) -> Iterator[Unit]:
    """Yield a unit for each sum, of kind "add", or "shift" if one of the two values is constant.

    Args:
        tape: a recorded pass.
        carry: for each value, whether it depends on a root.
        live: the calls between the roots and the output that belong to no other unit.
        ends: values that must not lie inside a unit.
    """
    readers: dict[int, list[Call]] = defaultdict(list)
    for call in live:
        for o in set(call.operands):
            readers[o].append(call)
    for stacked in live:
        if stacked.name != "stack" or len(stacked.operands) != 2:
            continue
        calls = [stacked]
        while len(calls) < 3 and not _is_sum(calls, tape):
            after = readers[calls[-1].results[0]]
            if len(after) != 1 or len(after[0].operands) != 1:
                break
            calls += after
        if _is_sum(calls, tape) and not any(c.results[0] in ends for c in calls[:-1]):
            places = tuple(i for i, o in enumerate(stacked.operands) if carry[o])
            entries, numbers = tuple(stacked.operands[i] for i in places), tuple(c.number for c in calls)
            yield Unit("add" if len(places) > 1 else "shift", "add", entries, calls[-1].results[:1], numbers, places)


def _is_sum(calls: Sequence[Call], tape: Tape) -> bool:
    """Return True if the calls are a stack of two values and its sum or mean over the stacked axis."""
    stacked, *after = calls
    axis = stacked.argument("dim", 0)
    dims = len(tape.shapes[stacked.results[0]])
    axis = axis - dims if axis >= 0 else axis
    if len(after) == 1:
        return after[0].name in ("sum", "mean") and reduced_axes(after[0], tape) == (axis,)
    if len(after) != 2 or after[0].name != "cumsum" or after[1].name != "select":
        return False
    of, last = after[1].argument("dim", 0), after[1].argument("index", 0)
    return reduced_axes(after[0], tape) == (axis,) and of in (axis, axis + dims) and last in (1, -1)

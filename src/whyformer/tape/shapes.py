"""Sizes and axes of the values of a tape."""

from __future__ import annotations

import math

import torch

from whyformer.tape.calls import Call
from whyformer.tape.tables import KINDS
from whyformer.tape.values import Tape

__all__ = ["axis_size", "chosen_by", "count", "reduced_axes"]


def count(tape: Tape, n: int) -> int:
    """Return the number of elements of a value."""
    return math.prod(tape.shapes[n])


def axis_size(shape: torch.Size, axis: int) -> int:
    """Return the size of an axis that is counted from the last; 1 if there is none."""
    return shape[axis] if -axis <= len(shape) else 1


def reduced_axes(call: Call, tape: Tape) -> tuple[int, ...]:
    """Return the axes along which a call reduces, counted from the last; none if it names none."""
    dims, given = len(tape.shapes[call.operands[0]]), call.argument("dim")
    axes = given if isinstance(given, (list, tuple)) else [] if given is None else [given]
    return tuple(sorted(a - dims if a >= 0 else a for a in axes))


def chosen_by(tape: Tape, n: int) -> tuple[int, ...]:
    """Return the indices that chose a value from a table; none if it was not chosen."""
    call = tape.maker.get(n)
    while call is not None and len(call.operands) == 1 and KINDS.get(call.name) == "view":
        call = tape.maker.get(call.operands[0])
    return call.operands[1:] if call is not None and call.name in ("index", "index_select") else ()

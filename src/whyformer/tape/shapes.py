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
    """Return the size of a negative axis; 1 if the shape has fewer axes."""
    return shape[axis] if -axis <= len(shape) else 1


def reduced_axes(call: Call, tape: Tape) -> tuple[int, ...]:
    """Return the (negative) axes along which a call reduces; () if it names none."""
    dims, dim = len(tape.shapes[call.operands[0]]), call.argument("dim")
    axes = dim if isinstance(dim, (list, tuple)) else [] if dim is None else [dim]
    return tuple(sorted(a - dims if a >= 0 else a for a in axes))


def chosen_by(tape: Tape, n: int) -> tuple[int, ...]:
    """Return the numbers of the indices that selected a value from a table, possibly before views; () if none did."""
    call = tape.maker.get(n)
    while call is not None and len(call.operands) == 1 and KINDS.get(call.name) == "view":
        call = tape.maker.get(call.operands[0])
    return call.operands[1:] if call is not None and call.name in ("index", "index_select") else ()

"""Which part of a picture a model reads.

    find_read_box(tape, tape.number(pixels), outputs)   # (left, top, right, bottom), or None for all of it

A convolution whose stride is its kernel reads whole patches only: pixels behind the last one reach nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from whyformer.tape.caches import Recent
from whyformer.tape.calls import Call
from whyformer.tape.feeding import drawn
from whyformer.tape.places import Box
from whyformer.tape.program import read_program
from whyformer.tape.state import bare
from whyformer.tape.tables import KINDS
from whyformer.tape.units import needed_calls
from whyformer.tape.values import Tape
from whyformer.tape.walking import GRADIENT, walk_back

__all__ = ["find_read_box"]

_BOXES: Recent[tuple[Box | None]] = Recent(16)


def find_read_box(tape: Tape, number: int, outputs: Iterable[int]) -> Box | None:
    """Return the box around the pixels that a model reads; None if that is the whole picture, or unknown.

    A random flow goes back to the pixels from all that the model has made of them when it first attends (or from its
    outputs): pixels at which nothing arrives are not read.

    Args:
        tape: a recorded pass.
        number: of the picture, ``[..., H, W]``.
        outputs: numbers of the values that the model returned.
    """
    ends = tuple(outputs)
    key = tape.signature, number, ends
    known = _BOXES.get(key)
    if known is None:
        with bare():
            known = _BOXES.put(key, (_measured(tape, number, ends),))
        tape.release()
    return known[0]


def _measured(tape: Tape, number: int, outputs: tuple[int, ...]) -> Box | None:
    if not tape.floating(number) or len(tape.shapes[number]) < 3:
        return None
    made = _made_before_attention(tape, number, outputs)
    if not made:
        return None
    program = read_program(tape, [number], made)
    (flows,) = walk_back(program, tape, [(GRADIENT, {n: drawn(tape, n) for n in made})], wanted=[number])
    if number not in flows:
        return None
    read = (flows[number] != 0).flatten(0, -3).any(0)
    height, width = read.shape
    lines = [read.any(1 - axis).nonzero().flatten().tolist() for axis in (0, 1)]
    if not all(lines):
        return None
    (top, bottom), (left, right) = ((float(own[0]), float(own[-1] + 1)) for own in lines)
    return None if (left, top, right, bottom) == (0, 0, width, height) else (left, top, right, bottom)


def _made_before_attention(tape: Tape, number: int, outputs: tuple[int, ...]) -> list[int]:
    """The values made of a picture that the first attention, or what follows it, reads; without one, the outputs."""
    calls = needed_calls(tape, outputs)
    made = {number}
    for i, call in enumerate(calls):
        carried = [n for n in call.operands if n in made]
        if _attends(call, len(carried)):
            return sorted({n for later in calls[i:] for n in later.operands if n in made and n != number})
        if carried:
            made.update(n for n in call.results if tape.floating(n))
    return sorted(made.intersection(outputs))


def _attends(call: Call, carried: int) -> bool:
    """Return True for a softmax, a kernel of attention, and a matrix product of two values that are made of pixels."""
    if KINDS.get(call.name) == "softmax" or "attention" in call.name:
        return carried > 0
    return KINDS.get(call.name) == "linear" and carried > 1

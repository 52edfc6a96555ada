"""Find the part of a picture that a model reads.

    find_read_box(tape, tape.number(pixels), outputs)   # (left, top, right, bottom), or None for all of it

A convolution whose stride equals its kernel size reads only whole patches, and ignores the pixels after the last one.
"""

from __future__ import annotations

from collections.abc import Iterable

from whyformer.tape.caches import Recent
from whyformer.tape.calls import Call, needed_calls
from whyformer.tape.feeding import drawn
from whyformer.tape.places import Box
from whyformer.tape.program import read_program
from whyformer.tape.state import bare
from whyformer.tape.tables import KINDS
from whyformer.tape.values import Tape
from whyformer.tape.walking import GRADIENT, walk_back

__all__ = ["find_read_box"]

_BOXES: Recent[Box | None] = Recent(16)


def find_read_box(tape: Tape, number: int, outputs: Iterable[int]) -> Box | None:
    """Return the bounding box of the pixels that a model reads; None if it is the whole picture, or unknown.

    Random flows are propagated to the pixels from the values that the first attention reads, or from the outputs if
    there is no attention. Pixels without a flow are not read.

    Args:
        tape: a recorded pass.
        number: number of the picture, ``[..., H, W]``.
        outputs: numbers of the values that the model returned.
    """
    ends = tuple(outputs)
    with bare():
        box = _BOXES.once((tape.signature, number, ends), lambda: _measured(tape, number, ends))
    tape.release()
    return box


def _measured(tape: Tape, number: int, outputs: tuple[int, ...]) -> Box | None:
    if not tape.floating(number) or len(tape.shapes[number]) < 3:
        return None
    ends = _before_attention(tape, number, outputs)
    if not ends:
        return None
    program = read_program(tape, [number], ends)
    (flows,) = walk_back(program, tape, [(GRADIENT, {n: drawn(tape, n) for n in ends})], wanted=[number])
    if number not in flows:
        return None
    read = (flows[number] != 0).flatten(0, -3).any(0)
    height, width = read.shape
    lines = [read.any(1 - axis).nonzero().flatten().tolist() for axis in (0, 1)]
    if not all(lines):
        return None
    (top, bottom), (left, right) = ((float(indices[0]), float(indices[-1] + 1)) for indices in lines)
    return None if (left, top, right, bottom) == (0, 0, width, height) else (left, top, right, bottom)


def _before_attention(tape: Tape, number: int, outputs: tuple[int, ...]) -> list[int]:
    """Return the values computed from a picture before the first attention that are read by it or later; without an
    attention, the outputs that depend on the picture."""
    calls = needed_calls(tape.calls, outputs)
    dependent = {number}
    for i, call in enumerate(calls):
        carried = [n for n in call.operands if n in dependent]
        if _attends(call, len(carried)):
            return sorted({n for later in calls[i:] for n in later.operands if n in dependent and n != number})
        if carried:
            dependent.update(n for n in call.results if tape.floating(n))
    return sorted(dependent.intersection(outputs))


def _attends(call: Call, carried: int) -> bool:
    """Return True for a softmax or an attention kernel that depends on the pixels, and for a matrix product of two
    values that do. ``carried`` is the number of operands that depend on the pixels."""
    if KINDS.get(call.name) == "softmax" or "attention" in call.name:
        return carried > 0
    return KINDS.get(call.name) == "linear" and carried > 1

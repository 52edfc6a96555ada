"""Functions at a model's end: a sigmoid or softmax between the logits and what the model returns, however written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from whyformer.tape.calls import Call
from whyformer.tape.program import Program, read_program
from whyformer.tape.state import bare
from whyformer.tape.tables import ELEMENTWISE, KINDS
from whyformer.tape.units import Unit, roots_of
from whyformer.tape.values import Tape

__all__ = ["EndFunction", "end_function"]

_JOINT = {"softmax": "softmax", "log softmax": "log_softmax"}  # kind of unit -> function of torch
_COPIES = frozenset(("view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "clone", "alias", "_to_copy"))
_LONGEST = 8  # calls of which a sigmoid may be written


@dataclass(frozen=True)
class EndFunction:
    """A function that a model applies to its logits last.

    Attributes:
        name: "sigmoid", "softmax", "log_softmax" or "logsigmoid".
        logits: number of the value that it is applied to.
        axis: the axis along which it normalises, counted from the last; −1 for a function of one number.
    """

    name: str
    logits: int
    axis: int


def end_function(tape: Tape, output: int) -> EndFunction | None:
    """Return the function that makes ``output`` of logits, through views and casts; None if there is none.

    A function that is written out in several calls is recognised by repeating them on other numbers.
    """
    while (call := tape.maker.get(output)) is not None and call.name in _COPIES and len(call.operands) == 1:
        output = call.operands[0]
    if call is None or KINDS.get(call.name) == "linear":
        return None
    roots = [r for n in sorted(tape.inputs) for r in roots_of(tape, n)]
    program = read_program(tape, roots, output)
    unit = next((u for u in reversed(program.units) if u.exit == output), None)
    found = None
    if unit is not None and len(unit.entries) == 1:
        found = _joint(tape, unit) or _of_one_number(tape, program, output)
    tape.release()
    return found


def _joint(tape: Tape, unit: Unit) -> EndFunction | None:
    """A softmax or its logarithm."""
    if unit.kind not in _JOINT or len(unit.axes) > 1:
        return None
    made = tape[unit.exit].float()
    total = (made.exp() if unit.kind == "log softmax" else made).sum(unit.axes)
    whole = bool(((total - 1).abs() < 0.1).all())  # else some of it goes to a sink
    return EndFunction(_JOINT[unit.kind], unit.entries[0], unit.axes[0]) if whole else None


def _of_one_number(tape: Tape, program: Program, output: int) -> EndFunction | None:
    """A sigmoid or its logarithm: a chain of elementwise calls that makes the same of other numbers."""
    calls, x = list[Call](), output
    while (call := tape.maker.get(x)) is not None and call.name in ELEMENTWISE and len(calls) < _LONGEST:
        before = [o for o in call.operands if program.carry[o]]
        if len(before) != 1 or tape.shapes[before[0]] != tape.shapes[output]:
            return None
        (x,), calls = before, [call, *calls]
        made, there = _repeated(tape, calls, x)
        for name in ("sigmoid", "logsigmoid"):
            if torch.allclose(made, getattr(functional, name)(there), rtol=1e-5, atol=0):
                return EndFunction(name, x, -1)
    return None


def _repeated(tape: Tape, calls: Sequence[Call], x: int) -> tuple[Tensor, Tensor]:
    """(what the calls make of other numbers in the place of x, these numbers)."""
    there = torch.linspace(-8, 8, tape.shapes[x].numel(), dtype=torch.float64, device=tape.device(x))
    now = {x: there.reshape(tape.shapes[x])}
    with bare():
        for call in calls:
            now.update(zip(call.results, call([now[o] if o in now else tape[o] for o in call.operands]), strict=True))
    return now[calls[-1].results[0]].double(), now[x]

"""Find a sigmoid or softmax, in any form, between the logits and the output of a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from whyformer.tape.calls import needed_calls
from whyformer.tape.program import Program, read_program
from whyformer.tape.state import bare
from whyformer.tape.tables import ELEMENTWISE, KINDS, RESHAPES
from whyformer.tape.units import Unit, roots_of
from whyformer.tape.values import Tape
from whyformer.tape.walking import recomputed

__all__ = ["EndFunction", "end_function"]

_SOFTMAXES = {"softmax": "softmax", "log softmax": "log_softmax"}  # kind of unit -> function of torch
_LONGEST = 8  # maximum number of calls of which a sigmoid may consist


@dataclass(frozen=True)
class EndFunction:
    """A function that a model applies to its logits at its end.

    Attributes:
        name: "sigmoid", "softmax", "log_softmax" or "logsigmoid".
        logits: number of the value to which it is applied.
        axis: the (negative) axis along which it normalises; −1 for elementwise functions.
    """

    name: str
    logits: int
    axis: int


def end_function(tape: Tape, output: int) -> EndFunction | None:
    """Return the function that computes ``output`` from logits, possibly followed by views and casts; None if there is
    none.

    A sigmoid that consists of several calls is recognized by repeating them on other numbers.
    """
    copies = RESHAPES | {"_to_copy", "select"}
    while (call := tape.maker.get(output)) is not None and call.name in copies and len(call.operands) == 1:
        before = call.operands[0]
        if tape.shapes[before].numel() != tape.shapes[output].numel():  # it selects some of the values
            break
        output = before
    if call is None or KINDS.get(call.name) == "linear":
        return None
    roots = [r for n in sorted(tape.inputs) for r in roots_of(tape, n)]
    program = read_program(tape, roots, output)
    unit = next((u for u in reversed(program.units) if u.exit == output), None)
    function = None
    if unit is not None and len(unit.entries) == 1:
        function = _softmax(tape, unit) or _sigmoid(tape, program, output)
    tape.release()
    return function


def _softmax(tape: Tape, unit: Unit) -> EndFunction | None:
    """Return a softmax or its logarithm; None if the unit is neither."""
    if unit.kind not in _SOFTMAXES or len(unit.axes) > 1:
        return None
    result = tape[unit.exit].float()
    total = (result.exp() if unit.kind == "log softmax" else result).sum(unit.axes)
    sums_to_one = bool(((total - 1).abs() < 0.1).all())  # a softmax with a sink sums to less
    return EndFunction(_SOFTMAXES[unit.kind], unit.entries[0], unit.axes[0]) if sums_to_one else None


def _sigmoid(tape: Tape, program: Program, output: int) -> EndFunction | None:
    """Return a sigmoid or its logarithm: a chain of elementwise calls that gives its values for other numbers too."""
    x, numbers = output, torch.linspace(-8, 8, tape.shapes[output].numel(), dtype=torch.float64)
    numbers = numbers.reshape(tape.shapes[output]).to(tape.device(output))
    for _ in range(_LONGEST):
        call = tape.maker.get(x)
        before = [o for o in call.operands if program.carry[o]] if call is not None else []
        if call is None or call.name not in ELEMENTWISE or len(before) != 1:
            return None
        (x,) = before
        if tape.shapes[x] != tape.shapes[output]:
            return None
        with bare():
            y = recomputed(tape, needed_calls(tape.calls, [output], ends=[x]), {x: numbers})[output].double()
        for name in ("sigmoid", "logsigmoid"):
            if torch.allclose(y, getattr(functional, name)(numbers), rtol=1e-5, atol=0):
                return EndFunction(name, x, -1)
    return None

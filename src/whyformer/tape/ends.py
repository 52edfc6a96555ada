"""Find a sigmoid or softmax, in any form, between the logits and the output of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from whyformer.tape.calls import Call
from whyformer.tape.program import Program, read_program
from whyformer.tape.state import bare
from whyformer.tape.tables import ELEMENTWISE, KINDS, RESHAPES
from whyformer.tape.units import Unit, roots_of
from whyformer.tape.values import Tape

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
    copies = RESHAPES | {"_to_copy"}
    while (call := tape.maker.get(output)) is not None and call.name in copies and len(call.operands) == 1:
        output = call.operands[0]
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
    calls, x = list[Call](), output
    while (call := tape.maker.get(x)) is not None and call.name in ELEMENTWISE and len(calls) < _LONGEST:
        before = [o for o in call.operands if program.carry[o]]
        if len(before) != 1 or tape.shapes[before[0]] != tape.shapes[output]:
            return None
        (x,), calls = before, [call, *calls]
        y, numbers = _repeated(tape, calls, x)
        for name in ("sigmoid", "logsigmoid"):
            if torch.allclose(y, getattr(functional, name)(numbers), rtol=1e-5, atol=0):
                return EndFunction(name, x, -1)
    return None


def _repeated(tape: Tape, calls: Sequence[Call], x: int) -> tuple[Tensor, Tensor]:
    """Return (the result of the calls for numbers from −8 to 8 instead of x, these numbers)."""
    numbers = torch.linspace(-8, 8, tape.shapes[x].numel(), dtype=torch.float64, device=tape.device(x))
    values = {x: numbers.reshape(tape.shapes[x])}
    with bare():
        for call in calls:
            results = call([values[o] if o in values else tape[o] for o in call.operands])
            values.update(zip(call.results, results, strict=True))
    return values[calls[-1].results[0]].double(), values[x]

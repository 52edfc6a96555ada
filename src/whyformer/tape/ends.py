"""Functions at a model's end: a sigmoid or softmax between the logits and what the model returns."""

from __future__ import annotations

from dataclasses import dataclass

from whyformer.tape.values import Tape

_FUNCTIONS = {
    "sigmoid": "sigmoid",
    "_softmax": "softmax",
    "_log_softmax": "log_softmax",
    "log_sigmoid_forward": "logsigmoid",
}
_COPIES = frozenset(("view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "clone", "alias", "_to_copy"))


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
    """Return the function that makes ``output`` of logits, through views and casts; None if there is none."""
    while (call := tape.maker.get(output)) is not None:
        if call.name in _FUNCTIONS:
            logits = call.operands[0]
            axis = int(call.args[1]) if "softmax" in call.name else -1
            axis = axis - len(tape.shapes[logits]) if axis >= 0 else axis
            return EndFunction(_FUNCTIONS[call.name], logits, axis)
        if call.name not in _COPIES or len(call.operands) != 1:
            return None
        output = call.operands[0]
    return None

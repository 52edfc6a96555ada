"""Find a sigmoid or softmax, in any form, between the logits and the output of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional

from whyformer.tape.calls import Call, needed_calls
from whyformer.tape.program import Program, read_program
from whyformer.tape.state import bare
from whyformer.tape.tables import ELEMENTWISE, KINDS, RESHAPES, name_set
from whyformer.tape.units import Unit, roots_of
from whyformer.tape.values import Tape
from whyformer.tape.walking import recomputed

__all__ = ["EndFunction", "end_function"]

_SOFTMAXES = {"softmax": "softmax", "log softmax": "log_softmax"}  # kind of unit -> function of torch
_LONGEST = 8  # maximum number of calls of which a sigmoid may consist
_NUMBERS = 9  # minimum number of arguments at which a function is compared with a sigmoid
_COPIES = RESHAPES | name_set("_to_copy select")
_REARRANGEMENTS = _COPIES | name_set(
    "cat stack slice split split_with_sizes unbind t transpose permute expand flip index index_select copy overlay"
)


@dataclass(frozen=True)
class EndPart:
    """A function that is applied to some of the logits.

    Attributes:
        name: "sigmoid", "softmax", "log_softmax" or "logsigmoid".
        result: number of its result.
        shape: shape of its result.
        logits: number of the value to which it is applied.
        axis: the (negative) axis of its result along which it normalises; −1 for elementwise functions.
        negated: whether it is applied to the negative of that value, as 1 − σ(z) = σ(−z).
    """

    name: str
    result: int
    shape: torch.Size
    logits: int
    axis: int = -1
    negated: bool = False

    def before(self, value: Callable[[int], Tensor]) -> Tensor:
        """Return the argument of the function in the shape of its result; ``value`` returns a value by its number."""
        logits = value(self.logits).reshape(self.shape)
        return -logits if self.negated else logits


@dataclass(frozen=True)
class EndFunction:
    """A function that a model applies to its logits at its end.

    Attributes:
        name: "sigmoid", "softmax", "log_softmax" or "logsigmoid".
        axis: the (negative) axis of the output along which it normalises; −1 for elementwise functions.
        parts: its applications, one for each of the results that the model joins.
        calls: the calls that select from the results and join them.
        output: number of the joined result; that of the only part without a join.
        overwritten: number of each tensor into which the results are written -> its previous value, which they
            overwrite completely.
    """

    name: str
    axis: int
    parts: tuple[EndPart, ...]
    calls: tuple[Call, ...]
    output: int
    overwritten: Mapping[int, Tensor] = field(default_factory=dict)

    @property
    def reads(self) -> tuple[int, ...]:
        """Numbers of the values to which it is applied."""
        return tuple({part.logits: None for part in self.parts})

    def logits(self, value: Callable[[int], Tensor]) -> Tensor:
        """Return the logits, selected and joined like the results; ``value`` returns a value by its number."""
        values = {**self.overwritten, **{part.result: part.before(value) for part in self.parts}}
        return _joined(self.calls, values, value)[self.output]


def end_function(tape: Tape, output: int) -> EndFunction | None:
    """Return the function that computes ``output`` from logits, possibly followed by views and casts; None if there is
    none.

    The function may be applied several times and its results joined, as in ``torch.cat([1 - p, p])``, or written into
    one tensor. A sigmoid that consists of several calls is recognized by repeating them on other numbers.
    """
    joined = output
    while (call := tape.maker.get(joined)) is not None and _copies(tape, call):
        joined = call.operands[0]
    leaves, calls = _leaves(tape, joined)
    makers = [tape.maker[n].name for n in leaves if n in tape.maker]
    if not makers or any(KINDS.get(name) == "linear" for name in makers):
        return None
    roots = [r for n in sorted(tape.inputs) for r in roots_of(tape, n)]
    program = read_program(tape, roots, leaves)
    computed = [n for n in leaves if program.carry[n]]
    parts = tuple(part for n in computed if (part := _part(tape, program, n)) is not None)
    tape.release()
    if not parts or len(parts) < len(computed) or len({part.name for part in parts}) > 1:
        return None
    overwritten = {n: tape[n] for n in leaves if not program.carry[n]}
    end = EndFunction(parts[0].name, parts[0].axis, parts, calls, joined, overwritten)
    if overwritten and not _overwrites(tape, end):
        return None
    if not calls or "sigmoid" in end.name:
        return end
    axis = _axis(tape, end, tape.shapes[output])
    return None if axis is None else replace(end, axis=axis)


def _copies(tape: Tape, call: Call) -> bool:
    """Return whether a call keeps all elements of its operand in order."""
    if call.name not in _COPIES or len(call.operands) != 1:
        return False
    return tape.shapes[call.operands[0]].numel() == tape.shapes[call.results[0]].numel()


def _leaves(tape: Tape, output: int) -> tuple[list[int], tuple[Call, ...]]:
    """Return (the values that ``output`` is selected and joined from, the calls that do so in order)."""
    leaves, calls, todo = dict[int, None](), dict[int, Call](), [output]
    while todo:
        n = todo.pop()
        call = tape.maker.get(n)
        if call is None or call.name not in _REARRANGEMENTS:
            leaves[n] = None
        else:
            calls[call.number] = call
            todo += [o for o in call.operands if tape.floating(o)]
    return sorted(leaves), tuple(calls[number] for number in sorted(calls))


def _joined(calls: tuple[Call, ...], values: dict[int, Tensor], value: Callable[[int], Tensor]) -> dict[int, Tensor]:
    """Repeat calls with other operands ``values``; return these and the results."""
    values = dict(values)
    for call in calls:
        results = call([values[o] if o in values else value(o) for o in call.operands])
        values.update(zip(call.results, results, strict=True))
    return values


def _overwrites(tape: Tape, end: EndFunction) -> bool:
    """Return True if every number of the joined result belongs to a part, and none to the tensor written into."""

    def joined(number: float) -> Tensor:
        values = {part.result: torch.full_like(tape[part.result], number) for part in end.parts}
        return _joined(end.calls, values, tape.__getitem__)[end.output]

    return all(bool((joined(number) == number).all()) for number in (0.0, 1.0))


def _axis(tape: Tape, end: EndFunction, shape: torch.Size) -> int | None:
    """Return the axis of the output along which softmaxes normalise; None if it holds parts of them, or several."""
    groups, count, sizes = dict[int, Tensor](), 0, set[int]()
    for part in end.parts:
        of = list(part.shape)
        sizes.add(of[part.axis])
        of[part.axis] = 1
        each = torch.arange(count, count := count + torch.Size(of).numel()).reshape(of)
        groups[part.result] = each.expand(part.shape).to(tape.device(part.result), torch.float64)
    joined = _joined(end.calls, groups, tape.__getitem__)[end.output].reshape(shape)
    axes = range(-len(shape), 0) if len(sizes) == 1 else ()
    return next((a for a in axes if {shape[a]} == sizes and bool((joined == joined.narrow(a, 0, 1)).all())), None)


def _part(tape: Tape, program: Program, output: int) -> EndPart | None:
    """Return the softmax, the sigmoid or the logarithm of either that computes a value; None if there is none."""
    unit = next((u for u in reversed(program.units) if u.exit == output), None)
    if unit is None or len(unit.entries) != 1:
        return None
    return _softmax(tape, unit) or _sigmoid(tape, program, output)


def _softmax(tape: Tape, unit: Unit) -> EndPart | None:
    """Return a softmax or its logarithm; None if the unit is neither."""
    if unit.kind not in _SOFTMAXES or len(unit.axes) > 1:
        return None
    result = tape[unit.exit].float()
    total = (result.exp() if unit.kind == "log softmax" else result).sum(unit.axes)
    sums_to_one = bool(((total - 1).abs() < 0.1).all())  # a softmax with a sink sums to less
    name, shape = _SOFTMAXES[unit.kind], result.shape
    return EndPart(name, unit.exit, shape, unit.entries[0], unit.axes[0]) if sums_to_one else None


def _sigmoid(tape: Tape, program: Program, output: int) -> EndPart | None:
    """Return the sigmoid, or log-sigmoid, of a value or of its negative that a chain of elementwise calls and copies
    computes, also for other numbers than the recorded ones. σ(x) is preferred to σ(−x)."""
    shape, size = tape.shapes[output], tape.shapes[output].numel()
    numbers = torch.linspace(-8, 8, size * -(-_NUMBERS // max(size, 1)), dtype=torch.float64).to(tape.device(output))
    x, of_negative = output, None
    for _ in range(_LONGEST):
        call = tape.maker.get(x)
        before = [o for o in call.operands if program.carry[o]] if call is not None else []
        if call is None or len(before) != 1 or not (call.name in ELEMENTWISE or _copies(tape, call)):
            break
        (x,) = before
        if tape.shapes[x].numel() != size:
            break
        calls = needed_calls(tape.calls, [output], ends=[x])
        with bare():
            changes = [{x: row.reshape(tape.shapes[x])} for row in numbers.reshape(-1, size)]
            y = torch.cat([recomputed(tape, calls, change)[output].double().flatten() for change in changes])
        for name in ("sigmoid", "logsigmoid"):
            function = getattr(functional, name)
            if torch.allclose(y, function(numbers), rtol=1e-5, atol=0):
                return EndPart(name, output, shape, x)
            if of_negative is None and torch.allclose(y, function(-numbers), rtol=1e-5, atol=0):
                of_negative = EndPart(name, output, shape, x, negated=True)
    return of_negative

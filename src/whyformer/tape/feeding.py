"""Which row each row of an input feeds, where layers, convolutions or pools made other rows of them.

    fed = find_fed(tape, rows, family)
    fed[number]  # the row of the family that a row of the input feeds, 0 for none

A step from rows to rows is one call. Where its operand holds all rows of a new one side by side, the labels name them;
else what flows back through the call does: with random flows r and g(w) = Jᵀ(w ⊙ r), where w is a number for each new
row i, a row that feeds one new row only has g(i) = i · g(1), and one that feeds several has not. Where a step is
unknown, it is measured from the input on, what attentions mix being constant.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from whyformer.tape.calls import Call
from whyformer.tape.program import read_program
from whyformer.tape.rows import Family, Rows, constant_along
from whyformer.tape.values import Tape
from whyformer.tape.walking import Composite, Flows, Parts, Rule, Step, Walk, adjoint, walk_back

__all__ = ["UNMIXED", "drawn", "find_fed", "find_step", "measure_fed", "resizes", "weighed_flows"]


def _unless_mixed(walk: Walk, step: Step, flows: Flows) -> Parts:
    """The ordinary adjoint; nothing through what an attention mixes: a product of two values of which the walk holds
    one constant."""
    mixes = len(step.unit.entries) > 1 and all(walk.program.carry[e] for e in step.unit.entries)
    return [] if mixes else adjoint(walk, step, flows)


_MIXTURES = {"softmax": Rule(hold=(0,)), "weighted sum": Rule(back=_unless_mixed)}
UNMIXED = Composite("gradient without attention", _MIXTURES)
"""The gradient, what attentions mix being constant."""


def find_fed(tape: Tape, rows: Rows, family: Family) -> Tensor | None:
    """Return ``[R]``, the row of a family that each row of its input feeds, 0 for none, step by step; None if one feeds
    several on the way, or what happens there is unknown.

    Args:
        tape: a recorded pass.
        rows: of the pass.
        family: rows that are made of an input.
    """
    key = "fed", family.value
    if key not in rows.cache:
        rows.cache[key] = (_find_fed(tape, rows, family),)
    found: Tensor | None = rows.cache[key][0]
    return found


def measure_fed(tape: Tape, rows: Rows, family: Family) -> Tensor | None:
    """:func:`find_fed` measured from the input on; None if one of its rows feeds several."""
    key = "measured", family.value
    if key not in rows.cache:
        rows.cache[key] = (_measured(tape, rows, rows.begun[family.source], family.value),)
    found: Tensor | None = rows.cache[key][0]
    return found


def _find_fed(tape: Tape, rows: Rows, family: Family) -> Tensor | None:
    numbers = torch.arange(len(rows))
    if family.value == rows.begun[family.source]:
        return torch.where(rows.family == rows.families.index(family), numbers, 0)
    labels = [o for o in tape.maker[family.value].operands if rows.labels.get(o)]
    if len(labels) != 1 or len(rows.labels[labels[0]]) != 1:
        return None
    (operand,) = labels
    before = [rows.families[f] for f in rows.family[rows.distinct(rows.of(operand))].unique().tolist()]
    before = [f for f in before if f.source == family.source]
    if any(f.value < n < family.value for f in before for n in rows.blended):
        return None
    fed = torch.zeros_like(numbers)
    for known in (find_fed(tape, rows, f) for f in before):
        if known is None or bool(((fed > 0) & (known > 0)).any()):
            return None
        fed = fed + known
    step = find_step(tape, rows, operand, family.value)
    return None if step is None else step[fed]


def resizes(call: Call) -> bool:
    """Return True if a call is a convolution or a pool."""
    return "conv" in call.name or "pool" in call.name


def find_step(tape: Tape, rows: Rows, operand: int, made: int) -> Tensor | None:
    """Return ``[R]``, the row of a value that each row of an operand of its call feeds, 0 for none; None if one feeds
    several."""
    label, new = rows.of(operand), rows.of(made)
    if resizes(tape.maker[made]) or label.shape[:-1] != new.shape[:-1] or not constant_along(new, -1):
        return _measured(tape, rows, operand, made)
    into = torch.zeros(len(rows), dtype=torch.long)
    side_by_side = new[..., :1].expand(label.shape)
    into[label.flatten()] = side_by_side.flatten()
    into[0] = 0
    return into if bool((into[label] == torch.where(label > 0, side_by_side, 0)).all()) else None


def drawn(tape: Tape, value: int, seed: int = 1) -> Tensor:
    """Return random numbers in the shape of a value."""
    numbers = torch.randn(tape.shapes[value], generator=torch.Generator().manual_seed(seed))
    return numbers.to(tape.device(value), tape.dtypes[value])


def _measured(tape: Tape, rows: Rows, before: int, made: int) -> Tensor | None:
    """``[R]`` the row of a value that each row of another one feeds, 0 for none; None if one feeds several.

    Rows are counted digit by digit, so that rounding cannot reach the next one.
    """
    half = tape.dtypes[made] in (torch.float16, torch.bfloat16)
    base, directions, tolerance = (2, 8, 0.3) if half else (256, 1, 0.1)
    label = rows.of(made)
    numbers = (torch.arange(len(rows)) - int(rows.distinct(label)[0])).clamp(min=0)
    highest = int(rows.distinct(label)[-1] - rows.distinct(label)[0])
    digits = [numbers // base**k % base for k in range(highest.bit_length()) if k == 0 or base**k <= highest]
    weights = [torch.ones_like(numbers), *(w for digit in digits for w in (digit, digit.square()))]
    power, *sums = (torch.zeros(len(rows), dtype=torch.float64) for _ in weights)
    for seed in range(1, directions + 1):
        plain, *others = weighed_flows(tape, rows, before, made, weights, seed)
        power += rows.sums(before, plain.square()).cpu()
        for total, flow in zip(sums, others, strict=True):
            total += rows.sums(before, flow * plain).cpu()
    place = torch.zeros_like(numbers)
    there = power > 0
    for k, (weighed, squared) in enumerate(zip(sums[::2], sums[1::2], strict=True)):
        digit, square = (torch.where(there, s / torch.where(there, power, 1), 0) for s in (weighed, squared))
        mixed = (digit - digit.round()).abs() > tolerance
        mixed |= (square - digit.square()).abs() > tolerance + 1e-5 * digit.square()
        if bool(mixed[1:].any()):
            return None
        place += base**k * digit.round().long()
    place = (place + int(rows.distinct(label)[0])).masked_fill(~there, 0)
    place[0] = 0
    return place


def weighed_flows(
    tape: Tape, rows: Rows, before: int, made: int, weights: Iterable[Tensor], seed: int
) -> Iterator[Tensor]:
    """Return what flows to a value from another one where random flows of its rows are weighed, what attentions mix
    being constant.

    Args:
        tape, rows: a recorded pass and its rows.
        before, made: numbers of the two values.
        weights: ``[R]``, the weight of each row, for each of the flows.
        seed: of the random numbers.
    """
    flow = drawn(tape, made, seed)
    program, label = read_program(tape, [before], made), rows.of(made).to(flow.device)
    runs = [(UNMIXED, {made: flow * weight.to(flow)[label]}) for weight in weights]
    found = walk_back(program, tape, runs, wanted=[before])
    tape.release()
    return (flows[before].double() for flows in found)

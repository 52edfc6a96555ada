"""Find the row that each row of an input feeds, after layers, convolutions or pools have merged rows.

    fed = find_fed(tape, rows, family)
    fed[number]  # the row of the family that a row of the input feeds, 0 for none

New rows are created from other rows by single calls, one step after another. If the rows of a new row lie side by side
in the operand of such a call, the labels determine the step. Otherwise it is measured by flows through the call: with
random flows r and g(w) = Jᵀ(w ⊙ r), where w is a number for each new row i, a row that feeds only the new row i has
g(i) = i · g(1), and a row that feeds several does not. If a step is unknown, all steps are measured at once, from the
input on, with the mixing of attentions held constant.
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
    """Apply the ordinary adjoint, but propagate no flow through a product of attention map and values, whose map the
    walk holds constant."""
    mixes = len(step.unit.entries) > 1 and all(walk.program.carry[e] for e in step.unit.entries)
    return [] if mixes else adjoint(walk, step, flows)


_MIXTURES = {"softmax": Rule(hold=(0,)), "weighted sum": Rule(back=_unless_mixed)}
UNMIXED = Composite("gradient without attention", _MIXTURES)
"""The gradient with the mixing of attentions held constant."""


def find_fed(tape: Tape, rows: Rows, family: Family) -> Tensor | None:
    """Return ``[R]``, the row of a family that each row of its input feeds, 0 for none, by composing the steps between.
    Return None if a row feeds several rows in some step, or if a step is unknown.

    Args:
        tape: a recorded pass.
        rows: the rows of the pass.
        family: rows that are computed from an input.
    """
    return rows.once(("fed", family.value), lambda: _find_fed(tape, rows, family))


def measure_fed(tape: Tape, rows: Rows, family: Family) -> Tensor | None:
    """Return :func:`find_fed`, measured for all steps at once; None if a row of the input feeds several rows."""
    before = rows.roots[family.source]
    return rows.once(("measured", family.value), lambda: _measured(tape, rows, before, family.value))


def _find_fed(tape: Tape, rows: Rows, family: Family) -> Tensor | None:
    numbers = torch.arange(len(rows))
    if family.value == rows.roots[family.source]:
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
    for fed_before in (find_fed(tape, rows, f) for f in before):
        if fed_before is None or bool(((fed > 0) & (fed_before > 0)).any()):
            return None
        fed = fed + fed_before
    step = find_step(tape, rows, operand, family.value)
    return None if step is None else step[fed]


def resizes(call: Call) -> bool:
    """Return True if a call is a convolution or a pool."""
    return "conv" in call.name or "pool" in call.name


def find_step(tape: Tape, rows: Rows, operand: int, result: int) -> Tensor | None:
    """Return ``[R]``, the row of value ``result`` that each row of an operand of its call feeds, 0 for none; None if a
    row feeds several."""
    label, new = rows.of(operand), rows.of(result)
    if resizes(tape.maker[result]) or label.shape[:-1] != new.shape[:-1] or not constant_along(new, -1):
        return _measured(tape, rows, operand, result)
    into = torch.zeros(len(rows), dtype=torch.long)
    side_by_side = new[..., :1].expand(label.shape)
    into[label.flatten()] = side_by_side.flatten()
    into[0] = 0
    return into if bool((into[label] == torch.where(label > 0, side_by_side, 0)).all()) else None


def drawn(tape: Tape, value: int, seed: int = 1) -> Tensor:
    """Return random numbers in the shape of a value."""
    numbers = torch.randn(tape.shapes[value], generator=torch.Generator().manual_seed(seed))
    return numbers.to(tape.device(value), tape.dtypes[value])


def _measured(tape: Tape, rows: Rows, before: int, after: int) -> Tensor | None:
    """Return ``[R]``, the row of value ``after`` that each row of value ``before`` feeds, 0 for none; None if a row
    feeds several.

    Row numbers are measured digit by digit, so that rounding errors cannot lead to another row.
    """
    half = tape.dtypes[after] in (torch.float16, torch.bfloat16)
    base, directions, tolerance = (2, 8, 0.3) if half else (256, 1, 0.1)
    label = rows.of(after)
    numbers = (torch.arange(len(rows)) - int(rows.distinct(label)[0])).clamp(min=0)
    highest = int(rows.distinct(label)[-1] - rows.distinct(label)[0])
    digits = [numbers // base**k % base for k in range(highest.bit_length()) if k == 0 or base**k <= highest]
    weights = [torch.ones_like(numbers), *(w for digit in digits for w in (digit, digit.square()))]
    power, *sums = (torch.zeros(len(rows), dtype=torch.float64) for _ in weights)
    for seed in range(1, directions + 1):
        plain, *others = weighed_flows(tape, rows, before, after, weights, seed)
        power += rows.sums(before, plain.square()).cpu()
        for total, flow in zip(sums, others, strict=True):
            total += rows.sums(before, flow * plain).cpu()
    place = torch.zeros_like(numbers)
    feeds = power > 0
    for k, (weighed, squared) in enumerate(zip(sums[::2], sums[1::2], strict=True)):
        digit, square = (torch.where(feeds, s / torch.where(feeds, power, 1), 0) for s in (weighed, squared))
        mixed = (digit - digit.round()).abs() > tolerance
        mixed |= (square - digit.square()).abs() > tolerance + 1e-5 * digit.square()
        if bool(mixed[1:].any()):
            return None
        place += base**k * digit.round().long()
    place = (place + int(rows.distinct(label)[0])).masked_fill(~feeds, 0)
    place[0] = 0
    return place


def weighed_flows(
    tape: Tape, rows: Rows, before: int, after: int, weights: Iterable[Tensor], seed: int
) -> Iterator[Tensor]:
    """Propagate random flows, multiplied by a weight for each row, from value ``after`` to value ``before``, with the
    mixing of attentions held constant.

    Args:
        tape, rows: a recorded pass and its rows.
        before, after: numbers of the two values.
        weights: for each flow, ``[R]``, the weight of each row.
        seed: seed of the random numbers.

    Returns:
        For each of the weights, the flow at ``before``.
    """
    flow = drawn(tape, after, seed)
    program, label = read_program(tape, [before], after), rows.of(after).to(flow.device)
    runs = [(UNMIXED, {after: flow * weight.to(flow)[label]}) for weight in weights]
    results = walk_back(program, tape, runs, wanted=[before])
    tape.release()
    return (flows[before].double() for flows in results)

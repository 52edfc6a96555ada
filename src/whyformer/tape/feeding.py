"""Find the row that each row of an input feeds, after layers, convolutions or pools have merged rows.

    fed = find_fed(tape, rows, family)
    fed[number]  # the row of the family that a row of the input feeds, 0 for none
    find_read_box(tape, tape.number(pixels), outputs, noise)  # (left, top, right, bottom) of the pixels that are read

New rows are created from other rows by single calls, one step after another. If the rows that feed a new row lie side
by side in the operand of such a call, the labels determine the step. Otherwise the step is measured by flows through
the call: let J be the Jacobian of the call, r random flows, and g(w) = Jᵀ(w ⊙ r), where w has one weight per new row.
If the weight of each row is its number, a row that feeds only the new row i has g(w) = i · g(1), unlike a row that
feeds several. If a step is unknown, all steps are measured at once, from the input on, with the mixing of attentions
held constant. If receptive fields overlap, their centres are measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from whyformer.tape.caches import Recent
from whyformer.tape.calls import Call, needed_calls
from whyformer.tape.program import read_program
from whyformer.tape.rows import RowFamily, Rows, constant_along
from whyformer.tape.state import bare
from whyformer.tape.tables import KINDS
from whyformer.tape.trials import SOFTMAX_KINDS
from whyformer.tape.values import Tape
from whyformer.tape.walking import GRADIENT, Composite, Flows, Parts, Rule, Step, Walk, adjoint, walk_back

__all__ = [
    "UNMIXED",
    "Box",
    "find_fed",
    "find_read_box",
    "find_step",
    "flows_between",
    "frame_of",
    "measure_fed",
    "overwrites",
    "random_flow",
    "represents_shares",
    "resizes",
]

Box = tuple[float, float, float, float]
"""(left, top, right, bottom) in pixels of an input, possibly fractional."""
RANDOM_FLOWS = 8  # number of random flows by which the positions of rows are measured
_BOXES: Recent[Box | None] = Recent(16)


def _unless_mixed(walk: Walk, step: Step, flows: Flows) -> Parts:
    """Apply the ordinary adjoint, but propagate no flow through a product of attention map and values, whose map the
    walk holds constant."""
    mixes = len(step.unit.entries) > 1 and all(walk.program.carry[e] for e in step.unit.entries)
    return [] if mixes else adjoint(walk, step, flows)


_MIXTURES = {
    **dict.fromkeys(SOFTMAX_KINDS, Rule(constant=(0,))),
    **dict.fromkeys(("weighted sum", "activated product"), Rule(back=_unless_mixed)),
}
UNMIXED = Composite("gradient without attention", _MIXTURES)
"""The gradient with the mixing of attentions held constant."""


def find_fed(tape: Tape, rows: Rows, family: RowFamily) -> Tensor | None:
    """Return ``[R]``, the row of a family that each row of its input feeds, 0 for none, by composing the steps between.
    Return None if a row feeds several rows in some step, or if a step is unknown.

    Args:
        tape: a recorded pass.
        rows: the rows of the pass.
        family: rows that are computed from an input.
    """
    return rows.once(("fed", family.value), lambda: _find_fed(tape, rows, family))


def measure_fed(tape: Tape, rows: Rows, family: RowFamily) -> Tensor | None:
    """Return what :func:`find_fed` returns, measured for all steps at once; None if an input row feeds several."""
    before = rows.roots[family.source]
    return rows.once(("measured", family.value), lambda: _measure_step(tape, rows, before, family.value))


def _find_fed(tape: Tape, rows: Rows, family: RowFamily) -> Tensor | None:
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
        return _measure_step(tape, rows, operand, result)
    into = torch.zeros(len(rows), dtype=torch.long)
    side_by_side = new[..., :1].expand(label.shape)
    into[label.flatten()] = side_by_side.flatten()
    into[0] = 0
    return into if bool((into[label] == torch.where(label > 0, side_by_side, 0)).all()) else None


def random_flow(tape: Tape, value: int, draw: int = 1) -> Tensor:
    """Return random numbers in the shape of a value, always the same for the same ``draw``."""
    numbers = torch.randn(tape.shapes[value], generator=torch.Generator().manual_seed(draw))
    return numbers.to(tape.device(value), tape.dtypes[value])


def _measure_step(tape: Tape, rows: Rows, before: int, after: int) -> Tensor | None:
    """Return ``[R]``, the row of value ``after`` that each row of value ``before`` feeds, 0 for none; None if a row
    feeds several.

    Random flows at the rows j of ``after`` arrive at row i of ``before`` as g(1), and as g(w) if they are multiplied by
    weights w_j. If row i feeds only row j, ⟨g(w), g(1)⟩ / ⟨g(1), g(1)⟩ = w_j there, so weights w_j = j would measure j.
    The weights are the digits of j instead, so that rounding errors cannot lead to another row: with base 256, row 515
    is measured as 2 and 3. Squares of the digits as weights show whether a result is the digit of one row or the mean
    of several.
    """
    half = tape.dtypes[after] in (torch.float16, torch.bfloat16)
    base, directions, tolerance = (2, 8, 0.3) if half else (256, 1, 0.1)
    label = rows.of(after)
    numbers = (torch.arange(len(rows)) - int(rows.distinct(label)[0])).clamp(min=0)
    highest = int(rows.distinct(label)[-1] - rows.distinct(label)[0])
    digits = [numbers // base**k % base for k in range(highest.bit_length()) if k == 0 or base**k <= highest]
    weights = [torch.ones_like(numbers), *(w for digit in digits for w in (digit, digit.square()))]
    power, *sums = (torch.zeros(len(rows), dtype=torch.float64) for _ in weights)
    for draw in range(1, directions + 1):
        plain, *others = _weighted_flows(tape, rows, before, after, weights, draw)
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


def flows_between(
    tape: Tape, before: int, seeds: Sequence[Mapping[int, Tensor]], composite: Composite = UNMIXED
) -> list[Tensor]:
    """Propagate flows from some values to an earlier value.

    Args:
        tape: a recorded pass.
        before: number of the earlier value.
        seeds: for each walk, {number of a value: flow}. All start from the same values.
        composite: the rules. By default, the mixing of attentions is held constant.
    """
    program = read_program(tape, [before], seeds[0])
    results = walk_back(program, tape, [(composite, seed) for seed in seeds], observed=[before])
    tape.release()
    return [flows[before] for flows in results]


def _weighted_flows(
    tape: Tape, rows: Rows, before: int, after: int, weights: Iterable[Tensor], draw: int
) -> Iterator[Tensor]:
    """Yield the flows at value ``before`` from the same random flow at value ``after``, multiplied by a weight for each
    row.

    Args:
        tape, rows: a recorded pass and its rows.
        before, after: numbers of the two values.
        weights: for each flow, ``[R]``, the weight of each row.
        draw: number of the random flow, as for :func:`random_flow`.
    """
    flow = random_flow(tape, after, draw)
    label = rows.of(after).to(flow.device)
    seeds = [{after: flow * weight.to(flow)[label]} for weight in weights]
    return (flow.double() for flow in flows_between(tape, before, seeds))


def overwrites(tape: Tape, rows: Rows, numbers: Tensor, family: RowFamily, later: RowFamily) -> bool:
    """Return True if rows of a later family replace rows of a family that were overwritten before they were read, as
    when a model sets padding to 0 and a convolution over positions then fills it.

    Args:
        tape: a recorded pass.
        rows: the rows of the pass.
        numbers: ``[B, N]``, row numbers of both families.
        family, later: the families.
    """
    if family.numbers.shape != numbers.shape:
        return False
    lost = torch.isin(numbers, later.numbers)
    if bool((~lost & torch.isin(numbers, family.numbers) & (numbers != family.numbers)).any()):
        return False
    (flow,) = _weighted_flows(tape, rows, family.value, later.value, [torch.ones(len(rows))], draw=1)
    return not bool(rows.sums(family.value, flow.square()).cpu()[family.numbers[lost]].any())


# -- receptive fields that overlap -----------------------------------------------------------------------------------
def frame_of(moments: int, frames: int) -> Tensor:
    """Return ``[T]``, the frame to which each of T moments belongs, if N frames represent T/N moments each."""
    middles = torch.arange(moments) + 0.5
    return torch.div(middles * frames, moments, rounding_mode="floor").long().clamp(max=frames - 1)


def represents_shares(tape: Tape, rows: Rows, family: RowFamily, root: RowFamily) -> bool:
    """Return True if the rows of a family represent equal shares of an input, in the order of their grids: moments of a
    sound, or pixels of a picture.

    With random flows r at the rows i and g(w) = Jᵀ(w ⊙ r), the mean of g(i) · g(1) divided by that of g(1)² is the
    centre Σ_i i‖J_ip‖² / Σ_i ‖J_ip‖² of the rows that element p feeds, where i is the coordinate of a row along an axis
    of the grid. As a function of the row, the centres of the elements of its share must lie on a line through the
    middle, up to one row. The slope of the line may be smaller than 1, since norms over the whole input, and positions
    that are added by a convolution, move all centres towards the middle.

    Args:
        tape: a recorded pass.
        rows: the rows of the pass.
        family: rows that are computed from the elements, ``[B, N]``.
        root: the family of the elements, ``[B, M]``.
    """
    count = len(family.numbers)
    grid = family.grid if len(root.grid) > 1 else family.numbers.shape[1:]
    if len(grid) != len(root.grid) or family.numbers.shape != (count, math.prod(grid)):
        return False
    if root.numbers.shape != (count, math.prod(root.grid)):
        return False
    places = [p.double() - (n - 1) / 2 for n, p in zip(grid, _coordinates(grid), strict=True)]
    pairs = zip(root.grid, grid, _coordinates(root.grid), strict=True)
    shares = [frame_of(m, n)[p].repeat(count) for m, n, p in pairs]
    power, along = _sums_for_centres(tape, rows, family, root, places)
    return all(_in_line(power, a, share, n) for a, share, n in zip(along, shares, grid, strict=True))


def _coordinates(grid: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return, for each axis, ``[M]``, the coordinates of the elements of a grid in reading order."""
    return torch.unravel_index(torch.arange(math.prod(grid)), grid)


def _sums_for_centres(
    tape: Tape, rows: Rows, family: RowFamily, root: RowFamily, places: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Return g(1)² and, for each axis, g(i) · g(1), each ``[B·M]``, of the elements, summed over the random flows.

    Args:
        tape, rows, family, root: as for :func:`represents_shares`.
        places: for each axis, ``[N]``, the coordinates i of the rows.
    """
    ones, elements = torch.ones_like(places[0]), root.numbers.flatten()
    totals = [torch.zeros(len(elements), dtype=torch.float64) for _ in (ones, *places)]
    weights = torch.zeros(len(totals), len(rows), dtype=torch.float64)
    for weight, place in zip(weights, (ones, *places), strict=True):
        weight[family.numbers] = place.expand(family.numbers.shape)
    for draw in range(1, RANDOM_FLOWS + 1):
        plain, *moved = _weighted_flows(tape, rows, root.value, family.value, weights, draw)
        for total, product in zip(totals, (plain, *moved), strict=True):
            total += rows.sums(root.value, product * plain).cpu()[elements]
    return totals[0], totals[1:]


def _in_line(power: Tensor, along: Tensor, share: Tensor, count: int) -> bool:
    """Return True if the centres of the elements of each share lie on a line over the shares."""
    total, moved = (t.new_zeros(count).index_add_(0, share, t) for t in (power, along))
    fed = total > 0
    if int(fed.sum()) < min(2, count):
        return False
    places = (torch.arange(count, dtype=torch.float64) - (count - 1) / 2)[fed]
    centres, about = moved[fed] / total[fed], places - places.mean()
    spread = float(about.square().sum())
    slope = float((centres * about).sum()) / spread if spread else 1.0
    off = float((centres - centres.mean() - slope * about).square().mean().sqrt())
    return slope > 0.25 and off < slope and abs(float(centres.mean() - slope * places.mean())) < 1


# -- the part of a picture that is read ------------------------------------------------------------------------------
def find_read_box(
    tape: Tape, number: int, outputs: Iterable[int], noise: Callable[[], tuple[Tape, int, Iterable[int]]]
) -> Box | None:
    """Return the bounding box of the pixels that a model reads; None if it is the whole picture, or unknown. A
    convolution whose stride equals its kernel size ignores the pixels after the last whole patch.

    Random flows are propagated to the pixels from the values that the first attention reads, or from the outputs if
    there is no attention. Pixels count as unread if they get no flow, both here and in a pass with random pixels: where
    a picture is of one colour, rectifiers may be 0, and a max-pool selects one of equal values.

    Args:
        tape: a recorded pass.
        number: number of the picture, ``[..., H, W]``.
        outputs: numbers of the values that the model returned.
        noise: records a pass with random pixels; returns its tape, number and outputs.
    """
    ends = tuple(outputs)

    def measured() -> Box | None:
        return _read_box(tape, number, ends) and _read_box(*noise())

    return _BOXES.once((tape.signature, number, ends), measured)


def _read_box(tape: Tape, number: int, outputs: Iterable[int]) -> Box | None:
    with bare():
        box = _box_of_flows(tape, number, outputs)
    tape.release()
    return box


def _box_of_flows(tape: Tape, number: int, outputs: Iterable[int]) -> Box | None:
    if not tape.floating(number) or len(tape.shapes[number]) < 3:
        return None
    ends = _before_attention(tape, number, outputs)
    if not ends:
        return None
    (flow,) = flows_between(tape, number, [{n: random_flow(tape, n) for n in ends}], GRADIENT)
    read = (flow != 0).flatten(0, -3).any(0)
    height, width = read.shape
    lines = [read.any(1 - axis).nonzero().flatten().tolist() for axis in (0, 1)]
    if not all(lines):
        return None
    (top, bottom), (left, right) = ((float(indices[0]), float(indices[-1] + 1)) for indices in lines)
    return None if (left, top, right, bottom) == (0, 0, width, height) else (left, top, right, bottom)


def _before_attention(tape: Tape, number: int, outputs: Iterable[int]) -> list[int]:
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

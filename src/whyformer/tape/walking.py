"""Walk over a tape: backward with the rules of a composite, forward, or replay it with some values replaced.

    flows = walk_back(program, tape, [(composite, {program.output: seed})], observed=program.roots)
    shares = walk_forward(program, {entry: shares}, [program.output], rule)
    logits, = replay(tape, {n: zeros}, [program.output])

A *flow* is a tensor that propagates backward, with the shape of the value that it belongs to: a multiplier (a gradient,
under the empty composite) or a relevance. A composite maps kinds of units to rules; a kind without a rule uses its
ordinary adjoint. Rules that distribute relevance within samples need ``samples=``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from whyformer.errors import ModelError, UnknownOperation
from whyformer.tape.adjoints import adjoint_of_call, in_dtype
from whyformer.tape.calls import Call, needed_calls
from whyformer.tape.program import Program
from whyformer.tape.rows import Rows, RowSamples
from whyformer.tape.state import bare, in_transform
from whyformer.tape.units import PRODUCT_KINDS, Unit
from whyformer.tape.values import Tape

__all__ = [
    "GRADIENT",
    "Composite",
    "Rule",
    "Step",
    "Walk",
    "adjoint",
    "decisions",
    "for_each",
    "one_branch",
    "plan",
    "recomputed",
    "repeat_unit",
    "replay",
    "walk_back",
    "walk_forward",
]

Flows = dict[int, Tensor]
Parts = list[tuple[int, Tensor]]

_ONE_BRANCH = {"gate": "scale", "activated gate": "scale", "add": "shift"}
_ONE_BRANCH |= dict.fromkeys(PRODUCT_KINDS, "weighted sum")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Rule:
    """How a unit propagates flows from its exits to its entries.

    Attributes:
        constant: positions of the entries that are constants; "statistics" for the values by which a norm divides.
        factor: factor of each propagated flow.
        back: ``back(walk, step, {exit: flow})`` returns (entry, flow) pairs. None for the ordinary adjoint.
        refuse: why no relevance can pass, as the end of a sentence for an error. None if it can.
        name: name for audits; None if ``back`` always raises.
    """

    constant: tuple[int | str, ...] = ()
    factor: float = 1.0
    back: Callable[[Walk, Step, Flows], Parts] | None = None
    refuse: str | None = None
    name: str | None = "adjoint"

    @property
    def title(self) -> str | None:
        """Name and factor, for audits; None if no relevance can pass."""
        if self.refuse is not None or self.name is None:
            return None
        return self.name if self.factor == 1 else f"{self.name} × {self.factor:g}"


@dataclass(frozen=True, eq=False)
class Composite:
    """Rules by kind of unit.

    Attributes:
        name: name for results and errors.
        rules: maps a kind to its rule.
        propagates: "multiplier" if relevance is value × flow, "relevance" if it is the flow itself.
        by_sign: True if positive and negative seeds are propagated separately and then added, because a rule divides
            by the sum of the flows, which is 0 if the seeds cancel.
    """

    name: str
    rules: Mapping[str, Rule]
    propagates: str = "multiplier"
    by_sign: bool = False


GRADIENT = Composite("gradient", {})
UnitCallback = Callable[[int, "Step", Flows, Parts], None]
_ORDINARY = Rule()


@dataclass(eq=False)
class Step:
    """A unit with its rule in one walk.

    Attributes:
        unit: the unit.
        rule: the composite's rule for it.
        carry: for each entry, whether it depends on a root other than through entries that are constants.
        live: for each entry, whether a flow is propagated to it: it is no constant of the rule, and it depends on an
            observed value.
        visited: True if an entry is live, or an exit is observed.
        needs: for each call, (its number, for each operand whether its flow is needed).
    """

    unit: Unit
    rule: Rule
    carry: tuple[bool, ...]
    live: tuple[bool, ...]
    visited: bool
    needs: list[tuple[int, tuple[bool, ...]]]


@dataclass(frozen=True, eq=False)
class Walk:
    """The context of a walk, which rules can read.

    Attributes:
        program: the units of the pass.
        tape: the recorded pass.
        samples: the sample of each element of each value.
    """

    program: Program
    tape: Tape
    samples: RowSamples


def one_branch(kind: str) -> str:
    """Return the kind that a unit of two branches has when one of them is constant."""
    return _ONE_BRANCH.get(kind, kind)


def plan(program: Program, tape: Tape, composite: Composite, observed: frozenset[int]) -> list[Step]:
    """Return the steps of a walk to the observed values, one for each unit.

    Entries that a rule holds constant cut branches, which changes the kind of later units: if the composite
    holds attention maps constant, the product of map and values has one branch and counts as a weighted sum.
    """
    return program.plans.once((composite, observed), lambda: _plan(program, tape, composite, observed))


def _plan(program: Program, tape: Tape, composite: Composite, observed: frozenset[int]) -> list[Step]:
    carry, live = ([n in start for n in range(len(program.carry))] for start in (set(program.roots), observed))
    steps: list[Step] = []
    for unit in program.units:
        branches = tuple(carry[e] for e in unit.entries)
        kind = one_branch(unit.kind) if sum(branches) < 2 else unit.kind
        rule = composite.rules.get(kind, _ORDINARY)
        propagates = [i not in rule.constant for i in range(len(unit.entries))]
        live_entries = tuple(p and live[e] for p, e in zip(propagates, unit.entries, strict=True))
        for r in unit.exits:
            carry[r] = carry[r] or any(p and b for p, b in zip(propagates, branches, strict=True))
            live[r] = live[r] or any(live_entries)
        visited = any(live_entries) or any(r in observed for r in unit.exits)
        needs = _needs(unit, tape, rule, live_entries) if visited else []
        steps.append(Step(unit, rule, branches, live_entries, visited, needs))
    return steps


def _needs(unit: Unit, tape: Tape, rule: Rule, live_entries: tuple[bool, ...]) -> list[tuple[int, tuple[bool, ...]]]:
    if unit.places and len(unit.calls) == 1:
        number = unit.calls[0]
        needed = {p for p, live in zip(unit.places, live_entries, strict=True) if live}
        return [(number, tuple(i in needed for i in range(len(tape.calls[number].operands))))]
    inner = {e for e, live in zip(unit.entries, live_entries, strict=True) if live}
    statistics, needs = unit.statistics if "statistics" in rule.constant else frozenset[int](), []
    for number in unit.calls:
        call = tape.calls[number]
        operands_needed = tuple(o in inner for o in call.operands)
        inner.update(r for r in call.results if any(operands_needed) and r not in statistics and tape.floating(r))
        needs.append((number, operands_needed))
    return needs


def adjoint(walk: Walk, step: Step, flows: Flows) -> Parts:
    """Propagate flows through a unit by the adjoint (vector–Jacobian product) of each of its calls, in reverse."""
    tape, out = walk.tape, list[tuple[int, Tensor]]()
    entries = set(step.unit.entries)
    flows = dict(flows)
    for number, needs in reversed(step.needs):
        call = tape.calls[number]
        arrived = [flows.pop(r, None) for r in call.results]
        if not any(needs) or all(f is None for f in arrived):
            continue
        for o, flow in zip(call.operands, adjoint_of_call(call, tape, arrived, needs), strict=False):
            if flow is None:
                continue
            flow = in_dtype(flow, tape.dtypes[o])
            if o in entries:
                out.append((o, flow))
            else:
                flows[o] = flows[o] + flow if o in flows else flow
    return out


def walk_back(
    program: Program,
    tape: Tape,
    runs: Sequence[tuple[Composite, Mapping[int, Tensor]]],
    *,
    at: Mapping[int, Callable[..., None]] | None = None,
    observed: Iterable[int] = (),
    samples: RowSamples | None = None,
    on_unit: UnitCallback | None = None,
) -> list[Flows]:
    """Walk from the output to the roots, with several composites in lockstep.

    Args:
        program: the units of the pass.
        tape: the pass, or another one with the same signature.
        runs: (composite, {value: seed}) pairs. A seed has the shape of its value.
        at: maps a value to a function that is called with the complete flow of each run (None if nothing arrives). The
            flow is freed afterwards, so only one such flow is in memory at a time.
        observed: values whose flows are returned.
        samples: the samples of the elements of each value; required by rules that distribute relevance within samples.
        on_unit: called after each unit with (index of the run, step, flows at its exits, flows to its entries).

    Returns:
        For each run, {observed value: flow}; zeros where nothing arrives.

    Raises:
        UnknownOperation: relevance arrives at a unit for which the composite has no rule.
        ModelError: relevance arrives at a call that has no derivative.
    """
    at, observed = dict(at or {}), frozenset(observed)
    walk = Walk(program, tape, samples or RowSamples(Rows()))
    results, remaining = [Flows() for _ in runs], {*observed, *at}
    parts = [(run, flows) for run, (composite, seeds) in enumerate(runs) for flows in _by_sign(composite, seeds)]
    owners, flows = [run for run, _ in parts], [flows for _, flows in parts]
    plans = [plan(program, tape, runs[run][0], frozenset(remaining)) for run in owners]

    def arrive(n: int) -> None:
        """Store the flows at a value, which are complete, or call its function with them."""
        remaining.discard(n)
        pairs = [*zip(owners, flows, strict=True)]
        arrived = [_sum(f.get(n) for owner, f in pairs if owner == run) for run in range(len(runs))]
        if n in observed:
            for result, flow in zip(results, arrived, strict=True):
                result[n] = _zeros(tape, n) if flow is None else flow
        if n in at:
            at[n](*arrived)

    with bare():
        for i in range(len(program.units) - 1, -1, -1):
            if not remaining:
                break
            unit, steps = program.units[i], [steps[i] for steps in plans]
            if any(step.visited for step in steps):
                for r in filter(remaining.__contains__, unit.exits):
                    arrive(r)
            _visit(walk, unit, steps, flows, owners, on_unit)
        for n in sorted(remaining, reverse=True):
            arrive(n)
    return results


def _sum(flows: Iterable[Tensor | None]) -> Tensor | None:
    """Return the sum of the flows that are not None; None if all are."""
    arrived = [flow for flow in flows if flow is not None]
    return arrived[0] if len(arrived) == 1 else torch.stack(arrived).sum(0) if arrived else None


def _by_sign(composite: Composite, seeds: Mapping[int, Tensor]) -> list[Flows]:
    """Return the seeds; as two parts, the positive and the negative ones, if ``composite.by_sign`` and both occur."""
    # inside vmap, Python cannot branch on values, and a part without a flow adds nothing
    mixed = composite.by_sign and (in_transform() or any(bool((s > 0).any() and (s < 0).any()) for s in seeds.values()))
    if not mixed:
        return [dict(seeds)]
    return [{n: seed.clamp(min=0) for n, seed in seeds.items()}, {n: seed.clamp(max=0) for n, seed in seeds.items()}]


def _visit(
    walk: Walk, unit: Unit, steps: list[Step], flows: list[Flows], owners: list[int], on_unit: UnitCallback | None
) -> None:
    """Propagate the flows of each run from the exits of a unit to its entries; a run may have two sets of flows."""
    for run, step, pending in zip(owners, steps, flows, strict=True):
        exit_flows = {r: pending.pop(r) for r in unit.exits if r in pending}
        if step.visited and exit_flows and any(step.live):
            parts = _propagate(walk, step, exit_flows, pending)
            if on_unit is not None:
                on_unit(run, step, exit_flows, parts)
    walk.tape.release(walk.tape.calls[n] for n in unit.calls)


def _propagate(walk: Walk, step: Step, exit_flows: Flows, flows: Flows) -> Parts:
    """Add the flows to the entries of a unit to ``flows``; return them."""
    rule, parts = step.rule, Parts()
    try:
        if rule.refuse is not None:
            if not any(bool(flow.any()) for flow in exit_flows.values()):
                return parts  # no relevance arrives
            raise UnknownOperation(f"relevance arrives at '{step.unit.name}', {rule.refuse}")
        propagated = (rule.back or adjoint)(walk, step, exit_flows)
    except UnknownOperation as error:
        error.call = step.unit.calls[-1]
        raise
    for value, flow in propagated:
        flow = flow if rule.factor == 1 else flow * rule.factor
        flows[value] = flows[value] + flow if value in flows else flow
        parts.append((value, flow))
    return parts


def _zeros(tape: Tape, n: int) -> Tensor:
    return torch.zeros(tape.shapes[n], dtype=tape.dtypes[n], device=tape.device(n))


# -- forward ---------------------------------------------------------------------------------------------------------
def walk_forward(
    program: Program,
    start: Mapping[int, _T],
    outputs: Collection[int],
    rule: Callable[[Unit, dict[int, _T]], dict[int, _T]],
    dropped: Collection[str] = (),
) -> dict[int, _T]:
    """Propagate data, such as a decomposition of each value, forward from some values to others.

    Args:
        program: the units of the pass.
        start: maps a value to its data.
        outputs: values whose data is returned.
        rule: ``rule(unit, {entry: data})`` returns ``{exit: data}``. It is called if at least one entry has data.
        dropped: kinds of units that propagate nothing.

    Returns:
        {output: data}, without the outputs that have none. Other data is freed after its last use.
    """
    path, needed = list[Unit](), set(outputs)
    for unit in reversed(program.units):
        if unit.kind not in dropped and any(r in needed and r not in start for r in unit.exits):
            path.append(unit)
            needed.update(unit.entries)
    path.reverse()
    last = {e: i for i, unit in enumerate(path) for e in unit.entries}
    data = dict(start)
    with bare():
        for i, unit in enumerate(path):
            entries = {e: data[e] for e in unit.entries if e in data}
            for e in entries:
                if last[e] == i and e not in outputs:
                    del data[e]
            if entries:
                data |= rule(unit, entries)
    return {n: data[n] for n in outputs if n in data}


# -- replay ----------------------------------------------------------------------------------------------------------
def replay(tape: Tape, changes: Mapping[int, Tensor], outputs: Iterable[int]) -> list[Tensor]:
    """Return values of the pass with some values replaced. Only calls that depend on the changes are repeated.

    ``torch.vmap`` over this function computes a batch of interventions from one recording.

    Args:
        tape: a recorded pass.
        changes: maps the number of a value to its replacement.
        outputs: numbers of the values to return.

    Raises:
        ModelError: a Python number or a shape was computed from a value that depends on the changes, so that the model
            might take another path (see :func:`decisions`), or a call that depends on them draws random numbers.
    """
    outputs = list(outputs)
    last = max((tape.maker[n].number for n in outputs if n in tape.maker), default=-1)
    dependent = [call for call in decisions(tape, changes) if call.number <= last]
    if dependent:
        raise ModelError(
            f"the model decides by a value that depends on the change ('{dependent[0].name}'), so the recorded pass "
            "cannot be replayed with it: run the model again with the change"
        )
    with bare():
        new = recomputed(tape, needed_calls(tape.calls, outputs, ends=changes), changes, refuse_random=True)
        values = [new[n] if n in new else tape[n] for n in outputs]
    tape.release()
    return values


def recomputed(
    tape: Tape, calls: Iterable[Call], changes: Mapping[int, Tensor], *, refuse_random: bool = False
) -> dict[int, Tensor]:
    """Repeat the calls that depend on replaced values; return the replaced and the recomputed values."""
    new = dict(changes)
    for call in calls:
        if any(o in new for o in call.operands) and not all(r in changes for r in call.results):
            if call.random and refuse_random:
                raise ModelError(f"'{call.name}' draws random numbers, so it cannot be repeated: call model.eval()")
            results = call([new[o] if o in new else tape[o] for o in call.operands])
            for r, t in zip(call.results, results, strict=True):
                new.setdefault(r, t)
    return new


def for_each(function: Callable[..., Tensor], *stacked: Tensor, at_once: int) -> Tensor:
    """Map a function over the first axis of one or several tensors, and stack the results.

    Args:
        function: takes one element of each tensor, returns a tensor.
        stacked: the tensors.
        at_once: number of elements that ``torch.vmap`` computes together. If it fails, they are computed one by one.
    """
    out: Tensor | None = None
    for first in range(0, len(stacked[0]), at_once):
        chunk = [t[first : first + at_once] for t in stacked]
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="There is a performance drop")
                results = torch.vmap(function)(*chunk)
        except RuntimeError:
            results = torch.stack([function(*elements) for elements in zip(*chunk, strict=True)])
        if len(results) == len(stacked[0]):
            return results
        out = results.new_empty(len(stacked[0]), *results.shape[1:]) if out is None else out
        out[first : first + at_once] = results
    assert out is not None
    return out


def repeat_unit(tape: Tape, unit: Unit, changes: Mapping[int, Tensor]) -> list[Tensor]:
    """Return the exits of a unit, recomputed with some of the operands or results of its calls replaced."""
    new = recomputed(tape, (tape.calls[n] for n in unit.calls), changes)
    return [new[r] if r in new else tape[r] for r in unit.exits]


_SHAPED = frozenset(("nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive", "bincount"))


def decisions(tape: Tape, roots: Iterable[int]) -> list[Call]:
    """Return the calls through which values that depend on the roots may have become Python numbers or shapes. A replay
    uses the recorded numbers and shapes.

    Reading a tensor into Python, as ``tolist`` does, is not an ATen call, so every integer or boolean result that no
    later call uses counts as read.
    """
    depends, used, candidates = set(roots), set[int](), list[Call]()
    for call in tape.calls:
        used.update(call.operands)
        if any(o in depends for o in call.operands):
            depends.update(call.results)  # also integers and booleans: the model may decide by them
            if call.name in _SHAPED or not any(tape.dtypes[r].is_floating_point for r in call.results):
                candidates.append(call)
    return [call for call in candidates if call.name in _SHAPED or used.isdisjoint(call.results)]

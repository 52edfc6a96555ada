"""Walk over a tape: backward with the rules of a composite, forward, or again with some values replaced.

    flows = walk_back(program, tape, [(composite, {program.output: seed})], wanted=program.roots)
    found = walk_forward(program, {entry: shares}, [program.output], rule)
    logits, = replay(tape, {n: zeros}, [program.output])

A composite maps kinds of units to rules. A kind without a rule hands on its ordinary adjoint, so the empty composite
is the gradient.
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
from whyformer.tape.calls import Call
from whyformer.tape.program import Program
from whyformer.tape.samples import LeadingAxis, Samples
from whyformer.tape.state import bare
from whyformer.tape.units import Unit, needed_calls
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
    "repeat_unit",
    "replay",
    "walk_back",
    "walk_forward",
]

Flows = dict[int, Tensor]
Parts = list[tuple[int, Tensor]]

_ONE_BRANCH = {"product": "weighted sum", "gate": "scale", "activated gate": "scale", "add": "shift"}
_T = TypeVar("_T")


@dataclass(frozen=True)
class Rule:
    """What a unit hands to its entries.

    Attributes:
        hold: entries that are constants, by position; "statistics" for what a norm divides by.
        share: factor of each flow that is handed on.
        back: (walk, step, {exit: flow}) -> (value, flow) pairs. None for the ordinary adjoint.
        refuse: why no relevance may pass, as the end of a sentence. None if it may.
        name: what an audit prints; None if ``back`` always raises.
    """

    hold: tuple[int | str, ...] = ()
    share: float = 1.0
    back: Callable[[Walk, Step, Flows], Parts] | None = None
    refuse: str | None = None
    name: str | None = "adjoint"

    @property
    def title(self) -> str | None:
        """What an audit prints, with the factor; None if no relevance may pass."""
        if self.refuse is not None or self.name is None:
            return None
        return self.name if self.share == 1 else f"{self.name} × {self.share:g}"


@dataclass(frozen=True, eq=False)
class Composite:
    """Rules by kind of unit.

    Attributes:
        name: how it is called in results and errors.
        rules: kind -> rule.
        carrier: "multiplier" if relevance is value × flow, "relevance" if it is the flow itself.
    """

    name: str
    rules: Mapping[str, Rule]
    carrier: str = "multiplier"


GRADIENT = Composite("gradient", {})
HandedOn = Callable[[int, "Step", Flows, Parts], None]
_ORDINARY = Rule()


@dataclass(eq=False)
class Step:
    """A unit under a composite.

    Attributes:
        unit: the unit.
        rule: the composite's rule for it.
        carry: for each entry, whether it depends on a root otherwise than through what the composite holds constant.
        live: for each entry, whether something is handed to it: it carries, and a wanted value lies before it.
        visited: True if something is handed on, or a wanted value is its exit.
        wants: (call number, for each operand whether its flow is asked for) of each call.
    """

    unit: Unit
    rule: Rule
    carry: tuple[bool, ...]
    live: tuple[bool, ...]
    visited: bool
    wants: list[tuple[int, tuple[bool, ...]]]


@dataclass(frozen=True, eq=False)
class Walk:
    """What rules may read.

    Attributes:
        program: the units of the pass.
        tape: the pass, whose values are ``tape[n]``.
        samples: which elements of a value belong to which sample.
    """

    program: Program
    tape: Tape
    samples: Samples


def one_branch(kind: str) -> str:
    """Return the kind of a unit of two branches of which one is constant."""
    return _ONE_BRANCH.get(kind, kind)


def plan(program: Program, tape: Tape, composite: Composite, wanted: frozenset[int]) -> list[Step]:
    """Return what becomes of each unit on a walk to some values. With attention maps that are held constant, for one,
    the product of map and values has one branch."""
    key = composite, wanted
    known: list[Step] | None = program.plans.get(key)
    if known is not None:
        return known
    carry, live = ([n in start for n in range(len(program.carry))] for start in (set(program.roots), wanted))
    steps: list[Step] = []
    for unit in program.units:
        branches = tuple(carry[e] for e in unit.entries)
        kind = one_branch(unit.kind) if sum(branches) < 2 else unit.kind
        rule = composite.rules.get(kind, _ORDINARY)
        passed = [i not in rule.hold for i in range(len(unit.entries))]
        to = tuple(p and live[e] for p, e in zip(passed, unit.entries, strict=True))
        for r in unit.exits:
            carry[r] = carry[r] or any(p and b for p, b in zip(passed, branches, strict=True))
            live[r] = live[r] or any(to)
        visited = any(to) or any(r in wanted for r in unit.exits)
        wants = _wants(unit, tape, rule, to) if visited else []
        steps.append(Step(unit, rule, branches, to, visited, wants))
    return program.plans.put(key, steps)


def _wants(unit: Unit, tape: Tape, rule: Rule, to: tuple[bool, ...]) -> list[tuple[int, tuple[bool, ...]]]:
    if unit.places and len(unit.calls) == 1:
        number = unit.calls[0]
        asked = {p for p, live in zip(unit.places, to, strict=True) if live}
        return [(number, tuple(i in asked for i in range(len(tape.calls[number].operands))))]
    inner = {e for e, live in zip(unit.entries, to, strict=True) if live}
    held, wants = unit.statistics if "statistics" in rule.hold else frozenset[int](), []
    for number in unit.calls:
        call = tape.calls[number]
        want = tuple(o in inner for o in call.operands)
        inner.update(r for r in call.results if any(want) and r not in held and tape.floating(r))
        wants.append((number, want))
    return wants


def adjoint(walk: Walk, step: Step, flows: Flows) -> Parts:
    """The ordinary adjoint of a unit: that of each of its calls, in reverse."""
    tape, out = walk.tape, list[tuple[int, Tensor]]()
    entries = set(step.unit.entries)
    flows = dict(flows)
    for number, want in reversed(step.wants):
        call = tape.calls[number]
        arrived = [flows.pop(r, None) for r in call.results]
        if not any(want) or all(f is None for f in arrived):
            continue
        for o, flow in zip(call.operands, adjoint_of_call(call, tape, arrived, want), strict=False):
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
    wanted: Iterable[int] = (),
    samples: Samples | None = None,
    handed_on: HandedOn | None = None,
) -> list[Flows]:
    """Walk from the output to the roots, with several composites in lockstep.

    Args:
        program: the units of the pass.
        tape: the pass, or another one with the same signature.
        runs: (composite, {value: seed}) pairs. A seed has the shape of its value.
        at: value -> function that is called with the flow of each run (None if nothing arrives) when all of it has
            arrived there. The flow is let go of afterwards, so of many watched values one is in memory at a time.
        wanted: values whose flows are returned.
        samples: which elements of a value belong to which sample, for rules that share within each; None if the
            samples lie along the first axis of every value, as they do in the output.
        handed_on: called after each unit with (number of the run, step, what arrived at its exits, what it hands to its
            entries).

    Returns:
        For each run, {wanted value: flow}; zeros where nothing arrives.

    Raises:
        UnknownOperation: relevance arrives at a unit that the composite refuses.
        ModelError: relevance arrives at a call that has no derivative.
    """
    at, wanted = dict(at or {}), frozenset(wanted)
    walk = Walk(
        program, tape, samples or LeadingAxis(tape.shapes[program.output][0] if tape.shapes[program.output] else 1)
    )
    flows = [dict(seed) for _, seed in runs]
    arrivals = _Arrivals(tape, flows, wanted, at)
    targets = frozenset((*wanted, *at))
    plans = [plan(program, tape, composite, targets) for composite, _ in runs]
    with bare():
        for i in range(len(program.units) - 1, -1, -1):
            if not arrivals.left:
                break
            _visit(walk, program.units[i], [steps[i] for steps in plans], flows, arrivals, handed_on)
        for n in sorted(arrivals.left, reverse=True):
            arrivals.at(n)
    return arrivals.found


class _Arrivals:
    """What arrives at the wanted and the watched values, of each run."""

    def __init__(
        self, tape: Tape, flows: list[Flows], wanted: frozenset[int], watched: Mapping[int, Callable[..., None]]
    ) -> None:
        self.tape, self.flows, self.wanted, self.watched = tape, flows, wanted, watched
        self.left = {*wanted, *watched}
        self.found: list[Flows] = [{} for _ in flows]

    def at(self, n: int) -> None:
        """Note that all has arrived at a value."""
        self.left.discard(n)
        arrived = [f.get(n) for f in self.flows]
        if n in self.wanted:
            for kept, flow in zip(self.found, arrived, strict=True):
                kept[n] = _zeros(self.tape, n) if flow is None else flow
        if n in self.watched:
            self.watched[n](*arrived)


def _visit(
    walk: Walk,
    unit: Unit,
    steps: list[Step],
    flows: list[Flows],
    arrivals: _Arrivals,
    handed_on: HandedOn | None,
) -> None:
    """Hand on what has arrived at a unit's exits, under the composite of each run."""
    if any(step.visited for step in steps):
        for r in unit.exits:
            if r in arrivals.left:
                arrivals.at(r)
    for run, (step, arriving) in enumerate(zip(steps, flows, strict=True)):
        got = {r: arriving.pop(r) for r in unit.exits if r in arriving}
        if step.visited and got and any(step.live):
            parts = _hand_on(walk, step, got, arriving)
            if handed_on is not None:
                handed_on(run, step, got, parts)
    walk.tape.release(walk.tape.calls[n] for n in unit.calls)


def _hand_on(walk: Walk, step: Step, got: Flows, flows: Flows) -> Parts:
    rule, parts = step.rule, Parts()
    try:
        if rule.refuse is not None:
            if not any(bool(flow.any()) for flow in got.values()):
                return parts  # no relevance arrives
            raise UnknownOperation(f"relevance arrives at '{step.unit.name}', {rule.refuse}")
        found = (rule.back or adjoint)(walk, step, got)
    except UnknownOperation as error:
        error.call = step.unit.calls[-1]
        raise
    for value, flow in found:
        flow = flow if rule.share == 1 else flow * rule.share
        flows[value] = flows[value] + flow if value in flows else flow
        parts.append((value, flow))
    return parts


def _zeros(tape: Tape, n: int) -> Tensor:
    return torch.zeros(tape.shapes[n], dtype=tape.dtypes[n], device=tape.device(n))


# -- forward ---------------------------------------------------------------------------------------------------------
def walk_forward(
    program: Program,
    start: Mapping[int, _T],
    wanted: Collection[int],
    rule: Callable[[Unit, dict[int, _T]], dict[int, _T]],
    dropped: Collection[str] = (),
) -> dict[int, _T]:
    """Walk from some values to others and hand on what each has of the first.

    Args:
        program: the units of the pass.
        start: value -> what it has.
        wanted: values whose part is returned.
        rule: (unit, {entry: what it has}) -> {exit: what it has}. Called where an entry has something.
        dropped: kinds of units that hand on nothing.

    Returns:
        {wanted value: what it has}, without values that have nothing. What others have is let go of behind its last
        reader.
    """
    way, needed = list[Unit](), set(wanted)
    for unit in reversed(program.units):
        if unit.kind not in dropped and any(r in needed and r not in start for r in unit.exits):
            way.append(unit)
            needed.update(unit.entries)
    way.reverse()
    last = {e: i for i, unit in enumerate(way) for e in unit.entries}
    have = dict(start)
    with bare():
        for i, unit in enumerate(way):
            given = {e: have[e] for e in unit.entries if e in have}
            for e in given:
                if last[e] == i and e not in wanted:
                    del have[e]
            if given:
                have |= rule(unit, given)
    return {n: have[n] for n in wanted if n in have}


# -- the pass again --------------------------------------------------------------------------------------------------
def replay(tape: Tape, changes: Mapping[int, Tensor], wanted: Iterable[int]) -> list[Tensor]:
    """Return values of the same pass with some values replaced. Only what depends on the changes is computed.

    ``torch.vmap`` over this function makes a batch of interventions of one recording.

    Args:
        tape: a recorded pass.
        changes: number of a value -> what takes its place.
        wanted: numbers of the values to return.

    Raises:
        ModelError: the model made a Python number or a shape of a value that depends on the changes, so that the pass
            could take another way (see :func:`decisions`), or a call that depends on them draws random numbers.
    """
    wanted = list(wanted)
    last = max((tape.maker[w].number for w in wanted if w in tape.maker), default=-1)
    taken = [call for call in decisions(tape, changes) if call.number <= last]
    if taken:
        raise ModelError(
            f"the model decides by a value that depends on the change ('{taken[0].name}'), so the recorded pass "
            "cannot be repeated with it: run the model again with the change"
        )
    new: dict[int, Tensor] = dict(changes)
    with bare():
        for call in needed_calls(tape, wanted, ends=changes):
            if any(o in new for o in call.operands):
                if call.random:
                    raise ModelError(f"'{call.name}' draws random numbers, so it cannot be repeated: call model.eval()")
                made = call([new[o] if o in new else tape[o] for o in call.operands])
                for r, t in zip(call.results, made, strict=True):
                    new.setdefault(r, t)
        found = [new[w] if w in new else tape[w] for w in wanted]
    tape.release()
    return found


def for_each(function: Callable[..., Tensor], *stacked: Tensor, at_once: int) -> Tensor:
    """Return the stacked results of a function of the elements of some tensors along their first axis.

    Args:
        function: of one element of each tensor.
        stacked: the tensors.
        at_once: elements that are computed together by ``torch.vmap``. What it cannot run is computed one by one.
    """
    made: Tensor | None = None
    for first in range(0, len(stacked[0]), at_once):
        chunk = [t[first : first + at_once] for t in stacked]
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="There is a performance drop")
                some = torch.vmap(function)(*chunk)
        except RuntimeError:
            some = torch.stack([function(*one) for one in zip(*chunk, strict=True)])
        if len(some) == len(stacked[0]):
            return some
        made = some.new_empty(len(stacked[0]), *some.shape[1:]) if made is None else made
        made[first : first + at_once] = some
    assert made is not None
    return made


def repeat_unit(tape: Tape, unit: Unit, changes: Mapping[int, Tensor]) -> list[Tensor]:
    """Return the exits of a unit with some values that its calls read, or make, replaced."""
    now = dict(changes)
    for number in unit.calls:
        call = tape.calls[number]
        if all(r in changes for r in call.results):
            continue
        made = call([now[o] if o in now else tape[o] for o in call.operands])
        for r, t in zip(call.results, made, strict=True):
            now.setdefault(r, t)
    return [now[r] for r in unit.exits]


_SHAPED = frozenset(("nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive", "bincount"))


def decisions(tape: Tape, roots: Iterable[int]) -> list[Call]:
    """Return the calls by which something that depends on the roots became a Python number or a shape. Replays repeat
    the decisions of the recorded pass.

    Reading numbers off a tensor, as ``tolist`` does, is no call: an integer that no later call uses may have been read.
    """
    depends, used, found = set(roots), set[int](), list[Call]()
    for call in tape.calls:
        used.update(call.operands)
        if any(o in depends for o in call.operands):
            depends.update(call.results)  # integers and booleans too: they carry no gradient, but they decide
            if call.name in _SHAPED or not any(tape.dtypes[r].is_floating_point for r in call.results):
                found.append(call)
    return [call for call in found if call.name in _SHAPED or used.isdisjoint(call.results)]

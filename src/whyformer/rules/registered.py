"""What users say of operations of their own: :func:`register` for all calls, :func:`declared` for one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from whyformer.errors import InputError, unknown
from whyformer.rules.core import Call, Rule
from whyformer.tape.declared import LIKES, recorded_as
from whyformer.tape.walking import Composite, Parts, Step, Walk, adjoint, repeat_unit
from whyformer.tape.walking import Rule as TapeRule


@dataclass(frozen=True)
class Declared:
    """``like``: the name of an operation or of a kind of operations; or the rule itself."""

    like: str = ""
    rule: Rule | None = None


_always: dict[Any, Declared] = {}
_here: ContextVar[Mapping[Any, Declared] | None] = ContextVar("rules of this call", default=None)


def register(operation: Any, *, like: str | None = None, rule: Rule | None = None) -> None:
    """Say how relevance passes an operation that no composite knows, for every model and method from now on.

    Args:
        operation: its name (``"i0"``, ``"my_ns::op"`` of ``torch.library``), a torch function, a class
            of ``torch.autograd.Function``, or a class of ``nn.Module``, which then counts as one operation.
        like: the operation whose rule it gets in each composite ("gelu", "layer_norm", "linear", "softmax" ...), or a
            kind ("activation", "view", "selection", "linear"; ``whyformer.tape.declared.LIKES`` lists all); or
            "identity" (what arrives passes unchanged) or "adjoint" (its ordinary derivative, for composites of
            multipliers: LRP(AH), LRP(LN) ...; where relevance itself flows it stays refused).
            "linear" is a layer: where relevance flows its weights are read off what it makes of unit vectors, and the
            result is compared; weights of the model that cannot be read off so are refused.
            "layer_norm" and "rms_norm" are checked against the values, with the parameters that the operation is given.
        rule: instead of ``like``, a :class:`~whyformer.rules.core.Rule`: its ``relevance`` serves composites of
            relevance, its ``gradient`` or ``hold`` those of multipliers; where it has none for one, that refuses.

    Raises:
        InputError: neither or both of ``like`` and ``rule`` given, a ``like`` that does not exist, or an operation that
            torch makes of others.
    """
    _always[operation] = _declaration(operation, like, rule)


@contextlib.contextmanager
def declared(rules: Mapping[Any, str | Rule] | None) -> Iterator[None]:
    """The same for what is explained inside, in this thread: operation -> what it is like, or its rule."""
    made = {
        key: _declaration(key, None, value) if isinstance(value, Rule) else _declaration(key, value, None)
        for key, value in (rules or {}).items()
    }
    token = _here.set({**(_here.get() or {}), **made})
    try:
        yield
    finally:
        _here.reset(token)


def declarations() -> dict[Any, Declared]:
    """All that hold here and now; those of the call before those of :func:`register`."""
    return {**_always, **(_here.get() or {})}


def likes() -> dict[Any, str]:
    """What holds here and now, for a pass that is recorded: operation -> what it is like, or the kind under which
    :func:`with_own_rules` has the rule of a user's own."""
    return {recorded_as(key): said.like or _kind(said) for key, said in declarations().items()}


def with_own_rules(composite: Composite) -> Composite:
    """Return a composite with the rules of a user's own that hold here and now. The gradient has no rules."""
    own = {_kind(said): _on_tape(said.rule, composite) for said in declarations().values() if said.rule is not None}
    return replace(composite, rules={**composite.rules, **own}) if own and composite.rules else composite


def _kind(said: Declared) -> str:
    return f"rule {id(said.rule)}"


def _on_tape(rule: Rule, composite: Composite) -> TapeRule:
    """A rule of a user's own for a walk over a tape."""
    relevance = composite.carrier == "relevance"
    share = rule.relevance if relevance else rule.gradient
    if share is None and (relevance or not rule.hold):
        carried = "multipliers" if relevance else "relevance"
        return TapeRule(refuse=f"whose rule '{rule.name}' is for {carried} only: give it one for {composite.name} too")

    def back(walk: Walk, step: Step, flows: dict[int, Tensor]) -> Parts:
        tape, unit, (flow,) = walk.tape, step.unit, flows.values()
        if share is None:
            return adjoint(walk, step, flows)
        entries = unit.entries
        compute = lambda *values: repeat_unit(tape, unit, dict(zip(entries, values, strict=True)))[0]  # noqa: E731
        call = Call(
            tuple(tape[e] for e in entries),
            tape[unit.exit],
            step.live,
            compute,
            tuple(not carries for carries in step.carry),
        )
        parts = zip(entries, share(call, flow), step.live, strict=True)
        return [(e, part) for e, part, live in parts if live and part is not None]

    return TapeRule(rule.hold, rule.share, back, name=rule.name)


def _declaration(operation: Any, like: str | None, rule: Rule | None) -> Declared:
    if (like is None) == (rule is None) or not isinstance(like or "", str) or not isinstance(rule or Rule(""), Rule):
        raise InputError('an operation is declared by like="gelu" (an operation it is like) or by rule=Rule(...)')
    recorded_as(operation)
    if like and like not in LIKES:
        raise unknown(
            f"{operation!r} is declared to be like",
            like,
            LIKES,
            'Say an operation ("gelu", "linear" ...), a kind ("activation", "view" ...), "identity" or "adjoint"',
        )
    return Declared(like or "", rule)

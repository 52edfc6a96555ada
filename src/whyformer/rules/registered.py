"""Rules for custom operations: :func:`register` for the whole process, :func:`custom_rules` for a context."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from whyformer.errors import InputError, unknown
from whyformer.rules.core import Call, Rule
from whyformer.tape.custom_ops import LIKES, recorded_as
from whyformer.tape.walking import Composite, Flows, Parts, Step, Walk, adjoint, repeat_unit
from whyformer.tape.walking import Rule as TapeRule

# operation -> a similar operation or kind of operations, or a rule
_registered: dict[Any, str | Rule] = {}
_in_context: ContextVar[Mapping[Any, str | Rule] | None] = ContextVar("rules of this call", default=None)


def register(operation: Any, *, like: str | None = None, rule: Rule | None = None) -> None:
    """Register a propagation rule for a custom operation, for all models and methods in this process.

    Args:
        operation: a name (``"i0"``, or ``"my_ns::op"`` of ``torch.library``), a torch function, a class of
            ``torch.autograd.Function``, or a class of ``nn.Module``, which then counts as one operation.
        like: a similar operation, whose rule it gets in each composite ("gelu", "layer_norm", "linear", "softmax" ...),
            or a kind of operations ("activation", "view", "selection", "linear"; ``whyformer.tape.custom_ops.LIKES``
            lists all), or "identity" (flows pass unchanged), or "adjoint" (the ordinary derivative, for composites that
            propagate multipliers: LRP(AH), LRP(LN) ...; composites that propagate relevance still refuse it).
            "linear" is a layer: composites that propagate relevance determine its weights from its outputs for unit
            vectors and compare them with the values of the pass; they refuse a layer whose weights cannot be determined
            in this way. "layer_norm" and "rms_norm" are compared with the values of the pass, with the parameters that
            the operation gets.
        rule: instead of ``like``, a :class:`~whyformer.rules.core.Rule`. Composites that propagate relevance use its
            ``relevance``, those that propagate multipliers its ``gradient`` or ``constant``; they refuse it otherwise.

    Raises:
        InputError: neither or both of ``like`` and ``rule`` are passed, ``like`` does not exist, or torch decomposes
            the operation into others before it is recorded.
    """
    _registered[operation] = _checked(operation, like, rule)


@contextlib.contextmanager
def custom_rules(rules: Mapping[Any, str | Rule] | None) -> Iterator[None]:
    """Context manager with additional rules, in this thread.

    Args:
        rules: maps an operation to a similar one or to its rule, as in :func:`register`.
    """
    pairs = ((key, (None, value) if isinstance(value, Rule) else (value, None)) for key, value in (rules or {}).items())
    added = {key: _checked(key, like, rule) for key, (like, rule) in pairs}
    token = _in_context.set({**(_in_context.get() or {}), **added})
    try:
        yield
    finally:
        _in_context.reset(token)


def _rules_in_force() -> dict[Any, str | Rule]:
    """Return the custom rules in force; those of :func:`custom_rules` override those of :func:`register`."""
    return {**_registered, **(_in_context.get() or {})}


def likes() -> dict[Any, str]:
    """Return, for each operation with a rule in force, the similar operation, or the kind under which
    :func:`with_custom_rules` adds its custom rule."""
    rules = _rules_in_force().items()
    return {recorded_as(key): rule if isinstance(rule, str) else _kind(rule) for key, rule in rules}


def with_custom_rules(composite: Composite) -> Composite:
    """Return a composite with the custom rules in force added. The empty composite, the gradient, stays empty."""
    custom = {_kind(r): _on_tape(r, composite) for r in _rules_in_force().values() if isinstance(r, Rule)}
    return replace(composite, rules={**composite.rules, **custom}) if custom and composite.rules else composite


def _kind(rule: Rule) -> str:
    return f"rule {id(rule)}"


def _on_tape(rule: Rule, composite: Composite) -> TapeRule:
    """Convert a custom rule to a rule for walks over a tape."""
    relevance = composite.propagates == "relevance"
    propagate = rule.relevance if relevance else rule.gradient
    if propagate is None and (relevance or not rule.constant):
        carried = "multipliers" if relevance else "relevance"
        return TapeRule(
            refuse=f"whose rule '{rule.name}' is for {carried} only: give it a rule for {composite.name} too"
        )

    def back(walk: Walk, step: Step, flows: Flows) -> Parts:
        tape, unit, (flow,) = walk.tape, step.unit, flows.values()
        if propagate is None:
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
        parts = zip(entries, propagate(call, flow), step.live, strict=True)
        return [(e, part) for e, part, live in parts if live and part is not None]

    return TapeRule(rule.constant, rule.factor, back, name=rule.name)


def _checked(operation: Any, like: str | None, rule: Rule | None) -> str | Rule:
    """Return ``like`` or ``rule``, whichever was passed, after checking it."""
    if (like is None) == (rule is None) or not isinstance(like or "", str) or not isinstance(rule or Rule(""), Rule):
        raise InputError(
            'give either like="gelu" (a similar operation) or rule=whyformer.rules.Rule(...) for a custom operation'
        )
    recorded_as(operation)
    if rule is not None:
        return rule
    name = like or ""
    if name not in LIKES:
        raise unknown(
            f"{operation!r} cannot be registered as",
            name,
            LIKES,
            'Use an operation ("gelu", "linear" ...), a kind ("activation", "view" ...), "identity" or "adjoint"',
        )
    return name

"""What users say of operations of their own: :func:`register` for all calls, :func:`declared` for one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from whyformer.errors import InputError
from whyformer.rules.core import Rule


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
        operation: its name (``"cosine_similarity"``, ``"my_ns::op"`` of ``torch.library``), a torch function, a class
            of ``torch.autograd.Function``, or a class of ``nn.Module``, which then counts as one operation.
        like: the operation whose rule it gets in each composite ("gelu", "layer_norm", "linear", "softmax" ...), or a
            kind ("activation", "view", "selection", "linear"; ``whyformer.engine.operations`` lists all); or
            "identity" (what arrives passes unchanged) or "adjoint" (its ordinary derivative, for composites of
            multipliers: LRP(AH), LRP(LN) ...; where relevance itself flows it stays refused).
            "linear" is a layer: where relevance flows its weights are read off what it makes of unit vectors, and the
            result is compared; weights of the model that cannot be read off so are refused.
            "layer_norm" and "rms_norm" are checked against the values, with the parameters that the operation is given.
        rule: instead of ``like``, a :class:`~whyformer.rules.core.Rule`: its ``relevance`` serves composites of
            relevance, its ``gradient`` or ``hold`` those of multipliers; where it has none for one, that refuses.

    Raises:
        InputError: neither or both of ``like`` and ``rule`` given. A ``like`` that does not exist is told by the first
            explanation.
    """
    _always[operation] = _declaration(like, rule)


@contextlib.contextmanager
def declared(rules: Mapping[Any, str | Rule] | None) -> Iterator[None]:
    """The same for what is explained inside, in this thread: operation -> what it is like, or its rule."""
    made = {
        key: _declaration(None, value) if isinstance(value, Rule) else _declaration(value, None)
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


def _declaration(like: str | None, rule: Rule | None) -> Declared:
    if (like is None) == (rule is None) or not isinstance(like or "", str) or not isinstance(rule or Rule(""), Rule):
        raise InputError('an operation is declared by like="gelu" (an operation it is like) or by rule=Rule(...)')
    return Declared(like or "", rule)

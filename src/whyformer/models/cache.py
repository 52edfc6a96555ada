"""A cache of values that are measured once per model, such as its kind of output and its groups of blocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

from torch import nn

Value = TypeVar("Value")

# model -> (its modules when it was opened, the values); weak references, so that models can be freed
_MEASURED: WeakKeyDictionary[nn.Module, tuple[list[ref[nn.Module]], dict[Hashable, Any]]] = WeakKeyDictionary()


def refresh(model: nn.Module, modules: Sequence[nn.Module]) -> None:
    """Drop the values measured for a model if its modules have changed since."""
    entry = _MEASURED.get(model)
    if entry is None or [reference() for reference in entry[0]] != [*modules]:
        _MEASURED[model] = [ref(module) for module in modules], {}


def measured(model: nn.Module) -> dict[Hashable, Any]:
    """Return the values measured for a model, by key. A value must not refer to the model, which would never be freed.
    """
    if model not in _MEASURED:
        refresh(model, [*model.modules()])
    return _MEASURED[model][1]


def once(model: nn.Module, key: Hashable, measure: Callable[[], Value]) -> Value:
    """Return the stored value of a key; if there is none, measure and store it."""
    values = measured(model)
    if key not in values:
        values[key] = measure()
    return values[key]

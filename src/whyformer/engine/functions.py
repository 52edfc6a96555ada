"""Autograd functions in a recorded pass: what their forward computes goes by the rules, as if it stood in the model."""

from __future__ import annotations

import weakref
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from whyformer.engine.operations import is_in_place


@dataclass
class LookedInto:
    """What calls inside of autograd functions made.

    Autograd gives the result of a function the function's own node, even where only weights have a gradient; so each of
    these calls returns its values alone, and whoever reads these is given the result as the rules have it instead.

    Attributes:
        declared: classes that have a rule of their own, and keep their node.
        results: id of the values -> (them, the result), as long as they live.
    """

    declared: Container[type]
    results: dict[int, tuple[weakref.ref[Tensor], Tensor]] = field(default_factory=dict)

    def cut(self, name: str, result: Any) -> Any:
        """The values of a result, without its graph."""
        if type(result) in (list, tuple):
            return type(result)(self.cut(name, one) for one in result)
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        if is_in_place(name):  # its values share its memory
            known = (values() for values, made in self.results.values() if made is result)
            return next((values for values in known if values is not None), result)
        values = result.detach()
        self.stand_in(values, result)
        return values

    def stand_in(self, values: Tensor, result: Tensor) -> None:
        """Whoever reads these values is given the result."""
        results, number = self.results, id(values)
        results[number] = weakref.ref(values, lambda _: results.pop(number, None)), result

    def instead(self, values: Any) -> Any:
        """Arguments, with the results that they are the values of."""
        if isinstance(values, Tensor):
            known, result = self.results.get(id(values), (None, values))
            declared = getattr(values.grad_fn, "_forward_cls", None) in self.declared
            return values if known is None or known() is not values or declared else result
        if type(values) is dict:
            return {k: self.instead(v) for k, v in values.items()}
        return type(values)(self.instead(v) for v in values) if type(values) in (list, tuple) else values

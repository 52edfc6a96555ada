"""A region of the program in a recorded pass: its calls run as they are, and its exit gets the rule of what it computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from whyformer.engine.operations import Operation, is_in_place, operation
from whyformer.engine.readings import Reading, first, tensors
from whyformer.program.facts import Step

Traced = tuple[int, Callable[..., Any], tuple[Any, ...], dict[str, Any], Any, bool]


@dataclass(eq=False)
class RegionRun:
    """One pass through a region.

    Attributes:
        read: the tensor that its first call reads; entry: what enters, as the graph has it.
        calls: (number, function, arguments, result, whether it writes to its first argument), in order.
    """

    step: Step
    read: Tensor
    entry: Tensor
    calls: list[Traced] = field(default_factory=list)

    def note(self, number: int, name: str, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Keep one call."""
        self.calls.append((number, func, args, kwargs, result, is_in_place(name) or kwargs.get("inplace") is True))

    def compute(self, x: Tensor, after: int = -1) -> Tensor:
        """What the region makes of another input: its calls (those after one of them) once more."""
        start = next((made for number, *_, made, _ in self.calls if number == after), self.read)
        now: dict[int, Any] = {id(start): x}
        result: Any = x
        for number, func, args, kwargs, made, written in self.calls:
            if number <= after:
                continue
            given = _replaced(args, now)
            if written:
                given = (given[0].clone(), *given[1:])
            result = func(*given, **_replaced(kwargs, now))
            for old, new in zip(tensors((made,)), tensors((result,)), strict=True):
                now[id(old)] = new
            if written:
                now[id(args[0])] = given[0] if result is None else result
        return result

    def as_call(self, y: Tensor) -> tuple[Operation, Reading, tuple[Any, ...], dict[str, Any]]:
        """(row, reading, arguments by position, by name) of the one call that the region stands for."""
        region, x, compute = self.step.region, self.entry, _once(y, self.compute)
        if region.kind == "activation":
            return _ACTIVATION, Reading("activation", "activation", (x,), compute, {"by element": True}), (x,), {}
        row = operation(region.kind)
        if row.kind == "normalisation":
            info = self._norm()
            return row, Reading(region.kind, row.kind, (x,), compute, info), _as_norm(region.kind, x, info), {}
        return row, Reading(region.kind, row.kind, (x,), compute, {"axis": region.axis}), (x,), {"dim": region.axis}

    def _norm(self) -> dict[str, Any]:
        """What the rule of a norm reads: y = (x − c)·w·s + b, s what the norm divides by, as it did in this pass."""
        region, x = self.step.region, self.entry.detach()
        axis, (power, scale, eps) = region.axis, region.fit
        shape = [x.shape[axis] if i - x.dim() == axis else 1 for i in range(x.dim())]
        zeros = torch.zeros(shape, dtype=x.dtype, device=x.device)
        bias = self.compute(zeros, region.core) if region.core != self.step.leaves else None
        weight = zeros + 1 if bias is None else self.compute(zeros + 1, region.core) - bias
        wide = x if x.dtype == torch.float64 else x.float()
        c = wide - wide.mean(axis, keepdim=True) if region.kind == "layer_norm" else wide
        normed = next(made for number, *_, made, _ in self.calls if number == region.core).to(c.dtype)
        square = c.square().sum(axis, keepdim=True)
        deviation = (square / x.shape[axis]).sqrt()
        fitted = (scale * (deviation**power + eps)).clamp(min=torch.finfo(c.dtype).tiny) ** (-1 / power)
        clear = square > 1e-9 * square.max()
        seen = (c * normed).sum(axis, keepdim=True) / torch.where(clear, square, 1)
        return {
            "weight": weight.reshape(shape), "bias": bias, "inverse": torch.where(clear, seen, fitted),
            "axes": 1, "dims": (axis,), "centred": region.kind == "layer_norm",
            "as torch": (scale ** (-1 / power), eps if power == 2 else 0.0),
        }  # fmt: skip


_ACTIVATION = Operation("activation", "activation")


def _as_norm(kind: str, x: Tensor, info: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of the same norm as torch writes it, over the last axis."""
    scale, eps = info["as torch"]
    weight, bias = info["weight"].flatten() * scale, None if info["bias"] is None else info["bias"].flatten()
    width = (len(weight),)
    return (x, width, weight, bias, eps) if kind == "layer_norm" else (x, width, weight, eps)


def _once(value: Tensor, compute: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``value`` the first time (the pass's own result), ``compute`` ever after."""
    state = [value]

    def call(x: Tensor) -> Tensor:
        return state.pop() if state else compute(x)

    return call


def _replaced(values: Any, now: dict[int, Any]) -> Any:
    if isinstance(values, Tensor):
        return now.get(id(values), values.detach() if values.requires_grad else values)
    if isinstance(values, dict):
        return {k: _replaced(v, now) for k, v in values.items()}
    if isinstance(values, list | tuple) and type(values) in (list, tuple):
        return type(values)(_replaced(v, now) for v in values)
    return values

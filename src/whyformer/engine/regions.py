"""A region in a recorded pass: its calls run as they are, and its exit gets the rule of what the region computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from whyformer.engine.norms import MeasuredNorm
from whyformer.engine.operations import Operation, is_in_place, operation
from whyformer.engine.readings import Reading, tensors
from whyformer.program.facts import Step
from whyformer.program.regions import Region

Traced = tuple[int, Callable[..., Any], tuple[Any, ...], dict[str, Any], list[int], bool]


@dataclass(frozen=True)
class _Slot:
    """The place of a tensor that enters a region or is made in it."""

    number: int


@dataclass(eq=False)
class RegionRun:
    """One pass through a region.

    Attributes:
        entry: what enters, as the graph has it.
        native: whether its calls keep their ordinary adjoints.
        calls: (number, function, arguments, places of its results, whether it writes to its first argument), in order;
            what is made in the region is not kept.
        inner: while the region is open, what entered and what was made.
        normed: of a norm, what it gives before weight and bias.
    """

    step: Step
    entry: Tensor
    native: bool = False
    calls: list[Traced] = field(default_factory=list)
    inner: list[Tensor] = field(default_factory=list)
    normed: Tensor | None = None

    def note(self, number: int, name: str, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Keep one call."""
        written = is_in_place(name) or kwargs.get("inplace") is True
        slots = {id(t): _Slot(i) for i, t in enumerate(self.inner)}
        given, named = _replaced(args, slots), _replaced(kwargs, slots)
        made = []
        for tensor in tensors((args[0],) if written else (result,)):
            if id(tensor) not in slots:
                slots[id(tensor)] = _Slot(len(self.inner))
                self.inner.append(tensor)
            made.append(slots[id(tensor)].number)
        self.calls.append((number, func, given, named, made, written))
        region = self.step.region
        if number == region.core and "norm" in region.kind:
            self.normed = result if number == self.step.leaves else result.clone()

    def compute(self, x: Tensor, after: int = -1) -> Tensor:
        """What the region makes of another input: its calls (those after one of them) once more."""
        start = next((made[0] for number, *_, made, _ in self.calls if number == after), 0)
        now: dict[int, Any] = {start: x}
        result: Any = x
        for number, func, args, kwargs, made, written in self.calls:
            if number <= after:
                continue
            given = _filled(args, now)
            if written:
                given = (given[0].clone(), *given[1:])
            result = func(*given, **_filled(kwargs, now))
            results = [given[0] if result is None else result] if written else tensors((result,))
            now.update(zip(made, results, strict=True))
        return result

    def as_call(self, y: Tensor) -> tuple[Operation, Reading, Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """(row, reading, function, arguments by position, by name) of the one call that the region stands for."""
        region, x = self.step.region, self.entry
        self.inner.clear()
        if region.kind == "activation":
            reading = Reading("activation", "activation", (x,), _once(y, self.compute), {"by element": True})
            return kind_row(region.kind), reading, self.compute, (x,), {}
        row = kind_row(region.kind)
        if row.kind == "normalisation":
            info = self._norm()
            function = partial(_norm_of, region, info["weight"], info["bias"], info.pop("anchor"))
            self.normed = None
            reading = Reading(region.kind, row.kind, (x,), _once(y, function), info)
            return row, reading, function, _as_norm(region.kind, x, info), {}
        reading = Reading(region.kind, row.kind, (x,), _once(y, self.compute), {"axis": region.axis})
        return row, reading, self.compute, (x,), {"dim": region.axis}

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
        assert self.normed is not None
        normed = self.normed.to(c.dtype)
        square = c.square().sum(axis, keepdim=True)
        deviation = (square / x.shape[axis]).sqrt()
        fitted = (scale * (deviation**power + eps)).clamp(min=torch.finfo(c.dtype).tiny) ** (-1 / power)
        clear = square > 1e-9 * square.max()
        seen = (c * normed).sum(axis, keepdim=True) / torch.where(clear, square, 1)
        return {
            "weight": weight.reshape(shape), "bias": bias, "inverse": (inverse := torch.where(clear, seen, fitted)),
            "anchor": (deviation, inverse),
            "axes": 1, "dims": (axis,), "centred": region.kind == "layer_norm",
            "as torch": (scale ** (-1 / power), eps if power == 2 else 0.0),
        }  # fmt: skip


def norm_of_values(region: Region, x: Tensor, y: Tensor) -> MeasuredNorm:
    """The norm that made y ``[..., D]`` of x: 1/σ from the fit, weight and bias from all rows."""
    power, scale, eps = region.fit
    x, y = (t.detach() if t.dtype == torch.float64 else t.detach().float() for t in (x, y))
    c = x - x.mean(-1, keepdim=True) if region.kind == "layer_norm" else x
    inverse = (scale * (c.square().mean(-1, keepdim=True) ** (power / 2) + eps)) ** (-1 / power)
    given, made = (c * inverse).flatten(0, -2), y.flatten(0, -2)
    spread = given - given.mean(0)
    weight = (spread * made).sum(0) / spread.square().sum(0)
    return MeasuredNorm(weight, (made - given * weight).mean(0), inverse, region.kind == "layer_norm")


def kind_row(kind: str) -> Operation:
    """The row of what a region computes."""
    return Operation("activation", "activation") if kind == "activation" else operation(kind)


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


def _norm_of(region: Region, weight: Tensor, bias: Tensor | None, anchor: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
    """The norm of another input x′: s(x′)⁻ᵖ = s⁻ᵖ + k(σ(x′)ᵖ − σᵖ), from σ and s as they were in the pass."""
    power, scale, _ = region.fit
    deviation, inverse = anchor
    c = x.to(inverse.dtype)
    c = c - c.mean(region.axis, keepdim=True) if region.kind == "layer_norm" else c
    square = c.square().mean(region.axis, keepdim=True)
    new, old = (square, deviation.square()) if power == 2 else (square.sqrt(), deviation)
    y = c * (inverse**-power + scale * (new - old)) ** (-1 / power) * weight
    return (y if bias is None else y + bias).to(x.dtype)


def _replaced(values: Any, slots: Mapping[int, _Slot]) -> Any:
    """Arguments with places where tensors of the region stood, and constants detached."""
    if isinstance(values, Tensor):
        return slots.get(id(values)) or (values.detach() if values.requires_grad else values)
    return _each(values, lambda v: _replaced(v, slots))


def _filled(values: Any, now: Mapping[int, Any]) -> Any:
    """Arguments with tensors in their places."""
    return now[values.number] if isinstance(values, _Slot) else _each(values, lambda v: _filled(v, now))


def _each(values: Any, function: Callable[[Any], Any]) -> Any:
    if type(values) is dict:
        return {k: function(v) for k, v in values.items()}
    return type(values)(function(v) for v in values) if type(values) in (list, tuple) else values

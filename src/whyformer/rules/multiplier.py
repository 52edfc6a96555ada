"""Rules of the multiplier carrier: plain functions with an ordinary forward and a changed slope (R = x ⊙ m)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Scaled(torch.autograd.Function):
    """Any value with the backward m_in = m_out ⊙ slope."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        return value.detach()  # no view, so that it may be changed in place

    @staticmethod
    def backward(ctx: Any, *flows: Tensor) -> Any:
        (slope,) = ctx.saved_tensors
        return flows[0] * slope, None, None


def secant(compute: Callable[[Tensor], Tensor], x: Tensor, value: Tensor | None = None) -> Tensor:
    """g(x) with the slope g(x)/x of the secant through 0 instead of g'(x); at x = 0 its limit g'(0)."""
    with torch.no_grad():
        value = compute(x.detach()) if value is None else value
        small = x.abs() <= torch.finfo(x.dtype).tiny
        step = torch.full_like(x, torch.finfo(x.dtype).eps ** 0.5)
        near = (compute(step) - compute(-step)) / (2 * step) if bool(small.any()) else step
        slope = torch.where(small, near, value / torch.where(small, 1, x))
    return _Scaled.apply(x, value, slope)


class _DetachedNorm(torch.autograd.Function):
    """LayerNorm or RMSNorm whose denominator is a constant in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, value: Tensor, weight: Tensor | None, inverse: Tensor, axes: int, centred: bool
    ) -> Tensor:
        ctx.save_for_backward(weight, inverse)
        ctx.axes, ctx.centred = axes, centred
        return value.detach()  # no view, so that it may be changed in place

    @staticmethod
    def backward(ctx: Any, *flows: Tensor) -> Any:
        weight, inverse = ctx.saved_tensors
        flow = flows[0] if weight is None else flows[0] * weight
        if ctx.centred:
            flow = flow - flow.mean(tuple(range(-ctx.axes, 0)), keepdim=True)
        return flow * inverse, None, None, None, None, None


def detached_norm(
    x: Tensor, value: Tensor, weight: Tensor | None, eps: float, axes: int = 1, centred: bool = True
) -> Tensor:
    """LN rule of Ali et al. 2022: y = (x − mean) / [√(var + ε)].detach() · w + b; RMSNorm with ``centred=False``.

    Args:
        x, value: the input and the ordinary output of the normalisation.
        axes: number of trailing axes normalised over.
    """
    with torch.no_grad():
        dims = tuple(range(-axes, 0))
        base = x.detach()
        if centred:
            base = base - base.mean(dims, keepdim=True)
        inverse = (base.square().mean(dims, keepdim=True) + eps).rsqrt()
    return _DetachedNorm.apply(x, value, weight, inverse, axes, centred)

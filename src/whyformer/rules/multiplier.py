"""Rules of the multiplier carrier: an operation's value is its own, its slope another (R = x ⊙ m)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from whyformer.rules.core import Call, Grads, recomputed_gradient
from whyformer.rules.relevance.attention import warmer


def secant(call: Call, flow: Tensor) -> Grads:
    """The slope (g(x) − g(0))/x of the secant from 0 instead of g'(x); at x = 0 its limit g'(0). Where g has no value
    at 0 (a logarithm) it is g'(x)."""
    slope = call.info.get("slope")
    if slope is None:
        origin = _origin(call)
        if origin is None:
            return recomputed_gradient(call, flow)
        slope = _slope(call, origin)
        if not call.run.keep:
            return [slope.mul_(flow)]
        call.info["slope"] = slope  # for the backward passes that follow
    return [flow * slope]


def _origin(call: Call) -> Tensor | None:
    """g(0), None where there is none; one number unless g is another for each element."""
    (x,) = call.operands
    # not on a GPU, where to ask takes longer than to compute
    origin = call.compute(torch.zeros_like(x) if call.info.get("by element") else torch.zeros((), dtype=x.dtype))
    return origin if bool(origin.isfinite().all()) else None


def _slope(call: Call, origin: Tensor) -> Tensor:
    (x,), value = call.operands, call.output
    if value is None:
        raise ValueError("the secant rule reads the output")
    if bool(origin.any()):
        value = value - origin.to(value.device)
    tiny = torch.finfo(x.dtype).tiny
    size = x.abs()
    # as a rule: a fraction of the time that choosing by element takes, but on a GPU to ask takes longer
    if x.numel() and not x.is_cuda and bool(size.amin() > tiny):
        # into memory that is there: to get more takes longer than to divide
        return torch.div(value, x, out=size) if value.dtype == x.dtype and value.shape == x.shape else value / x
    small = size <= tiny
    slope = value / torch.where(small, 1, x)
    step = torch.full_like(x, torch.finfo(x.dtype).eps ** 0.5)
    return torch.where(small, (call.compute(step) - call.compute(-step)) / (2 * step), slope)


def detached_norm(call: Call, flow: Tensor) -> Grads:
    """LN rule of Ali et al. 2022: y = (x − mean) / [√(var + ε)].detach() · w + b; RMSNorm where not ``centred``.

    ``call.info``: weight, eps, axes (number of trailing axes normalised over; or ``dims``, which axes), centred.
    """
    info = call.info
    dims = info.get("dims") or tuple(range(-info["axes"], 0))
    inverse = info.get("inverse")
    if inverse is None:
        inverse = _inverse_deviation(call, dims)
        if call.run.keep:
            info["inverse"] = inverse  # for the backward passes that follow
    passed = flow * (1 if info["weight"] is None else info["weight"])  # a tensor of its own, written to below
    if info["centred"]:
        passed -= passed.mean(dims, keepdim=True)
    return [passed.mul_(inverse).to(flow.dtype)]


def _inverse_deviation(call: Call, dims: tuple[int, ...]) -> Tensor:
    (x,), info = call.operands, call.info
    if info["centred"]:
        x = x - x.mean(dims, keepdim=True)
    deviation = torch.linalg.vector_norm(x, dim=dims, keepdim=True) / math.prod(x.shape[d] for d in dims) ** 0.5
    return (deviation.square() + info["eps"]).rsqrt()


def softmax(call: Call, flow: Tensor, *, temperature: float) -> Grads:
    """Softmax's derivative with p_T = softmax(x / T) in the place of p: p_T ⊙ (g − Σ p_T g) (GIM, 2025).

    ``call.info``: axis.
    """
    (x,), axis = call.operands, call.info["axis"]
    if call.output is None:
        raise ValueError("the softmax rule reads the output")
    p = warmer(call.output, temperature, axis)
    return [(p * (flow - (p * flow).sum(axis, keepdim=True))).to(x.dtype)]

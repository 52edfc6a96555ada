"""Rules of the multiplier carrier: an operation's value is its own, its slope another (R = x ⊙ m)."""

from __future__ import annotations

import torch
from torch import Tensor

from whyformer.rules.core import Call, Grads


def secant(call: Call, flow: Tensor) -> Grads:
    """The slope g(x)/x of the secant through 0 instead of g'(x); at x = 0 its limit g'(0)."""
    (x,), value = call.operands, call.output
    if value is None:
        raise ValueError("the secant rule reads the output")
    small = x.abs() <= torch.finfo(x.dtype).tiny
    slope = value / torch.where(small, 1, x)
    if bool(small.any()):
        step = torch.full_like(x, torch.finfo(x.dtype).eps ** 0.5)
        slope = torch.where(small, (call.compute(step) - call.compute(-step)) / (2 * step), slope)
    return [flow * slope]


def detached_norm(call: Call, flow: Tensor) -> Grads:
    """LN rule of Ali et al. 2022: y = (x − mean) / [√(var + ε)].detach() · w + b; RMSNorm where not ``centred``.

    ``call.info``: weight, eps, axes (number of trailing axes normalised over), centred.
    """
    (x,), info = call.operands, call.info
    dims = tuple(range(-info["axes"], 0))
    if info["weight"] is not None:
        flow = flow * info["weight"]
    if info["centred"]:
        x, flow = (v - v.mean(dims, keepdim=True) for v in (x, flow))
    return [flow * (x.square().mean(dims, keepdim=True) + info["eps"]).rsqrt()]

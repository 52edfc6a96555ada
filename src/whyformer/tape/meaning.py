"""Whether rows of numbers were made by a softmax or by a norm."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["close", "is_norm", "is_softmax", "rows_along"]


def is_softmax(x: Tensor, y: Tensor, sink: bool) -> bool:
    """y = exp(x) / (Σ exp(x) + what goes to a sink), where elements of y that are 0 were masked."""
    total = y.sum(-1, keepdim=True)
    live = (total.isfinite() & (total > 1e-9))[:, 0]
    x, y, total = x[live], y[live], total[live]
    seen = y > 0
    if not len(x) or bool((y < 0).any()) or int(seen.sum(-1).max()) < 2:
        return False
    whole = close(total, torch.ones_like(total), 1e-5)
    sunk = sink and len(total) > 2 and float(total.max()) < 1 and float(total.std()) > 1e-3
    return (whole or sunk) and close(x.masked_fill(~seen, -math.inf).softmax(-1), y / total, 1e-4)


def is_norm(x: Tensor, plus: Tensor, minus: Tensor) -> bool:
    """f(x) = s c ⊙ w + b with c = x − mean x or x, and s⁻² = k (mean c² + ε) or s⁻¹ = k (√(mean c²) + ε).

    w and b are the same for all rows; b is the even part of f.
    """
    bias, odd = (plus + minus) / 2, (plus - minus) / 2
    if not bool(plus.isfinite().all()) or not close(bias - bias[:1], 0 * odd + odd.abs().max(), 1e-6, zero=True):
        return False
    for c in (x - x.mean(-1, keepdim=True), x)[x.shape[-1] < 3 :]:
        weight = odd[:1] / c[:1]
        s = (odd * c).sum(-1, keepdim=True) / (weight * c * c).sum(-1, keepdim=True)
        if bool(s.isfinite().all()) and close(s * c * weight, odd, 1e-3) and bool((s > 0).all()):
            size = c.square().mean(-1, keepdim=True)
            return _proportional(size, s**-2) or _proportional(size.sqrt(), 1 / s)
    return False


def _proportional(a: Tensor, b: Tensor) -> bool:
    """b = k (a + ε) with k > 0."""
    centred = a - a.mean()
    k = (centred * b).sum() / centred.square().sum()
    return bool((k > 0) & ((b.mean() + k * centred - b).abs() <= 1e-3 * b).all())


def close(a: Tensor, b: Tensor, tolerance: float, zero: bool = False) -> bool:
    """a = b, or a = 0 on the scale of b, up to a part of the largest element."""
    return bool(((a if zero else a - b).abs() <= tolerance * b.abs().max()).all())


def rows_along(t: Tensor, axes: tuple[int, ...]) -> Tensor:
    """``[rows, n]``, with what lies along the axes in a row."""
    last = tuple(range(-len(axes), 0))
    return t.movedim(axes, last).flatten(-len(axes)).reshape(-1, math.prod(t.shape[a] for a in axes))

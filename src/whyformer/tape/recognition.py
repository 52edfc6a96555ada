"""Test whether a function of rows is a softmax or a norm, from its values."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["close", "is_norm", "is_softmax", "rows_along"]


def is_softmax(x: Tensor, y: Tensor, sink: bool) -> bool:
    """Return True if y = exp(x) / Σ exp(x) for each row, where elements with y = 0 are masked. With ``sink``, the
    denominator may have a further term, the same for all rows."""
    total = y.sum(-1, keepdim=True)
    live = (total.isfinite() & (total > 1e-9))[:, 0]
    x, y, total = x[live], y[live], total[live]
    unmasked = y > 0
    if not len(x) or bool((y < 0).any()) or int(unmasked.sum(-1).max()) < 2:
        return False
    sums_to_one = close(total, torch.ones_like(total), 1e-5)
    has_sink = sink and len(total) > 2 and float(total.max()) < 1 and float(total.std()) > 1e-3
    return (sums_to_one or has_sink) and close(x.masked_fill(~unmasked, -math.inf).softmax(-1), y / total, 1e-4)


def is_norm(x: Tensor, plus: Tensor, minus: Tensor) -> bool:
    """Return True if f(x) = s c ⊙ w + b for each row, with c = x − mean x or c = x, and s⁻² = k (mean c² + ε) or
    s⁻¹ = k (√(mean c²) + ε), where w and b are the same for all rows.

    Args:
        x: ``[rows, n]``.
        plus, minus: f(x) and f(−x). b is the even part of f.
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
    """Return True if b = k (a + ε) with k > 0."""
    centred = a - a.mean()
    k = (centred * b).sum() / centred.square().sum()
    return bool((k > 0) & ((b.mean() + k * centred - b).abs() <= 1e-3 * b).all())


def close(a: Tensor, b: Tensor, tolerance: float, zero: bool = False) -> bool:
    """Return True if a = b, or with ``zero`` a = 0, up to ``tolerance`` times the largest |b|."""
    return bool(((a if zero else a - b).abs() <= tolerance * b.abs().max()).all())


def rows_along(t: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return ``[rows, n]``, with the elements along ``axes`` in each row."""
    last = tuple(range(-len(axes), 0))
    return t.movedim(axes, last).flatten(-len(axes)).reshape(-1, math.prod(t.shape[a] for a in axes))

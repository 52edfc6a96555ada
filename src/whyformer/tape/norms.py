"""Find the parameters of a norm from its input and output."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Norm", "nearest_norm"]

_ROUNDING = {torch.bfloat16: 2e-2, torch.float16: 4e-3}


@dataclass(frozen=True, eq=False)
class Norm:
    """y = (x − mean x) / √(mean (x − mean x)² + ε) ⊙ w + b over the last axis.

    Attributes:
        centred: False for an RMS norm, which does not subtract the mean.
        eps: ε.
        weight: w, or w − 1 if ``plus_one``; None for no weight.
        bias: b; None for no bias.
        plus_one: True if 1 is added to the weight, as in Gemma.
    """

    centred: bool
    eps: float
    weight: Tensor | None = None
    bias: Tensor | None = None
    plus_one: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        if self.centred:
            wide = wide - wide.mean(-1, keepdim=True)
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.weight is not None:
            y = y * (self.weight.to(y) + 1 if self.plus_one else self.weight)
        return (y if self.bias is None else y + self.bias).to(x.dtype)


def nearest_norm(parameters: Sequence[Tensor], epsilons: Sequence[float], x: Tensor, output: Tensor) -> Norm | None:
    """Return the norm that maps x to an output, up to the precision of its dtype; None if there is none.

    Args:
        parameters: candidates for its weight and bias.
        epsilons: candidates for its ε; if empty, 1e-6, 1e-5 and 1e-12.
        x: its input.
        output: its output.
    """
    if output.shape != x.shape or not x.numel():
        return None
    parameters = [p for p in parameters if p.is_floating_point()]
    parameters = [p for p in parameters if p.numel() == 1 or x.shape[x.dim() - p.dim() :] == p.shape]
    weights: list[tuple[Tensor | None, bool]] = [(None, False)]
    weights += [(p, plus_one) for plus_one in (False, True) for p in parameters]
    epsilons = list(epsilons) or [1e-6, 1e-5, 1e-12]
    part = (slice(0, 1),) * max(0, min(2, x.dim() - 2))  # on a few rows, most candidates fail for every ε
    matches: list[tuple[float, Norm]] = []
    for centred, (weight, plus_one), bias in itertools.product((False, True), weights, (None, *parameters)):
        if bias is weight and bias is not None:
            continue
        candidates = [Norm(centred, eps, weight, bias, plus_one) for eps in epsilons]
        if _distance(candidates[0](x[part]), output[part]) < 0.05:
            matches += [(_distance(norm(x), output), norm) for norm in candidates]
    least, best = min(matches, key=lambda pair: pair[0], default=(1.0, None))
    return best if least <= _ROUNDING.get(output.dtype, 1e-5) else None


def _distance(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of two tensors, relative to |b| at the same element plus the largest |b|."""
    size = b.abs()
    return float(((a - b).abs() / (size + size.amax()).clamp(min=torch.finfo(b.dtype).tiny)).amax())

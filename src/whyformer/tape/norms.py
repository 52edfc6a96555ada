"""Find the parameters of a norm from its input and output."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

__all__ = ["Norm", "distance", "nearest", "nearest_norm", "norms"]

_ROUNDING = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
F = TypeVar("F", bound=Callable[[Tensor], Tensor])


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

    @property
    def scale(self) -> Tensor | None:
        """w."""
        if self.weight is None or not self.plus_one:
            return self.weight
        return 1 + (self.weight if self.weight.dtype == torch.float64 else self.weight.float())

    def __call__(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        if self.centred:
            wide = wide - wide.mean(-1, keepdim=True)
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        scale = self.scale
        y = y if scale is None else y * scale
        return (y if self.bias is None else y + self.bias).to(x.dtype)


def distance(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of two tensors, relative to |b| at the same element plus the largest |b|."""
    size = b.abs()
    return float(((a - b).abs() / (size + size.amax()).clamp(min=torch.finfo(b.dtype).tiny)).amax())


def nearest(candidates: Iterable[F], x: Tensor, output: Tensor) -> F | None:
    """Return the function that maps x to an output, up to the precision of its dtype; None if none does."""
    distances = [(distance(c(x), output), c) for c in candidates]
    least, best = min(distances, key=lambda pair: pair[0], default=(1.0, None))
    return best if least <= _ROUNDING.get(output.dtype, 1e-5) else None


def nearest_norm(parameters: Sequence[Tensor], epsilons: Sequence[float], x: Tensor, output: Tensor) -> Norm | None:
    """Return the norm that maps x to an output; None if there is none.

    Args:
        parameters: candidates for its weight and bias.
        epsilons: candidates for its ε; if empty, 1e-6, 1e-5 and 1e-12.
        x: its input.
        output: its output.
    """
    if output.shape != x.shape or not x.numel():
        return None
    return nearest(norms(parameters, epsilons, x, output), x, output)


def norms(parameters: Sequence[Tensor], epsilons: Sequence[float], x: Tensor, output: Tensor) -> Iterator[Norm]:
    """Yield candidates for :func:`nearest_norm`: norms whose output for a few rows is close to ``output``."""
    weights, biases = _parameters(parameters, x)
    epsilons = list(epsilons) or [1e-6, 1e-5, 1e-12]
    part = (slice(0, 1),) * max(0, min(2, x.dim() - 2))  # on a few rows, most candidates fail for every ε
    for centred, (weight, plus_one), bias in itertools.product((False, True), weights, biases):
        if bias is weight and bias is not None:
            continue
        if distance(Norm(centred, epsilons[0], weight, bias, plus_one)(x[part]), output[part]) < 0.05:
            yield from (Norm(centred, eps, weight, bias, plus_one) for eps in epsilons)


def _parameters(
    parameters: Sequence[Tensor], x: Tensor
) -> tuple[list[tuple[Tensor | None, bool]], list[Tensor | None]]:
    """Return the candidates (weight, whether 1 is added to it), and the candidates for the bias, of a norm of x."""
    parameters = [p for p in parameters if p.is_floating_point()]
    parameters = [p for p in parameters if p.numel() == 1 or x.shape[x.dim() - p.dim() :] == p.shape]
    return [(None, False), *((p, plus) for plus in (False, True) for p in parameters)], [None, *parameters]

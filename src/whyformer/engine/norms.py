"""Normalisations, known by what they compute."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from whyformer.engine.operations import operation
from whyformer.engine.readings import bind, norm


@dataclass(frozen=True)
class Norm:
    """y = (x − mean) / √(mean (x − mean)² + ε) · weight + bias over the last axis; without the mean, RMSNorm."""

    centred: bool
    eps: float
    weight: Tensor | None
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        if self.centred:
            wide = wide - wide.mean(-1, keepdim=True)
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        y = y if self.weight is None else y * self.weight
        return (y if self.bias is None else y + self.bias).to(x.dtype)

    def info(self) -> dict[str, Any]:
        """What the rule of a norm reads."""
        return {"weight": self.weight, "eps": self.eps, "axes": 1, "centred": self.centred}


@dataclass
class MeasuredNorm:
    """A LayerNorm or RMSNorm of rows, (x − mean x, or x) ⊙ γ / σ + β, as it was in the pass.

    Attributes:
        weight: γ ``[D]``; bias: β ``[D]`` or None.
        inverse: 1/σ_i ``[B, N, 1]``.
        centred: whether the mean is taken off.
    """

    weight: Tensor
    bias: Tensor | None
    inverse: Tensor
    centred: bool

    @classmethod
    def of_call(cls, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> MeasuredNorm:
        """That of a call of ``layer_norm`` or ``rms_norm``."""
        info = norm(operation(name), bind, args, kwargs).info
        x, weight = args[0].detach(), info["weight"]
        centred = x - x.mean(-1, keepdim=True) if info["centred"] else x
        inverse = (centred.square().mean(-1, keepdim=True) + info["eps"]).rsqrt()
        bias = bind("input normalized_shape weight bias", args, kwargs).get("bias") if info["centred"] else None
        weight = torch.ones_like(result[0, 0]) if weight is None else weight.detach()
        return cls(weight, None if bias is None else bias.detach(), inverse, info["centred"])

    def of_part(self, part: Tensor) -> Tensor:
        """What it does to one part of a sum but for the division by σ."""
        return (part - part.mean(-1, keepdim=True) if self.centred else part) * self.weight

    def turn(self, turned: Callable[[Tensor], Tensor], move: Callable[[Tensor], Tensor]) -> None:
        """Lay the rows out batch first, all on one device."""
        self.weight, self.bias = move(self.weight), None if self.bias is None else move(self.bias)
        self.inverse = move(turned(self.inverse))


_ROUNDING = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
F = TypeVar("F", bound=Callable[[Tensor], Tensor])


def nearest(candidates: Iterator[F] | Sequence[F], x: Tensor, output: Tensor) -> F | None:
    """The function that gives this output for x to the precision of its type, or None."""
    distances = [(distance(c(x), output), c) for c in candidates]
    least, best = min(distances, key=lambda pair: pair[0], default=(1.0, None))
    return best if least <= _ROUNDING.get(output.dtype, 1e-5) else None


def nearest_norm(own: Sequence[Tensor], epsilons: Sequence[float], x: Tensor, output: Tensor) -> Norm | None:
    """The :class:`Norm` with these parameters that gives this output."""
    if output.shape != x.shape or not x.numel():
        return None
    return nearest(norms(own, epsilons, x, output), x, output)


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference of two outputs, as a share of the value and of the largest one."""
    size = b.abs()
    return float(((a - b).abs() / (size + size.amax()).clamp(min=torch.finfo(b.dtype).tiny)).amax())


def norms(own: Sequence[Tensor], epsilons: Sequence[float], x: Tensor, output: Tensor) -> Iterator[Norm]:
    """Normalisations with one's own parameters: weight w, 1 + w (Gemma) or none, with and without a bias."""
    weights, biases = _parameters(own, x)
    epsilons = list(epsilons) or [1e-6, 1e-5, 1e-12]
    part = (slice(0, 1),) * max(0, min(2, x.dim() - 2))  # a few rows: most candidates fail on them, whatever ε is
    for centred, weight, bias in itertools.product((False, True), weights, biases):
        if bias is weight and bias is not None:
            continue
        if distance(Norm(centred, epsilons[0], weight, bias)(x[part]), output[part]) < 0.05:
            yield from (Norm(centred, eps, weight, bias) for eps in epsilons)


def _parameters(own: Sequence[Tensor], x: Tensor) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """What may be the weight (w, 1 + w or none) and the bias of a norm of x."""
    own = [p.detach() for p in own if p.is_floating_point()]
    own = [p for p in own if p.numel() == 1 or x.shape[x.dim() - p.dim() :] == p.shape]
    return [None, *own, *(1 + (p if p.dtype == torch.float64 else p.float()) for p in own)], [None, *own]

"""Normalisations, known by what they compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whyformer.engine.operations import operation
from whyformer.engine.readings import bind, norm


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

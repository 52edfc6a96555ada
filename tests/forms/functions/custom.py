"""Functions as classes of ``torch.autograd.Function`` with a custom derivative, and compiled by TorchScript."""

from __future__ import annotations

import math
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..base import Way


class Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return slope * s * (1 + x * (1 - s))


class Mish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.mul(torch.tanh(torch.nn.functional.softplus(x)))

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        t = torch.nn.functional.softplus(x).tanh()
        return slope * (t + x * torch.sigmoid(x) * (1 - t * t))


class Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        return slope * (0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * density)


class SquaredRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.clamp(min=0)
        ctx.save_for_backward(y)
        return y * y

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return 2 * slope * ctx.saved_tensors[0]


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, s: Tensor) -> Tensor:
        y = torch.softmax(s, -1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return y * (slope - (slope * y).sum(-1, keepdim=True))


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
        variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
        scale = (variance + eps).rsqrt()
        hat = (x - mean) * scale
        ctx.save_for_backward(hat, scale, w)
        return hat * w + b

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        hat, scale, w = ctx.saved_tensors
        g = slope * w
        into = scale * (g - g.mean(-1, keepdim=True) - hat * (g * hat).mean(-1, keepdim=True))
        return into, (slope * hat).sum((0, 1)), slope.sum((0, 1)), None


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, eps: float) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, scale, w)
        return x * scale * w

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, None]:
        x, scale, w = ctx.saved_tensors
        g = slope * w
        into = scale * g - x * scale**3 * (g * x).mean(-1, keepdim=True)
        return into, (slope * x * scale).sum((0, 1)), None


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t() + b

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return slope @ w, slope.flatten(0, -2).t() @ x.flatten(0, -2), slope.flatten(0, -2).sum(0)


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / 1.4142135623730951))


def silu(x: Tensor) -> Tensor:
    return x.mul(x.sigmoid())


@cache
def compiled(way: Way) -> Way:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(way)


ACTIVATIONS: dict[str, dict[str, Way]] = {
    "gelu": {"autograd function": Gelu.apply, "TorchScript": lambda x: compiled(gelu)(x)},
    "silu": {"autograd function": Silu.apply, "TorchScript": lambda x: compiled(silu)(x)},
    "mish": {"autograd function": Mish.apply},
    "squared relu": {"autograd function": SquaredRelu.apply},
}
NORMS: dict[str, dict[str, Way]] = {
    "LayerNorm": {"autograd function": LayerNorm.apply},
    "RMSNorm": {"autograd function": lambda x, w, b, eps: RMSNorm.apply(x, w, eps)},
}
SOFTMAX: dict[str, Way] = {"autograd function": Softmax.apply}
LINEAR: dict[str, Way] = {"autograd function": Linear.apply}

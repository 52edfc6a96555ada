"""Implementations of activations, x -> Tensor; the first one is the named function."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..base import Way

ROOT = math.sqrt(2 / math.pi)


def inner(x: Tensor) -> Tensor:
    """The argument of tanh in the approximate GELU."""
    return ROOT * (x + 0.044715 * torch.pow(x, 3.0))


def normal_cdf(x: Tensor) -> Tensor:
    return (1.0 + torch.erf(x / math.sqrt(2.0))) / 2.0


def gelu_of_tensors(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(torch.sqrt(torch.tensor(2.0 / torch.pi, dtype=x.dtype)) * (x + 0.044715 * torch.pow(x, 3))))


def gelu_in_place(x: Tensor) -> Tensor:
    y = x / math.sqrt(2.0)
    return y.erf_().add_(1.0).mul_(x).mul_(0.5)


def by_halves(way: Way) -> Way:
    """The function applied to two parts of the channels."""
    return lambda x: torch.cat([way(part) for part in x.chunk(2, dim=-1)], dim=-1)


GELU: dict[str, Way] = {
    "F.gelu": lambda x: F.gelu(x),
    "nn.GELU": nn.GELU(),
    "0.5 x (1 + erf)": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "x 0.5 (1 + erf)": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "erf of a constant factor": lambda x: 0.5 * x * (1.0 + torch.erf(x * 0.7071067811865475)),
    "cdf first": lambda x: 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))) * x,
    "cdf of a function": lambda x: x * normal_cdf(x),
    "Normal.cdf": lambda x: x * torch.distributions.Normal(0.0, 1.0, validate_args=False).cdf(x),
    "ndtr": lambda x: x * torch.special.ndtr(x),
    "erfc": lambda x: 0.5 * x * torch.erfc(-x / math.sqrt(2)),
    "special.erf": lambda x: x * (torch.special.erf(x / 2**0.5) * 0.5 + 0.5),
    "methods": lambda x: x.mul(x.div(math.sqrt(2.0)).erf().add(1.0)).mul(0.5),
    "root of a tensor": lambda x: 0.5 * x * (1 + torch.erf(x / torch.sqrt(torch.tensor(2.0, dtype=x.dtype)))),
    "sum of two": lambda x: 0.5 * x + 0.5 * x * torch.erf(x / math.sqrt(2)),
    "addcmul": lambda x: torch.addcmul(0.5 * x, 0.5 * x, torch.erf(x / math.sqrt(2))),
    "in place": gelu_in_place,
    "by halves": by_halves(F.gelu),
    "by halves, by hand": by_halves(lambda x: x * normal_cdf(x)),
    "flat": lambda x: F.gelu(x.flatten()).view_as(x),
    "transposed": lambda x: F.gelu(x.transpose(1, 2)).transpose(1, 2),
    "upcast": lambda x: F.gelu(x.double()).type_as(x),
    "token by token": lambda x: torch.stack([F.gelu(t) for t in x.unbind(1)], 1),
}

GELU_TANH: dict[str, Way] = {
    "F.gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "nn.GELU, tanh": nn.GELU(approximate="tanh"),
    "pow 3.0": lambda x: 0.5 * x * (1.0 + torch.tanh(inner(x))),
    "constants": lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608028654 * (1.0 + 0.044715 * x * x))),
    "x ** 3": lambda x: 0.5 * x * (1 + torch.tanh(ROOT * (x + 0.044715 * x**3))),
    "x * x * x": lambda x: x * 0.5 * (1 + torch.tanh(ROOT * (x + 0.044715 * x * x * x))),
    "cdf": lambda x: x * (0.5 * (1.0 + torch.tanh(inner(x)))),
    "cdf first": lambda x: 0.5 * (1.0 + torch.tanh(inner(x))) * x,
    "sigmoid of twice": lambda x: x * torch.sigmoid(2 * inner(x)),
    "x over 1 + exp": lambda x: x / (1 + torch.exp(-2 * inner(x))),
    "tensors": gelu_of_tensors,
    "addcmul": lambda x: torch.addcmul(0.5 * x, 0.5 * x, torch.tanh(torch.addcmul(ROOT * x, x.square(), x, value=ROOT * 0.044715))),
    "methods": lambda x: x.mul(0.5).mul(inner(x).tanh().add(1)),
    "sum of two": lambda x: 0.5 * x + 0.5 * x * inner(x).tanh(),
    "in place": lambda x: inner(x).tanh_().add_(1).mul_(x).mul_(0.5),
    "by halves": by_halves(lambda x: 0.5 * x * (1 + torch.tanh(inner(x)))),
    "exp of both": lambda x: x * (e := torch.exp(2 * inner(x))) / (e + 1),
}

QUICK_GELU: dict[str, Way] = {
    "x sigmoid": lambda x: x * torch.sigmoid(1.702 * x),
    "sigmoid x": lambda x: torch.sigmoid(x * 1.702) * x,
    "x over 1 + exp": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "F.silu": lambda x: F.silu(1.702 * x) / 1.702,
    "method": lambda x: x.mul((1.702 * x).sigmoid()),
    "tanh": lambda x: 0.5 * x * (1 + torch.tanh(0.851 * x)),
    "expit": lambda x: x * torch.special.expit(1.702 * x),
    "logsigmoid": lambda x: x * F.logsigmoid(1.702 * x).exp(),
    "parameter": lambda x: x * torch.sigmoid(torch.tensor([1.702], dtype=x.dtype) * x),
    "in place": lambda x: (1.702 * x).sigmoid_().mul_(x),
    "softmax of two": lambda x: x * torch.stack([1.702 * x, torch.zeros_like(x)]).softmax(0)[0],
    "F.glu": lambda x: F.glu(torch.cat([x, 1.702 * x], dim=-1), dim=-1),
    "by halves": by_halves(lambda x: x * torch.sigmoid(1.702 * x)),
}

SILU: dict[str, Way] = {
    "F.silu": lambda x: F.silu(x),
    "nn.SiLU": nn.SiLU(),
    "x sigmoid": lambda x: x * torch.sigmoid(x),
    "sigmoid x": lambda x: x.sigmoid() * x,
    "mul": lambda x: torch.mul(x, x.sigmoid()),
    "F.sigmoid": lambda x: x * F.sigmoid(x),
    "x over 1 + exp": lambda x: x / (1 + torch.exp(-x)),
    "x times 1 over 1 + exp": lambda x: x * (1.0 / (1.0 + (-x).exp())),
    "reciprocal": lambda x: x * torch.reciprocal(1 + torch.exp(-x)),
    "beta of 1": lambda x: x * torch.sigmoid(torch.ones(1, dtype=x.dtype) * x),
    "tanh": lambda x: 0.5 * x * (1 + torch.tanh(x / 2)),
    "expit": lambda x: x * torch.special.expit(x),
    "logsigmoid": lambda x: x * torch.exp(F.logsigmoid(x)),
    "exp of minus softplus": lambda x: x * torch.exp(-F.softplus(-x)),
    "F.glu": lambda x: F.glu(torch.cat([x, x], dim=-1), dim=-1),
    "in place": lambda x: x.sigmoid().mul_(x),
    "einsum": lambda x: torch.einsum("bnf,bnf->bnf", x, x.sigmoid()),
    "F.silu in place": lambda x: F.silu(x.clone(), inplace=True),
    "x e over 1 + e": lambda x: x * (e := x.exp()) / (1 + e),
}

MISH: dict[str, Way] = {
    "F.mish": lambda x: F.mish(x),
    "nn.Mish": nn.Mish(),
    "tanh softplus": lambda x: x * torch.tanh(F.softplus(x)),
    "tanh log 1 + exp": lambda x: x * torch.tanh(torch.log(1 + torch.exp(x))),
    "log1p": lambda x: x * x.exp().log1p().tanh(),
    "logaddexp": lambda x: x * torch.tanh(torch.logaddexp(x, torch.zeros_like(x))),
    "tanh first": lambda x: F.softplus(x).tanh() * x,
    "mul": lambda x: x.mul(F.softplus(x).tanh()),
    "rational in exp": lambda x: x * ((e := x.exp()) * e + 2 * e) / (e * e + 2 * e + 2),
    "square of 1 + e": lambda x: x * ((t := (1 + x.exp()).square()) - 1) / (t + 1),
    "minus logsigmoid": lambda x: x * torch.tanh(-F.logsigmoid(-x)),
    "in place": lambda x: F.softplus(x).tanh_().mul_(x),
    "softplus by max": lambda x: x * torch.tanh(x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))),
}


def masked_relu(x: Tensor) -> Tensor:
    y = x.clone()
    y[y < 0] = 0
    return y


RELU: dict[str, Way] = {
    "F.relu": lambda x: F.relu(x),
    "nn.ReLU": nn.ReLU(),
    "torch.relu": lambda x: torch.relu(x),
    "method": lambda x: x.relu(),
    "clamp": lambda x: x.clamp(min=0),
    "clamp_min": lambda x: torch.clamp_min(x, 0.0),
    "clip": lambda x: torch.clip(x, 0),
    "max with a tensor": lambda x: torch.max(x, torch.zeros_like(x)),
    "maximum": lambda x: torch.maximum(x, torch.zeros((), dtype=x.dtype)),
    "fmax": lambda x: torch.fmax(x, torch.zeros(1, dtype=x.dtype)),
    "where": lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
    "where with a number": lambda x: torch.where(x > 0, x, 0.0),
    "times mask": lambda x: x * (x > 0),
    "times cast mask": lambda x: x * (x > 0).to(x.dtype),
    "times heaviside": lambda x: x * torch.heaviside(x.detach(), torch.zeros(1, dtype=x.dtype)),
    "half of x + abs": lambda x: (x + x.abs()) / 2,
    "masked_fill": lambda x: x.masked_fill(x < 0, 0.0),
    "written into": masked_relu,
    "threshold": lambda x: F.threshold(x, 0.0, 0.0),
    "hardtanh": lambda x: F.hardtanh(x, 0.0, float("inf")),
    "leaky_relu of 0": lambda x: F.leaky_relu(x, 0.0),
    "in place": lambda x: F.relu(x, inplace=True),
    "relu_": lambda x: x.relu_(),
    "minus min": lambda x: x - torch.minimum(x, torch.zeros_like(x)),
    "largest of two": lambda x: torch.stack([x, torch.zeros_like(x)]).amax(0),
}

RELU2: dict[str, Way] = {
    "relu ** 2": lambda x: F.relu(x) ** 2,
    "square": lambda x: F.relu(x).square(),
    "torch.square": lambda x: torch.square(torch.relu(x)),
    "pow": lambda x: torch.pow(F.relu(x), 2),
    "pow of 2.0": lambda x: x.relu().pow(2.0),
    "times itself": lambda x: (r := F.relu(x)) * r,
    "two calls": lambda x: F.relu(x) * F.relu(x),
    "x relu": lambda x: x * F.relu(x),
    "clamp": lambda x: x.clamp(min=0).square(),
    "where": lambda x: torch.where(x > 0, x * x, torch.zeros_like(x)),
    "square times mask": lambda x: x.square() * (x > 0),
    "in place": lambda x: F.relu(x).pow_(2),
    "maximum": lambda x: torch.maximum(x, torch.zeros_like(x)).square(),
    "einsum": lambda x: torch.einsum("bnf,bnf->bnf", x, x.relu()),
}

SOFTPLUS: dict[str, Way] = {
    "F.softplus": lambda x: F.softplus(x),
    "nn.Softplus": nn.Softplus(),
    "log 1 + exp": lambda x: torch.log(1 + torch.exp(x)),
    "log1p": lambda x: torch.log1p(x.exp()),
    "logaddexp": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    "logaddexp of a number": lambda x: torch.logaddexp(torch.zeros((), dtype=x.dtype), x),
    "stable": lambda x: F.relu(x) + torch.log1p(torch.exp(-x.abs())),
    "stable, clamp": lambda x: x.clamp(min=0) + (-x.abs()).exp().log1p(),
    "minus logsigmoid": lambda x: -F.logsigmoid(-x),
    "minus log sigmoid": lambda x: -torch.log(torch.sigmoid(-x)),
    "logsumexp": lambda x: torch.stack([x, torch.zeros_like(x)], -1).logsumexp(-1),
    "x minus logsigmoid": lambda x: x - F.logsigmoid(x),
    "in place": lambda x: x.exp().add_(1).log_(),
}

TANH: dict[str, Way] = {
    "torch.tanh": lambda x: torch.tanh(x),
    "nn.Tanh": nn.Tanh(),
    "method": lambda x: x.tanh(),
    "F.tanh": lambda x: F.tanh(x),
    "sigmoid": lambda x: 2 * torch.sigmoid(2 * x) - 1,
    "exps": lambda x: ((e := x.exp()) - (f := (-x).exp())) / (e + f),
    "exp of -2x": lambda x: (1 - torch.exp(-2 * x)) / (1 + torch.exp(-2 * x)),
    "exp of 2x": lambda x: 1 - 2 / (torch.exp(2 * x) + 1),
    "expm1": lambda x: (e := torch.expm1(2 * x)) / (e + 2),
    "sinh over cosh": lambda x: torch.sinh(x) / torch.cosh(x),
    "in place": lambda x: x.tanh_(),
    "odd": lambda x: -torch.tanh(-x),
    "scaled there and back": lambda x: torch.tanh(x * 4.0 / 4.0),
}

SIGMOID: dict[str, Way] = {
    "torch.sigmoid": lambda x: torch.sigmoid(x),
    "nn.Sigmoid": nn.Sigmoid(),
    "method": lambda x: x.sigmoid(),
    "1 over 1 + exp": lambda x: 1 / (1 + torch.exp(-x)),
    "reciprocal": lambda x: (1 + (-x).exp()).reciprocal(),
    "e over 1 + e": lambda x: (e := x.exp()) / (e + 1),
    "tanh": lambda x: 0.5 * (1 + torch.tanh(0.5 * x)),
    "expit": lambda x: torch.special.expit(x),
    "exp of logsigmoid": lambda x: F.logsigmoid(x).exp(),
    "exp of minus softplus": lambda x: torch.exp(-F.softplus(-x)),
    "one minus": lambda x: 1 - torch.sigmoid(-x),
    "softmax of two": lambda x: torch.stack([x, torch.zeros_like(x)], -1).softmax(-1)[..., 0],
    "in place": lambda x: x.sigmoid_(),
}

ELU: dict[str, Way] = {
    "F.elu": lambda x: F.elu(x),
    "nn.ELU": nn.ELU(),
    "where, exp - 1": lambda x: torch.where(x > 0, x, torch.exp(x) - 1),
    "where, expm1": lambda x: torch.where(x > 0, x, x.expm1()),
    "relu and clamp": lambda x: F.relu(x) + torch.clamp(x, max=0).expm1(),
    "relu and min": lambda x: F.relu(x) + torch.minimum(x.exp() - 1, torch.zeros_like(x)),
    "maximum": lambda x: x.clamp(min=0) - F.relu(1 - x.exp()),
    "F.celu": lambda x: F.celu(x),
    "masks": lambda x: (x > 0) * x + (x <= 0) * (x.exp() - 1),
    "cast masks": lambda x: x * (m := (x > 0).to(x.dtype)) + (x.clamp(max=0).exp() - 1) * (1 - m),
    "in place": lambda x: F.elu(x, inplace=True),
    "torch.selu, scaled": lambda x: torch.where(x > 0, F.selu(x) / 1.0507009873554805, x.expm1()),
}

HARDSWISH: dict[str, Way] = {
    "F.hardswish": lambda x: F.hardswish(x),
    "nn.Hardswish": nn.Hardswish(),
    "relu6": lambda x: x * F.relu6(x + 3) / 6,
    "relu6 first": lambda x: F.relu6(x + 3.0).div(6.0).mul(x),
    "clamp": lambda x: x * torch.clamp(x + 3, 0, 6) / 6,
    "clamp of a fraction": lambda x: x * (x / 6 + 0.5).clamp(0, 1),
    "hardsigmoid": lambda x: x * F.hardsigmoid(x),
    "hardtanh": lambda x: x * F.hardtanh(x + 3, 0.0, 6.0) / 6.0,
    "min and max": lambda x: x * torch.minimum(torch.maximum(x + 3, torch.zeros_like(x)), torch.full_like(x, 6.0)) / 6,
    "two relus": lambda x: x * (F.relu(x + 3) - F.relu(x - 3)) / 6,
    "where": lambda x: torch.where(x <= -3, torch.zeros_like(x), torch.where(x >= 3, x, x * (x + 3) / 6)),
    "in place": lambda x: F.relu6(x + 3).mul_(x).div_(6),
}

LEAKY: dict[str, Way] = {
    "F.leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "nn.LeakyReLU": nn.LeakyReLU(0.1),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "max": lambda x: torch.max(x, 0.1 * x),
    "maximum": lambda x: torch.maximum(0.1 * x, x),
    "two relus": lambda x: F.relu(x) - 0.1 * F.relu(-x),
    "clamps": lambda x: x.clamp(min=0) + 0.1 * x.clamp(max=0),
    "prelu": lambda x: F.prelu(x, torch.tensor([0.1], dtype=x.dtype)),
    "abs": lambda x: 0.55 * x + 0.45 * x.abs(),
    "masks": lambda x: x * (x > 0) + 0.1 * x * (x <= 0),
    "slope": lambda x: x * torch.where(x > 0, torch.ones_like(x), torch.full_like(x, 0.1)),
    "in place": lambda x: F.leaky_relu(x, 0.1, inplace=True),
}

ACTIVATIONS: dict[str, dict[str, Way]] = {
    "gelu": GELU,
    "gelu tanh": GELU_TANH,
    "quick gelu": QUICK_GELU,
    "silu": SILU,
    "mish": MISH,
    "relu": RELU,
    "squared relu": RELU2,
    "softplus": SOFTPLUS,
    "tanh": TANH,
    "sigmoid": SIGMOID,
    "elu": ELU,
    "hardswish": HARDSWISH,
    "leaky relu": LEAKY,
}

# classes with neutral or misleading names: (class, function, way)
CLASSES: list[tuple[str, str, str]] = [
    ("NewGELU", "gelu tanh", "pow 3.0"),
    ("GELU", "gelu tanh", "x * x * x"),
    ("FastGELU", "gelu tanh", "constants"),
    ("Gelu", "gelu", "x 0.5 (1 + erf)"),
    ("SiLU", "gelu", "cdf first"),
    ("QuickGELU", "quick gelu", "x sigmoid"),
    ("Swish", "quick gelu", "sigmoid x"),
    ("Swish", "silu", "x sigmoid"),
    ("GELU", "silu", "x over 1 + exp"),
    ("Mish", "mish", "tanh log 1 + exp"),
    ("ReLU", "mish", "tanh softplus"),
    ("SquaredReLU", "squared relu", "relu ** 2"),
    ("ReLUSquared", "squared relu", "pow"),
    ("LayerNorm", "relu", "clamp"),
    ("Softmax", "sigmoid", "1 over 1 + exp"),
    ("Dropout", "tanh", "exps"),
    ("Identity", "hardswish", "relu6"),
    ("HSwish", "hardswish", "clamp"),
    ("Attention", "elu", "where, exp - 1"),
]

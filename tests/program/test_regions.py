"""Parts of a program are known by what they compute."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from whyformer.program.regions import Region, regions

from .test_record import read

D = 6
X = torch.randn(2, 5, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
W = torch.linspace(0.5, 1.5, D, dtype=torch.float64)

SOFTMAX: dict[str, Callable[[Tensor], Tensor]] = {
    "exp over its sum": lambda x: (e := x.exp()) / e.sum(-1, keepdim=True),
    "largest taken off": lambda x: (e := (x - x.amax(-1, keepdim=True)).exp()) / e.sum(-1, keepdim=True),
    "exp of log_softmax": lambda x: x.log_softmax(-1).exp(),
    "logsumexp": lambda x: (x - x.logsumexp(-1, keepdim=True)).exp(),
    "powers of 2": lambda x: (e := torch.exp2(x * math.log2(math.e))) / e.sum(-1, keepdim=True),
    "softmin of the negative": lambda x: F.softmin(-x, -1),
    "p = 1": lambda x: F.normalize(x.exp(), p=1.0, dim=-1),
}
NORMS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "var": (
        "layer_norm",
        lambda x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt(),
    ),
    "E[x²] − E[x]²": (
        "layer_norm",
        lambda x: (x - (m := x.mean(-1, keepdim=True))) * ((x * x).mean(-1, keepdim=True) - m * m + 1e-5).rsqrt(),
    ),
    "deviation and ε": ("layer_norm", lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6)),
    "rsqrt": ("rms_norm", lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
    "length": ("rms_norm", lambda x: x / x.norm(dim=-1, keepdim=True)),
    "normalize": ("rms_norm", lambda x: F.normalize(x, dim=-1)),
    "exp of a logarithm": (
        "rms_norm",
        lambda x: x * torch.exp(-0.5 * torch.log(x.square().mean(-1, keepdim=True) + 1e-6)),
    ),
    "another axis": (
        "layer_norm",
        lambda x: (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt(),
    ),
}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "GELU": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "GELU by tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x.pow(3)))),
    "SiLU": lambda x: x / (1 + torch.exp(-x)),
    "mish": lambda x: x * torch.tanh(F.softplus(x)),
    "softplus": lambda x: torch.log(1 + torch.exp(x)),
}


def found(function: Callable[[Tensor], Tensor]) -> list[Region]:
    return regions(read(lambda m, x: function(x.flip(-1)).flip(-1), X))


@pytest.mark.parametrize("name", SOFTMAX)
def test_softmax(name: str) -> None:
    (region,) = found(SOFTMAX[name])
    assert (region.kind, region.axis) == ("softmax", -1)


def test_a_mask_stays_outside() -> None:
    """What is added to the scores is a sum of its own, as where softmax is called by name."""
    mask = torch.zeros(5, D, dtype=torch.float64).masked_fill(torch.ones(5, D).triu(1) > 0, -torch.inf)
    program = read(lambda m, x: (e := (x + mask).exp()) / e.sum(-1, keepdim=True), X)
    (region,) = regions(program)
    maker = program.maker(region.entry)
    assert maker is not None
    assert maker.name == "add"


@pytest.mark.parametrize("name", NORMS)
def test_norms(name: str) -> None:
    kind, function = NORMS[name]
    (region,) = found(function)
    assert region.kind == kind
    assert region.axis == (-2 if name == "another axis" else -1)


def test_a_weight_and_a_bias_belong_to_the_norm() -> None:
    program = read(lambda m, x: (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)) * W + 1 - W, X)
    (region,) = regions(program)
    assert program.calls[region.core].name == "mul"
    assert region.core < region.calls[-1]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str) -> None:
    (region,) = found(ACTIVATIONS[name])
    assert region.kind == "activation"


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.softmax(x, -1),
        lambda x: F.layer_norm(x, (D,)),
        F.gelu,
        lambda x: x * 2 + 1,
        lambda x: x / x.square().mean(-1, keepdim=True),  # no root
        lambda x: x.exp() / x.exp().sum((-1, -2), keepdim=True),  # over two axes
        lambda x: x * x.flip(-1).sigmoid(),  # a gate
        lambda x: x - x.mean(-1, keepdim=True),
    ],
)
def test_what_is_none(function: Callable[[Tensor], Tensor]) -> None:
    assert not found(function)


def test_what_others_read_is_not_hidden() -> None:
    """Where a part of it is used elsewhere, each call goes by its own rule."""

    def function(x: Tensor) -> Tensor:
        e = x.exp()
        return e / e.sum(-1, keepdim=True) + e

    assert not [r for r in found(function) if r.kind == "softmax"]

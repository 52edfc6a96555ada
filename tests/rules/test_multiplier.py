"""Rules of the multiplier carrier: an ordinary value with a changed slope."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from whyformer.rules import multiplier
from whyformer.rules.core import Pass, Rule, Ruled

SECANT = Rule("secant", gradient=multiplier.secant, keep_output=True)
NORM = Rule("normalisation", gradient=multiplier.detached_norm)

ACTIVATIONS = {
    "gelu": functional.gelu,
    "gelu, tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "silu": functional.silu,
    "tanh": torch.tanh,
    "softplus shifted": lambda x: functional.softplus(x) - math.log(2),
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def secant(compute: Any, x: Tensor) -> Tensor:
    return Ruled.apply(SECANT, Pass(), compute, {}, x)


def detached_norm(x: Tensor, value: Tensor, weight: Tensor | None, eps: float, axes: int = 1, centred: bool = True) -> Tensor:
    info = {"weight": weight, "eps": eps, "axes": axes, "centred": centred}
    return Ruled.apply(NORM, Pass(), lambda x: value, info, x)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_secant(name: str) -> None:
    """Slope g(x)/x: x ⊙ m is conserved, element by element."""
    compute = ACTIVATIONS[name]
    x, flow = random(3, 7).requires_grad_(), random(3, 7, seed=1)
    value = secant(compute, x)
    assert torch.equal(value, compute(x))
    (got,) = torch.autograd.grad(value, x, flow)
    for m, f, point in zip(got.flatten(), flow.flatten(), x.detach().flatten(), strict=True):
        assert float(m) == pytest.approx(float(f * compute(point) / point))
    assert torch.allclose(got * x, flow * value)


@pytest.mark.parametrize(("name", "slope"), [("gelu", 0.5), ("silu", 0.5), ("tanh", 1.0), ("relu", 0.5)])
def test_secant_at_zero_is_its_limit(name: str, slope: float) -> None:
    """g'(0) for smooth g; for ReLU, which has none, the mean of the two."""
    x = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    (got,) = torch.autograd.grad(secant(ACTIVATIONS[name], x), x, torch.ones(4, dtype=torch.float64))
    assert torch.allclose(got, torch.full_like(got, slope), atol=1e-6)


def test_secant_keeps_a_given_value() -> None:
    """A region keeps the value that the model computed itself, to the last bit."""
    x = random(5).requires_grad_()
    given = functional.gelu(x.detach()) + 1e-9
    values = [given]
    value = secant(lambda x: values.pop() if values else functional.gelu(x), x)
    assert torch.equal(value, given)
    (got,) = torch.autograd.grad(value.sum(), x)
    assert torch.allclose(got, given / x)


@pytest.mark.parametrize("shape", [(5,), (2, 3, 5)])
@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("centred", [True, False])
def test_detached_norm(shape: tuple[int, ...], axes: int, affine: bool, centred: bool) -> None:
    """Autograd of the same formula with the denominator detached (LN rule, methods.md §2.2)."""
    if axes > len(shape):
        pytest.skip("fewer axes than that")
    x, weight = random(*shape).requires_grad_(), random(*shape[-axes:], seed=1) if affine else None
    dims, eps = tuple(range(-axes, 0)), 1e-5
    base = x - x.mean(dims, keepdim=True) if centred else x
    wanted = base / (base.square().mean(dims, keepdim=True) + eps).sqrt().detach()
    wanted = wanted if weight is None else wanted * weight
    if centred:
        plain = functional.layer_norm(x.detach(), shape[-axes:], weight, None, eps)
    else:
        plain = functional.rms_norm(x.detach(), shape[-axes:], weight, eps)
    value = detached_norm(x, plain, weight, eps, axes, centred)
    assert torch.equal(value, plain)
    assert torch.allclose(value, wanted)
    flow = random(*shape, seed=2)
    assert torch.allclose(torch.autograd.grad(value, x, flow)[0], torch.autograd.grad(wanted, x, flow)[0], atol=1e-12)


def test_detached_norm_by_hand() -> None:
    """x = (3, 1), ε = 0: mean 2, deviation 1, y = (1, −1). Flow (1, 0): (1, 0) − its mean 1/2, divided by 1: (1/2, −1/2).

    x ⊙ m = 3/2 − 1/2 = 1 = y₁, conserved, where the full gradient of LayerNorm is 0.
    """
    x = torch.tensor([3.0, 1.0], dtype=torch.float64, requires_grad=True)
    value = detached_norm(x, functional.layer_norm(x.detach(), (2,), eps=0), None, 0.0)
    (got,) = torch.autograd.grad(value, x, torch.tensor([1.0, 0.0], dtype=torch.float64))
    assert got.tolist() == [0.5, -0.5]
    (plain,) = torch.autograd.grad(functional.layer_norm(x, (2,), eps=0), x, torch.tensor([1.0, 0.0], dtype=torch.float64))
    assert plain.abs().max() < 1e-12


@pytest.mark.parametrize("rule", [SECANT, NORM])
def test_what_is_kept_for_the_passes_that_follow_is_that_of_the_first(rule: Rule) -> None:
    """A graph that is kept gives every backward pass what it gives the first, in whichever order they come."""
    x, run = random(3, 7).requires_grad_(), Pass(keep=True)
    info: dict[str, Any] = {"weight": None, "eps": 1e-5, "axes": 1, "centred": True} if rule is NORM else {}
    compute = (lambda v: functional.layer_norm(v, (7,))) if rule is NORM else functional.gelu
    value = Ruled.apply(rule, run, compute, info, x)
    flows = [random(3, 7, seed=i) for i in (1, 2)]
    wanted = [torch.autograd.grad(Ruled.apply(rule, Pass(), compute, dict(info), x), x, f)[0] for f in flows]
    for i in (0, 1, 0):
        (got,) = torch.autograd.grad(value, x, flows[i].clone(), retain_graph=True)
        assert torch.equal(got, wanted[i])

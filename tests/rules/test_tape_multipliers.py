"""Multiplier rules on a tape against the published form, which is autograd of a model with detached tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from whyformer.rules.multipliers import COMPOSITES, WITH_SECANTS
from whyformer.tape.caches import Recent
from whyformer.tape.program import read_program
from whyformer.tape.recording import record
from whyformer.tape.walking import Composite, Rule, walk_back

B, N, D, H = 2, 5, 8, 2
AH, LN, SECANT, HALVES, GATE, WARM = ["AH", "LN", "secant", "halves", "gate", "warm"]
TABLES: dict[str, Composite] = {**COMPOSITES, "ah_secant": WITH_SECANTS["ah"], "ln_secant": WITH_SECANTS["ln"]}  # type: ignore[dict-item]
PARTS: dict[str, tuple[str, ...]] = {
    "plain": (), "ah": (AH,), "ln": (LN,), "ah_ln": (AH, LN), "ah_secant": (AH, SECANT, HALVES), "ln_secant": (LN, SECANT, HALVES),
    "libra": (AH, LN, SECANT, HALVES), "attnlrp": (LN, SECANT, HALVES), "cp_lrp": (AH, LN, SECANT, HALVES, GATE),
    "gim": (LN, HALVES, WARM),
}  # fmt: skip


def half_gradient(t: Tensor) -> Tensor:
    """The same value with half the gradient."""
    return t / 2 + (t / 2).detach()


class WarmSoftmax(torch.autograd.Function):
    """softmax(x), with the derivative of softmax(x / 2) as if it were at temperature 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward((x / 2).softmax(-1))
        return x.softmax(-1)

    @staticmethod
    def backward(ctx: Any, *flows: Tensor) -> Tensor:
        (p,), (gradient,) = ctx.saved_tensors, flows
        return p * (gradient - (p * gradient).sum(-1, keepdim=True))


class DetachableModel(nn.Module):
    """An attention block with a gated MLP, plain or with the detached tensors that ``parts`` selects."""

    def __init__(self, norm: str = "layer", fused: bool = False, grouped: bool = False) -> None:
        super().__init__()
        make = lambda *shape: nn.Parameter(torch.randn(*shape, dtype=torch.float64) / shape[-1] ** 0.5)  # noqa: E731
        self.q, self.k, self.v, self.o, self.up, self.gate, self.down = (make(D, D) for _ in range(7))
        self.bias, self.gain, self.shift, self.head = make(D), nn.Parameter(1 + make(D).detach()), make(D), make(3, D)
        self.norm, self.fused, self.grouped = norm, fused, grouped

    def normed(self, x: Tensor, parts: tuple[str, ...]) -> Tensor:
        if not parts and self.norm == "layer":
            return F.layer_norm(x, (D,), self.gain, self.shift)
        c = x - x.mean(-1, keepdim=True) if self.norm == "layer" else x
        deviation = (c.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return c / (deviation.detach() if LN in parts else deviation) * self.gain + (self.shift if self.norm == "layer" else 0)

    def activated(self, x: Tensor, parts: tuple[str, ...]) -> Tensor:
        return x * (F.silu(x) / x).detach() if SECANT in parts else F.silu(x)

    def attention(self, x: Tensor, parts: tuple[str, ...]) -> Tensor:
        q, k, v = (F.linear(x, w).unflatten(-1, (H, -1)).transpose(1, 2) for w in (self.q, self.k, self.v))
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = q @ k.mT * (D // H) ** -0.5
        scores = (half_gradient(scores) if HALVES in parts and AH not in parts else scores).masked_fill(torch.ones(N, N).triu(1).bool(), -torch.inf)
        a = WarmSoftmax.apply(scores) if WARM in parts else scores.softmax(-1)
        mixed = a.detach() @ v if AH in parts else a @ v
        return half_gradient(mixed) if HALVES in parts and AH not in parts else mixed

    def forward(self, x: Tensor, parts: tuple[str, ...] = ()) -> Tensor:
        x = x + F.linear(self.attention(self.normed(x, parts), parts).transpose(1, 2).flatten(2), self.o, self.bias)
        h = self.normed(x, parts)
        gate, up = self.activated(F.linear(h, self.gate), parts), F.linear(h, self.up)
        product = gate.detach() * up if GATE in parts else gate * up
        x = x + F.linear(half_gradient(product) if HALVES in parts and GATE not in parts else product, self.down)
        return F.linear(self.normed(x, parts)[:, 0], self.head)


def multipliers(model: Any, x: Tensor, composite: str) -> Tensor:
    tape, out = record(model, x)
    end, root = tape.number(out), tape.number(x)
    program = read_program(tape, [root], end)
    return walk_back(program, tape, [(TABLES[composite], {end: torch.ones_like(out)})], observed=[root])[0][root]


@pytest.mark.part(times=2)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("composite", PARTS)
def test_composite_equals_autograd_of_detached_model(composite: str, norm: str, fused: bool) -> None:
    torch.manual_seed(0)
    plain = DetachableModel(norm, fused)
    reference = DetachableModel(norm)
    reference.load_state_dict(plain.state_dict())
    x = torch.randn(B, N, D, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(reference(leaf, PARTS[composite] or ("none",)).sum(), leaf)
    assert torch.allclose(multipliers(plain, x, composite), expected, atol=1e-10)


@pytest.mark.parametrize("composite", ["ah_ln", "libra", "cp_lrp"])
def test_relevance_is_conserved_without_biases(composite: str) -> None:
    torch.manual_seed(1)
    model = DetachableModel("rms")
    with torch.no_grad():
        model.bias.zero_()
    x = torch.randn(B, N, D, dtype=torch.float64)
    total = (x * multipliers(model, x, composite)).sum()
    if composite != "ah_ln":  # activations keep their derivative in ah_ln
        assert torch.allclose(total, model(x).sum(), atol=1e-9)


FUNCTIONS = {
    "gelu": F.gelu, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "softplus": F.softplus, "elu": F.elu, "erf": torch.erf,
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x), "square": torch.square,
}  # fmt: skip


@settings(max_examples=40)
@given(name=st.sampled_from(sorted(FUNCTIONS)), seed=st.integers(0, 1000), zeros=st.booleans())
def test_secant_multiplies_to_difference_from_origin(name: str, seed: int, zeros: bool) -> None:
    """m · x = g(x) − g(0), and no NaN at 0."""
    g = FUNCTIONS[name]
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    x[0, 0] = 0.0 if zeros else 1e-11
    result = multipliers(g, x, "libra")
    assert result.isfinite().all()
    assert torch.allclose(result * x, g(x) - g(torch.zeros_like(x)), atol=1e-9)
    assert torch.allclose(result[0, 0], torch.func.grad(g)(torch.zeros((), dtype=torch.float64)), atol=1e-5)


def test_input_dependent_scale_of_norm_has_gradient() -> None:
    x = torch.randn(B, N, D, dtype=torch.float64)

    def function(x: Tensor) -> Tensor:
        return F.layer_norm(x, (D,), x[0, 0].tanh())

    def detached(x: Tensor) -> Tensor:
        c = x - x.mean(-1, keepdim=True)
        return c / (c.square().mean(-1, keepdim=True) + 1e-5).sqrt().detach() * x[0, 0].tanh()

    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(detached(leaf).sum(), leaf)
    assert torch.allclose(multipliers(function, x, "ln"), expected, atol=1e-10)


def test_clamp_with_input_dependent_bounds_is_finite() -> None:
    x = torch.randn(B, N, D, dtype=torch.float64)
    result = multipliers(lambda x: torch.clamp(x, min=x.mean(1, keepdim=True)), x, "libra")
    assert result.isfinite().all()


def test_composites_with_same_name_keep_their_rules() -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    tape, out = record(torch.tanh, x)
    end, root = tape.number(out), tape.number(x)
    program, seed = read_program(tape, [root], end), {end: torch.ones_like(out)}
    constant, plain = Composite("mine", {"activation": Rule(constant=(0,))}), Composite("mine", {})
    assert not walk_back(program, tape, [(constant, seed)], observed=[root])[0][root].any()
    assert walk_back(program, tape, [(plain, seed)], observed=[root])[0][root].all()


def test_cache_evicts_least_recently_used() -> None:
    cache = Recent[str](2)
    cache.put("a", "first")
    cache.put("b", "second")
    assert cache.get("a") == "first"
    cache.put("c", "third")
    assert [cache.get(key) for key in "abc"] == ["first", None, "third"]

"""The same function written two ways gets the same attribution."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import whyformer
from walked import walked
from whyformer.rules.multipliers import COMPOSITES as MULTIPLIERS
from whyformer.rules.multipliers import WITH_SECANTS
from whyformer.rules.propagation import deep_taylor, layerwise
from zoo import build

COMPOSITES = {
    "deep Taylor": deep_taylor(),
    "layerwise": layerwise("epsilon"),
    "AH+LN": MULTIPLIERS["ah_ln"],
    "AH+LN, secant": WITH_SECANTS["ah_ln"],
}
WIDTH = 6


class Chain(nn.Module):
    """linear, the module in question, linear."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner, self.second = nn.Linear(WIDTH, WIDTH), inner, nn.Linear(WIDTH, 3)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for layer in (self.first, self.second):
                layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator))
                layer.bias.copy_(torch.randn(layer.bias.shape, generator=generator))
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.inner(self.first(x))).flatten(1)


class Plain(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def flow(inner: nn.Module, composite: str) -> tuple[Tensor, Tensor]:
    x = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return walked(Chain(inner), x, COMPOSITES[composite], torch.ones(2, 12, dtype=torch.float64))


def activations() -> dict[str, tuple[Any, Any]]:
    """Name -> (the module that writes it out, the function that it is)."""
    from transformers import activations as hf

    def tanh(x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")

    return {
        "NewGELUActivation": (hf.NewGELUActivation, tanh),
        "FastGELUActivation": (hf.FastGELUActivation, tanh),
        "AccurateGELUActivation": (hf.AccurateGELUActivation, tanh),
        "QuickGELUActivation": (hf.QuickGELUActivation, lambda x: x * torch.sigmoid(1.702 * x)),
        "GELUActivation": (lambda: hf.GELUActivation(use_gelu_python=True), F.gelu),
    }


@pytest.mark.part
@pytest.mark.parametrize("composite", COMPOSITES)
@pytest.mark.parametrize("name", activations())
def test_activations_written_out(name: str, composite: str) -> None:
    """GPT-2's gelu_new is made of mul, pow, tanh and add; as such it would get another map (by 38 %)."""
    make, function = activations()[name]
    logits, got = flow(make(), composite)
    if name == "QuickGELUActivation":
        # no torch function of that name: the reference is the rule itself, worked out on the plain chain
        assert torch.allclose(logits, Chain(Plain(function))(torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)))
        if composite == "AH+LN, secant":
            # x ⊙ m of the activation: m is multiplied by sigmoid(1.702 x)
            chain = Chain(make())
            x = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            hidden = chain.first(x)
            behind = torch.ones(2, 4, 3, dtype=torch.float64) @ chain.second.weight
            assert torch.allclose(got, (behind * torch.sigmoid(1.702 * hidden)) @ chain.first.weight)
        return
    wanted_logits, wanted = flow(Plain(function), composite)
    assert torch.allclose(logits, wanted_logits, atol=1e-6)
    assert torch.allclose(got, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


class WrittenRMSNorm(nn.Module):
    """As in Llama, T5 and a dozen others: pow, mean, rsqrt, mul."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + self.variance_epsilon))


@pytest.mark.parametrize("composite", COMPOSITES)
def test_rms_norm_written_out(composite: str) -> None:
    weight = torch.linspace(0.5, 1.5, WIDTH).double()
    logits, got = flow(WrittenRMSNorm(), composite)
    wanted_logits, wanted = flow(Plain(lambda x: F.rms_norm(x, (WIDTH,), weight, 1e-6)), composite)
    assert torch.allclose(logits, wanted_logits)
    assert torch.allclose(got, wanted, rtol=1e-9)


def test_gemmas_weight_is_a_difference_from_one() -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    norm = GemmaRMSNorm(WIDTH).double()
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-0.5, 0.5, WIDTH))
    _, got = flow(norm, "AH+LN")
    _, wanted = flow(Plain(lambda x: F.rms_norm(x, (WIDTH,), 1 + torch.linspace(-0.5, 0.5, WIDTH, dtype=torch.float64), 1e-6)), "AH+LN")
    assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-6)  # Gemma's norm works in float32


def test_gpt2_with_either_activation() -> None:
    """The whole model: gelu_new is the tanh approximation that torch has as a function."""
    model, inputs = build("gpt2")
    other, _ = build("gpt2")
    for block in other.transformer.h:
        block.mlp.act = nn.GELU(approximate="tanh").eval()
    for method in ("transformer_attribution", "lrp", "lrp_ah_ln"):
        a, b = (whyformer.explain(m, inputs, method=method).scores for m in (model, other))
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-8 * float(a.abs().max())), method
    a, b = (whyformer.explain(m, inputs, method="lrp_ah_ln", secant=True).scores for m in (model, other))
    assert torch.allclose(a, b, rtol=1e-6)


def test_an_activation_under_no_name() -> None:
    """What it computes counts, not how its class is called."""

    class Disguised(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))

    for composite in COMPOSITES:
        wanted = flow(Plain(lambda x: F.gelu(x, approximate="tanh")), composite)[1]
        assert torch.allclose(flow(Disguised(), composite)[1], wanted, rtol=1e-9, atol=1e-12)

"""Decomposed activations and norms have the attribution of the fused functions."""

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


class LinearChain(nn.Module):
    """A linear layer, a module and a linear layer."""

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


class FunctionModule(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def propagate(inner: nn.Module, composite: str) -> tuple[Tensor, Tensor]:
    x = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return walked(LinearChain(inner), x, COMPOSITES[composite], torch.ones(2, 12, dtype=torch.float64))


def activations() -> dict[str, tuple[Any, Any]]:
    """Name -> (decomposed module, equivalent function)."""
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
def test_decomposed_activation_equals_fused(name: str, composite: str) -> None:
    """GPT-2's gelu_new consists of mul, pow, tanh and add; rules for these would change the map by 38 %."""
    build_module, function = activations()[name]
    logits, result = propagate(build_module(), composite)
    if name == "QuickGELUActivation":
        # torch has no such function: the reference is the rule applied to the plain chain
        assert torch.allclose(logits, LinearChain(FunctionModule(function))(torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)))
        if composite == "AH+LN, secant":
            # x ⊙ m of the activation: m is multiplied by sigmoid(1.702 x)
            chain = LinearChain(build_module())
            x = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            hidden = chain.first(x)
            output_gradient = torch.ones(2, 4, 3, dtype=torch.float64) @ chain.second.weight
            assert torch.allclose(result, (output_gradient * torch.sigmoid(1.702 * hidden)) @ chain.first.weight)
        return
    expected_logits, expected = propagate(FunctionModule(function), composite)
    assert torch.allclose(logits, expected_logits, atol=1e-6)
    assert torch.allclose(result, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


class DecomposedRMSNorm(nn.Module):
    """As in Llama and T5: pow, mean, rsqrt, mul."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + self.variance_epsilon))


@pytest.mark.parametrize("composite", COMPOSITES)
def test_decomposed_rms_norm_equals_fused(composite: str) -> None:
    weight = torch.linspace(0.5, 1.5, WIDTH).double()
    logits, result = propagate(DecomposedRMSNorm(), composite)
    expected_logits, expected = propagate(FunctionModule(lambda x: F.rms_norm(x, (WIDTH,), weight, 1e-6)), composite)
    assert torch.allclose(logits, expected_logits)
    assert torch.allclose(result, expected, rtol=1e-9)


def test_gemma_norm_equals_rms_norm_with_weight_plus_one() -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    norm = GemmaRMSNorm(WIDTH).double()
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-0.5, 0.5, WIDTH))
    _, result = propagate(norm, "AH+LN")
    _, expected = propagate(FunctionModule(lambda x: F.rms_norm(x, (WIDTH,), 1 + torch.linspace(-0.5, 0.5, WIDTH, dtype=torch.float64), 1e-6)), "AH+LN")
    assert torch.allclose(result, expected, rtol=1e-4, atol=1e-6)  # Gemma's norm computes in float32


def test_gpt2_with_decomposed_and_fused_gelu() -> None:
    """gelu_new is torch's tanh approximation of GELU."""
    model, inputs = build("gpt2")
    fused, _ = build("gpt2")
    for block in fused.transformer.h:
        block.mlp.act = nn.GELU(approximate="tanh").eval()
    for method in ("transformer_attribution", "lrp", "lrp_ah_ln"):
        decomposed_scores, fused_scores = (whyformer.explain(m, inputs, method=method).scores for m in (model, fused))
        assert torch.allclose(decomposed_scores, fused_scores, rtol=1e-6, atol=1e-8 * float(decomposed_scores.abs().max())), method
    decomposed_scores, fused_scores = (whyformer.explain(m, inputs, method="lrp_ah_ln", secant=True).scores for m in (model, fused))
    assert torch.allclose(decomposed_scores, fused_scores, rtol=1e-6)


def test_activation_is_recognised_without_its_name() -> None:
    """The computation matters, not the class name."""

    class UnnamedFunction(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))

    for composite in COMPOSITES:
        expected = propagate(FunctionModule(lambda x: F.gelu(x, approximate="tanh")), composite)[1]
        assert torch.allclose(propagate(UnnamedFunction(), composite)[1], expected, rtol=1e-9, atol=1e-12)

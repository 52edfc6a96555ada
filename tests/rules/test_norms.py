"""Decomposed norms are recognised by their computation, not by their class name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import whyformer
from walked import walked
from whyformer.models.structure import find_blocks
from whyformer.rules.multipliers import COMPOSITES
from whyformer.rules.propagation import deep_taylor

WIDTH = 8
HELD = COMPOSITES["ah_ln"]


def randomise_norms(model: nn.Module, seed: int = 0) -> nn.Module:
    """Randomise all weights, because initial norm weights (1, or 0 for 1 + w) would hide errors."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.7 if parameter.dim() < 2 else 1.2 / parameter.shape[-1] ** 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model.double().eval()


# -- whole models --------------------------------------------------------------------------------------------------
_SMALL: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_FULL = {"layer_types": ["full_attention"] * 2}
# family -> (class before "ForCausalLM", configuration, settings); some norms scale by w, some by 1 + w
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma": ("Gemma", "GemmaConfig", {}),
    "gemma3": ("Gemma3", "Gemma3TextConfig", {"query_pre_attn_scalar": 8}),
    "gemma4": ("Gemma4", "Gemma4TextConfig", {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "global_head_dim": 8, **_FULL}),
    "llama": ("Llama", "LlamaConfig", {}),
    "olmo2": ("Olmo2", "Olmo2Config", {}),
    "qwen3_5": ("Qwen3_5", "Qwen3_5TextConfig", _FULL),
    "qwen3_next": ("Qwen3Next", "Qwen3NextConfig", {"mlp_only_layers": [0, 1], "num_experts": 2, "num_experts_per_tok": 1, **_FULL}),
    "recurrent_gemma": ("RecurrentGemma", "RecurrentGemmaConfig", {"lru_width": 16, "attention_window_size": 8, "block_types": ["attention"]}),
    "vaultgemma": ("VaultGemma", "VaultGemmaConfig", {"query_pre_attn_scalar": 8, "attn_implementation": "eager"}),
}  # fmt: skip
IDS = torch.randint(4, 50, (2, 6), generator=torch.Generator().manual_seed(0))


def build_family(name: str) -> nn.Module:
    import transformers

    kind, configuration, settings = FAMILIES[name]
    config = getattr(transformers, configuration)(**_SMALL, **settings)
    return randomise_norms(getattr(transformers, f"{kind}ForCausalLM")(config))


@pytest.mark.parametrize("name", FAMILIES)
def test_statistics_of_norms_are_constant_in_lrp_ln(name: str) -> None:
    """LRP(LN) against autograd of y = x ⊙ (y / x) with constant y / x, which makes the root mean square constant."""
    model, inputs = build_family(name), {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    result = whyformer.explain(model, inputs, method="lrp_ln", target=1).scores
    leaves: list[Tensor] = []

    def make_leaf(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves.append(args[0].detach().clone().requires_grad_())
        return (leaves[0].clone(), *args[1:]), kwargs

    find_blocks(model)[0].register_forward_pre_hook(make_leaf, with_kwargs=True)
    norms = [m for m in model.modules() if "Norm" in type(m).__name__]
    for norm in norms:
        norm.forward = lambda x, forward=norm.forward: x * (forward(x) / x).detach()  # type: ignore[method-assign,misc]
    logits = model(**inputs, use_cache=False).logits[:, -1, 1]
    (gradient,) = torch.autograd.grad(logits.sum(), leaves[0])
    expected = (leaves[0].detach() * gradient).sum(-1)
    assert len(norms) >= 5
    assert torch.allclose(result, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))  # these norms compute in float32


# -- single modules ------------------------------------------------------------------------------------------------

class UnnamedModule(nn.Module):
    """A norm with an uninformative class name, with a bias, and optionally with a power other than ½."""

    def __init__(self, power: float = 0.5, centred: bool = True) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.small, self.power, self.centred = 1e-3, power, centred

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        return x / (x.square().mean(-1, keepdim=True) + self.small) ** self.power * self.scale + self.shift


class NormChain(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner, self.second = nn.Linear(WIDTH, WIDTH), inner, nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.inner(self.first(x))).flatten(1)


def propagate(model: nn.Module, composite: Any) -> Tensor:
    x = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return walked(model, x, composite, torch.ones(2, 12, dtype=torch.float64))[1]


@pytest.mark.parametrize("propagates", ["multiplier", "relevance"])
@pytest.mark.parametrize("centred", [True, False])
def test_norm_is_recognised_without_its_name(centred: bool, propagates: str) -> None:
    """Also if it is implemented with a power, which has no rule."""
    composite = HELD if propagates == "multiplier" else deep_taylor()
    model = randomise_norms(NormChain(UnnamedModule(centred=centred)))
    inner: Any = model.inner

    class FunctionNorm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if centred:
                return F.layer_norm(x, (WIDTH,), inner.scale, inner.shift, 1e-3)
            # a bias after an RMSNorm receives no relevance
            return F.rms_norm(x, (WIDTH,), inner.scale, 1e-3) + inner.shift.detach()

    plain = NormChain(FunctionNorm())
    plain.first, plain.second = model.first, model.second
    result, expected = propagate(model, composite), propagate(plain.eval(), composite)
    assert torch.allclose(result, expected, rtol=1e-9, atol=1e-12)


def test_in_place_norm_equals_rms_norm() -> None:
    class InPlaceNorm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))

    class FunctionRMSNorm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.rms_norm(x, (WIDTH,), None, 1e-6)

    for composite in (HELD, deep_taylor()):
        result, expected = (propagate(randomise_norms(NormChain(inner)), composite) for inner in (InPlaceNorm(), FunctionRMSNorm()))
        assert torch.allclose(result, expected, rtol=1e-9, atol=1e-12)


def test_user_hook_on_norm_is_a_separate_operation() -> None:
    model, reference = randomise_norms(NormChain(UnnamedModule())), randomise_norms(NormChain(UnnamedModule()))
    model.inner.register_forward_hook(lambda m, args, out: out * 2)
    reference.inner = nn.Sequential(reference.inner, DoubleModule())
    for composite in (HELD, deep_taylor()):
        assert torch.allclose(propagate(model, composite), propagate(reference.eval(), composite))


class DoubleModule(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2

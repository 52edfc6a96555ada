"""User-written attention: its map is recognised and its scores equal those of fused attention, in any implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import whyformer
from zoo import randomise

WIDTH, HEADS, TOKENS, CLASSES = 12, 3, 6, 4
SCALE = (WIDTH // HEADS) ** -0.5
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])

Mix = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def at(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) * SCALE + bias).softmax(dim=-1) @ v


def scaled_first(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return torch.matmul(torch.softmax(torch.matmul(q * SCALE, k.mT) + bias, -1), v)


def divided(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = torch.matmul(q, k.permute(0, 1, 3, 2)) / SCALE**-1
    weights = F.softmax(scores + bias, dim=3)
    return F.dropout(weights, 0.1, training=False).matmul(v)


def masked_by_filling(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = q @ k.mT * SCALE
    return scores.masked_fill(bias < 0, torch.finfo(scores.dtype).min).softmax(-1).to(v.dtype) @ v


def filled_in_place(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = q @ k.mT
    scores *= SCALE
    scores.masked_fill_(bias < 0, float("-inf"))
    return scores.softmax(-1) @ v


def flattened_heads(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """``[B·H, N, d]``, as in BLOOM and OPT."""
    b = q.shape[0]
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)) * SCALE + bias.expand(b, HEADS, -1, -1).flatten(0, 1)
    return torch.bmm(scores.softmax(-1), v).unflatten(0, (b, HEADS))


def added_product(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    b = q.shape[0]
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    full_bias = bias.expand(b, HEADS, TOKENS, TOKENS).flatten(0, 1)
    scores = torch.baddbmm(full_bias, q, k.transpose(1, 2), beta=1.0, alpha=SCALE)
    return torch.bmm(torch.softmax(scores, dim=-1), v).unflatten(0, (b, HEADS))


def einsum(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    weights = (torch.einsum("bhqd,bhkd->bhqk", q, k) * SCALE + bias).softmax(-1)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


def einsum_other_layout(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Layout ``[B, N, H, d]``, with the values as first operand."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = F.softmax(torch.einsum("b q h d, b k h d -> b h q k", q, k) * SCALE + bias, -1)
    return torch.einsum("bkhd,bhqk->bqhd", v, weights).transpose(1, 2)


def einsum_with_dots(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    weights = (torch.einsum("...qd,...kd->...qk", [q, k]) * SCALE + bias).softmax(-1)
    return torch.einsum("...qk,...kd->...qd", [weights, v])


VARIANTS: dict[str, Mix] = {
    f.__name__: f for f in (at, scaled_first, divided, masked_by_filling, filled_in_place, flattened_heads, added_product, einsum, einsum_other_layout, einsum_with_dots)
}


class MixBlock(nn.Module):
    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mix = mix

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in (q, k, v))
        return x + self.out(self.mix(q, k, v, bias).transpose(1, 2).flatten(2))


class AttentionModel(nn.Module):
    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.words = nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList([MixBlock(mix) for _ in range(2)])
        self.head = nn.Linear(WIDTH, CLASSES)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
        self.double().eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.words(input_ids)
        bias = torch.zeros(len(x), 1, 1, TOKENS, dtype=x.dtype).masked_fill(attention_mask[:, None, None] == 0, float("-inf"))
        for block in self.blocks:
            x = block(x, bias)
        return self.head(x[:, 0])


def model_inputs() -> dict[str, Any]:
    return {"input_ids": torch.arange(12).reshape(2, 6), "attention_mask": MASK}


@pytest.mark.part
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("method", ["transformer_attribution", "partial_lrp", "lrp", "rollout", "raw_attention", "gae", "gradcam_attention", "lrp_ah_ln", "value_zeroing", "norm_attention"])
def test_written_attention_has_same_scores_as_fused(method: str, variant: str) -> None:
    expected = whyformer.explain(AttentionModel(fused), model_inputs(), method=method, target=[0, 3])
    result = whyformer.explain(AttentionModel(VARIANTS[variant]), model_inputs(), method=method, target=[0, 3])
    assert torch.allclose(result.logits, expected.logits, atol=1e-12)
    assert torch.allclose(result.scores, expected.scores, atol=1e-8 * float(expected.scores.abs().max()))


def test_softmax_gate_is_not_an_attention_map() -> None:
    """A gate over features, which is not followed by a product with values."""

    class GatedInputBlock(MixBlock):
        def forward(self, x: Tensor, bias: Tensor) -> Tensor:
            return super().forward(x * x.softmax(-1), bias)

    model = AttentionModel(at)
    model.blocks = nn.ModuleList([GatedInputBlock(at) for _ in range(2)]).double().eval()
    scores = whyformer.explain(model, model_inputs(), method="rollout").scores
    assert scores.shape == (2, TOKENS)


class EinsumBlock(MixBlock):
    """A block whose projections are einsums with parameters ``[H, d, D]``."""

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        heads = self.qkv.weight.unflatten(0, (3, HEADS, -1))
        biases = self.qkv.bias.chunk(3)
        normed = self.norm(x)
        projections = (torch.einsum("bnD,hdD->bnhd", normed, nn.Parameter(w)).flatten(2) + b for w, b in zip(heads, biases, strict=True))
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in projections)
        out = nn.Parameter(self.out.weight.unflatten(1, (HEADS, -1)))
        return x + (torch.einsum("bhnd,Dhd->bnD", self.mix(q, k, v, bias), out) + self.out.bias)


@pytest.mark.parametrize("method", ["transformer_attribution", "lrp", "partial_lrp", "lrp_ah_ln", "gae"])
def test_einsum_with_parameter_has_same_scores_as_linear(method: str) -> None:
    expected = whyformer.explain(AttentionModel(fused), model_inputs(), method=method, target=[0, 3])
    model = AttentionModel(einsum)
    blocks = [EinsumBlock(einsum).double() for _ in range(2)]
    for new, old in zip(blocks, model.blocks, strict=True):
        new.load_state_dict(old.state_dict())
    model.blocks = nn.ModuleList(blocks).eval()
    result = whyformer.explain(model, model_inputs(), method=method, target=[0, 3])
    assert torch.allclose(result.logits, expected.logits, atol=1e-12)
    assert torch.allclose(result.scores, expected.scores, atol=1e-8 * float(expected.scores.abs().max()))


@pytest.mark.parametrize("method", ["norm_attention", "value_zeroing"])
def test_blocks_that_return_their_input_in_place_have_same_scores(method: str) -> None:
    class CopyingBlock(MixBlock):
        def forward(self, x: Tensor, bias: Tensor) -> Tensor:
            return x.copy_(super().forward(x, bias))

    model = AttentionModel(at)
    blocks = nn.ModuleList([CopyingBlock(at) for _ in range(2)]).double().eval()
    blocks.load_state_dict(model.blocks.state_dict())
    expected = whyformer.explain(AttentionModel(at), model_inputs(), method=method)
    model.blocks = blocks
    result = whyformer.explain(model, model_inputs(), method=method)
    assert torch.allclose(result.scores, expected.scores, atol=1e-12)


@pytest.mark.parametrize("method", ["input_x_gradient", "lrp", "lrp_ah_ln", "integrated_gradients", "smoothgrad"])
def test_first_block_that_changes_its_input_in_place_has_same_scores(method: str) -> None:
    class Scaling(MixBlock):
        def forward(self, x: Tensor, bias: Tensor) -> Tensor:
            x *= 1.0
            return super().forward(x, bias)

    model, settings = AttentionModel(at), {"samples": 2} if method == "smoothgrad" else {}
    blocks = nn.ModuleList([Scaling(at) for _ in range(2)]).double().eval()
    blocks.load_state_dict(model.blocks.state_dict())
    expected = whyformer.explain(AttentionModel(at), model_inputs(), method=method, target=[0, 3], **settings)
    model.blocks = blocks
    result = whyformer.explain(model, model_inputs(), method=method, target=[0, 3], **settings)
    assert torch.allclose(result.logits, expected.logits, atol=1e-12)
    assert torch.allclose(result.scores, expected.scores, atol=1e-8 * float(expected.scores.abs().max()))


class InputBiasModel(nn.Module):
    """Attention with a bias computed from the input, as in Doge's dynamic mask."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([InputBiasLayer(fused) for _ in range(2)])
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class InputBiasLayer(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused, self.qkv, self.bias = fused, nn.Linear(8, 24), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        bias = torch.tanh(self.bias(x)).transpose(1, 2)[:, :, None].expand(-1, -1, x.shape[1], -1)
        if self.fused:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        else:
            mixed = torch.softmax(q @ k.transpose(-2, -1) * 0.5 + bias, -1) @ v
        return x + mixed.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("method", ["transformer_attribution", "lrp", "lrp_ah_ln", "gae", "rollout", "input_x_gradient"])
def test_input_dependent_bias_has_same_scores_fused_and_decomposed(method: str) -> None:
    models = [randomise(InputBiasModel(fused)).double() for fused in (True, False)]
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(3)).double()
    fused, decomposed = (whyformer.explain(m, x, method=method, target=[0, 2]).scores for m in models)
    assert torch.allclose(fused, decomposed, atol=1e-10) and fused.any()

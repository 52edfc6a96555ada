"""Attention with samples and heads in any order along its leading axes; token-first inputs are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import whyformer
from whyformer.errors import InputError

WIDTH, HEADS, TOKENS, SAMPLES = 8, 2, 5, 3
Product = Callable[[Tensor, Tensor, Tensor], Tensor]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / (WIDTH // HEADS) ** 0.5).softmax(-1) @ v


def split(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def samples_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(*(split(t).flatten(0, 1) for t in (q, k, v))).unflatten(0, (-1, HEADS)).transpose(1, 2).flatten(2)


def heads_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As in the official Set Transformer code."""
    mixed = attend(*(torch.cat(t.split(WIDTH // HEADS, 2)) for t in (q, k, v)))
    return torch.cat(mixed.split(len(q)), 2)


def heads_first_fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mixed = F.scaled_dot_product_attention(*(split(t).transpose(0, 1) for t in (q, k, v)))
    return mixed.transpose(0, 1).transpose(1, 2).flatten(2)


def scattered(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """In a mixed order of samples and heads."""
    flat = [split(t).flatten(0, 1) for t in (q, k, v)]
    order = torch.tensor([3, 0, 5, 1, 4, 2]) if len(q) == SAMPLES else torch.arange(len(flat[0]))
    mixed = attend(*(t[order] for t in flat))[order.argsort()]
    return mixed.unflatten(0, (-1, HEADS)).transpose(1, 2).flatten(2)


class ProductAttention(nn.Module):
    def __init__(self, product: Product) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.product(*self.qkv(self.norm(x)).chunk(3, -1)))


class ProductModel(nn.Module):
    def __init__(self, product: Product) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ProductAttention(product) for _ in range(2)])
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def model_of(product: Product) -> nn.Module:
    torch.manual_seed(0)
    return ProductModel(product).double().eval()


def inputs() -> Tensor:
    return torch.randn(SAMPLES, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("method", ["rollout", "raw_attention", "transformer_attribution", "gae", "value_zeroing", "decompx"])
@pytest.mark.parametrize("product", [heads_first, heads_first_fused, scattered])
def test_batch_with_any_order_of_samples_and_heads_equals_single_samples(product: Product, method: str) -> None:
    x = inputs()
    result = whyformer.explain(model_of(product), x, method, [0, 1, 2]).scores
    for i in range(SAMPLES):
        single = whyformer.explain(model_of(samples_first), x[i : i + 1], method, i).scores[0]
        assert torch.allclose(result[i], single, rtol=1e-8, atol=1e-12)


def test_batch_of_equal_samples_equals_single_sample() -> None:
    model, x = model_of(heads_first), inputs()[:1].expand(SAMPLES, -1, -1).clone()
    result = whyformer.explain(model, x, "gae", [0, 1, 2]).scores
    for i in range(SAMPLES):
        assert torch.allclose(result[i], whyformer.explain(model, x[:1], "gae", i).scores[0])


@pytest.mark.parametrize("method", ["attnlrp", "lrp", "libragrad", "saliency"])
def test_token_first_input_is_refused_and_transposed_input_works(method: str) -> None:
    class TokensFirstEncoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.TransformerEncoderLayer(WIDTH, HEADS, 16, 0.0) for _ in range(2)])
            self.head = nn.Linear(WIDTH, 4)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.head(x.mean(0))

    class SamplesFirstWrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.transpose(0, 1))

    torch.manual_seed(0)
    model, x = TokensFirstEncoder().double().eval(), inputs()
    for token_first in (x.transpose(0, 1), x[:1].transpose(0, 1)):
        with pytest.raises(InputError, match=r"transpose\(0, 1\)"):
            whyformer.explain(model, token_first, method, 0)
    result = whyformer.explain(SamplesFirstWrapper(model), x, method, 0).scores
    assert result.shape[:2] == (SAMPLES, TOKENS)
    assert torch.allclose(result[1:2], whyformer.explain(SamplesFirstWrapper(model), x[1:2], method, 0).scores, rtol=1e-6)

"""``nn.MultiheadAttention`` with every kind of mask, and torch functions that consist of several operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from walked import walked
from whyformer.rules.multipliers import COMPOSITES
from whyformer.rules.propagation import deep_taylor
from whyformer.tape.walking import GRADIENT, Composite

B, N, E, H = 2, 5, 8, 2
UPPER = torch.ones(N, N, dtype=torch.bool).triu(1)
PADDING = torch.tensor([[False] * N, [False] * (N - 1) + [True]])
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "bool": {"attn_mask": UPPER},
    "float": {"attn_mask": torch.linspace(-1, 1, N * N, dtype=torch.float64).view(N, N)},
    "float, each head": {"attn_mask": torch.linspace(-1, 1, B * H * N * N, dtype=torch.float64).view(B * H, N, N)},
    "causal hint": {"attn_mask": UPPER, "is_causal": True},
    "key padding": {"key_padding_mask": PADDING},
    "both": {"attn_mask": UPPER, "key_padding_mask": PADDING},
}  # fmt: skip


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mask", MASKS)
def test_multihead_attention_value_and_gradient_equal_torch(mask: str, batch_first: bool, need_weights: bool) -> None:
    attention = nn.MultiheadAttention(E, H, batch_first=batch_first, dtype=torch.float64).eval()
    keys = random_tensor(B, N, E, seed=1) if batch_first else random_tensor(N, B, E, seed=1)

    def attend(x: Tensor) -> Tensor:
        return attention(x, keys, keys * 2, need_weights=need_weights, **MASKS[mask])[0]

    x = random_tensor(*keys.shape).requires_grad_()
    seed = random_tensor(*keys.shape, seed=2)
    expected = attend(x)
    (gradient,) = torch.autograd.grad(expected, x, seed)
    value, result = walked(attend, x.detach(), GRADIENT, seed)
    assert torch.allclose(value, expected, atol=1e-12)
    assert torch.allclose(result, gradient, atol=1e-12)
    if batch_first:  # deep_taylor needs the samples along the first axis
        assert walked(attend, x.detach(), deep_taylor(), seed)[1].isfinite().all()


@pytest.mark.parametrize("composite", [deep_taylor(), COMPOSITES["ah_ln"], COMPOSITES["libra"]], ids=lambda c: c.name)
def test_glu_and_prelu_equal_their_decompositions(composite: Composite) -> None:
    linear, slopes = nn.Linear(E, 2 * E, dtype=torch.float64), random_tensor(E).abs()

    def decomposed(x: Tensor) -> Tensor:
        left, right = linear(x).chunk(2, -1)
        return F.prelu(left * torch.sigmoid(right), slopes)

    result, expected = (walked(f, random_tensor(B, E), composite)[1] for f in (lambda x: F.prelu(F.glu(linear(x)), slopes), decomposed))
    assert torch.allclose(result, expected)
    assert result.any()

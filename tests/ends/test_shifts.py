"""A constant added to all tokens is a shift without relevance, in any form and for texts of any length."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from test_end_functions import Block, Model, pictures
from torch import Tensor, nn

from whyformer import explain

sys.path.insert(0, str(Path(__file__).parents[1]))
from zoo import randomise

METHODS = ["lrp", "transformer_attribution", "partial_lrp"]


@pytest.mark.parametrize("settings", [{}, {"rule": "shared"}, {"rule": "epsilon"}])
def test_padded_text_of_mpt_equals_single_text(settings: dict[str, str]) -> None:
    """The ALiBi bias is relative to the end of the longest text."""
    from transformers import MptConfig, MptForCausalLM

    sizes = {"d_model": 16, "n_heads": 2, "n_layers": 2, "vocab_size": 40, "max_seq_len": 32, "pad_token_id": 0}
    model = randomise(MptForCausalLM(MptConfig(**sizes))).double().eval()
    ids = torch.randint(4, 40, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    ids[1, 6:] = mask[1, 6:] = 0
    both = explain(model, {"input_ids": ids, "attention_mask": mask}, "lrp", 5, **settings)
    alone = explain(model, {"input_ids": ids[1:, :6], "attention_mask": mask[1:, :6]}, "lrp", 5, **settings)
    # the model computes its softmax in float32
    torch.testing.assert_close(both.scores[1, :6], alone.scores[0], rtol=1e-4, atol=1e-5)


class ExternalBias(Model):
    """A model that adds a bias of a given shape after each block."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.bias = nn.Parameter(torch.randn(16, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x) + self.bias.reshape(self.shape)
        return self.head(self.norm(x).mean(1))


@pytest.mark.parametrize("method", METHODS)
def test_bias_of_any_shape(method: str) -> None:
    expected = explain(ExternalBias((16,)), pictures(), method, 1)
    for shape in ((1, 16), (1, 1, 16)):
        torch.testing.assert_close(explain(ExternalBias(shape), pictures(), method, 1).scores, expected.scores)


class KeyBiasBlock(Block):
    """A block that adds a bias per key to the attention scores, shifted by ``offset``."""

    offset = 0.0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        slopes = torch.tensor([0.5, 0.25], dtype=x.dtype)[:, None, None]
        bias = slopes * (torch.arange(x.shape[1], dtype=x.dtype) + self.offset)
        weights = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5 + bias).softmax(-1)
        x = x + self.project((weights @ v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


@pytest.mark.parametrize("method", METHODS)
def test_constant_in_attention_scores_has_no_effect(method: str) -> None:
    scores = []
    for offset in (0.0, -7.0):
        model = Model()
        for block in model.blocks:
            block.__class__, block.offset = KeyBiasBlock, offset
        scores.append(explain(model, pictures(), method, 1).scores)
    torch.testing.assert_close(*scores, rtol=1e-8, atol=1e-11)

"""Measurements of a model are cached until one of its modules is replaced."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

import whyformer
from whyformer.errors import WhyformerError
from whyformer.models.structure import find_blocks


class Layer(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.inner, self.causal = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), causal

    def forward(self, hidden: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(hidden.shape[1], dtype=hidden.dtype) if self.causal else None
        return self.inner(hidden, src_mask=mask)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(10, 8), nn.ModuleList([Layer(True), Layer(True)]), nn.Linear(8, 10)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


IDS = torch.tensor([[1, 5, 2, 7]])


def test_replaced_modules_invalidate_the_cache() -> None:
    model = Model().eval()
    assert len(whyformer.explain(model, IDS, "saliency").scores[0]) == 4  # explains the next token
    assert len(find_blocks(model)) == 2
    model.layers = nn.ModuleList([Layer(False) for _ in range(3)]).eval()
    assert len(find_blocks(model)) == 3
    with pytest.raises(WhyformerError, match="Token"):  # each token has its own logits
        whyformer.explain(model, IDS, "saliency")


def test_cache_does_not_keep_the_model_alive() -> None:
    model = Model().eval()
    whyformer.explain(model, IDS, "saliency")
    find_blocks(model)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None

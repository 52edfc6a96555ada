"""Models whose output depends on random numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import whyformer
from whyformer.errors import ModelError


class RandomClassifier(nn.Module):
    """``kind`` is where random numbers are drawn: in each pass, in training mode alone, or for an order without effect."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.words, self.head, self.kind = nn.Embedding(50, 16), nn.Linear(16, 3), kind
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.layer(self.words(ids))
        if self.kind == "order":
            hidden = hidden[:, torch.randperm(hidden.shape[1])]
        pooled = hidden.mean(1)
        if self.kind != "order":
            pooled = functional.dropout(pooled, 0.3, self.training or self.kind == "always")
        return self.head(pooled)


IDS = torch.arange(12).view(2, 6)
METHODS = {"input_x_gradient": {}, "rollout": {}, "occlusion": {"baseline": 3}, "auto": {}}


@pytest.mark.parametrize("method", METHODS)
def test_random_output_is_named(method: str) -> None:
    e = whyformer.explain(RandomClassifier("always").eval(), IDS, method, 1, **METHODS[method])
    assert e.diagnostics["random"] > 0.01
    assert any("random numbers" in warning for warning in e.warnings)


@pytest.mark.parametrize("method", METHODS)
def test_random_output_in_training_mode_raises(method: str) -> None:
    with pytest.raises(ModelError, match="eval"):
        whyformer.explain(RandomClassifier("training").train(), IDS, method, 1, **METHODS[method])


@pytest.mark.parametrize(("kind", "training"), [("training", False), ("order", False), ("order", True)])
def test_random_numbers_without_effect_are_not_named(kind: str, training: bool) -> None:
    model = RandomClassifier(kind).train(training)
    e = whyformer.explain(model, IDS, "input_x_gradient", 1)
    assert "random" not in e.diagnostics
    assert torch.allclose(whyformer.explain(model, IDS, "input_x_gradient", 1).scores, e.scores, atol=1e-6)

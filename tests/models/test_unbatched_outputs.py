"""Models whose output has no batch axis or no class axis."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import whyformer


class Model(nn.Module):
    def __init__(self, classes: int, squeeze: Callable[[Tensor], Tensor] = lambda y: y) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head, self.squeeze = nn.Linear(8, classes), squeeze

    def forward(self, x: Tensor) -> Tensor:
        return self.squeeze(self.head(self.blocks(x).mean(1)))


X = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(1))
METHODS = ["attnlrp", "lrp", "transformer_attribution", "decompx", "occlusion"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("classes", [1, 3])
def test_output_without_batch_axis(method: str, classes: int) -> None:
    """Outputs [] and [C] have the scores of [1, 1] and [1, C]."""
    target = 0 if classes == 1 else 1
    expected = whyformer.explain(Model(classes).eval(), X, method, target).scores
    actual = whyformer.explain(Model(classes, lambda y: y.squeeze()).eval(), X, method, target).scores
    assert torch.allclose(actual, expected, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_output_without_class_axis(method: str) -> None:
    batch = torch.cat([X, -X])
    expected = whyformer.explain(Model(1).eval(), batch, method, 0).scores
    actual = whyformer.explain(Model(1, lambda y: y[:, 0]).eval(), batch, method, 0).scores
    assert torch.allclose(actual, expected, atol=1e-6)


def test_module_list_with_none() -> None:
    model = Model(3)
    model.beside = nn.ModuleList([None, None])
    assert whyformer.explain(model.eval(), X, "attnlrp", 1).scores.abs().max() > 0

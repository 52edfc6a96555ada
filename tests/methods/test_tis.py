"""TIS against a reference implementation on a ViT, and its errors."""

from __future__ import annotations

import pytest
import torch
from sklearn.cluster import KMeans
from torch import Tensor

import whyformer
from whyformer.errors import MethodNotApplicable
from zoo import build, randomise


def test_tis_equals_reference() -> None:
    model, pixels = build("hf_vit")
    with torch.no_grad():
        output = model(pixels, output_hidden_states=True)
        states = torch.stack(output.hidden_states[1:])  # [L, B, N, D]
        expected = torch.zeros(2, 16, dtype=torch.float64)
        for b, label in enumerate((1, 3)):
            channels = torch.cat([state[b, 1:] for state in states], -1).T
            centroids = KMeans(7, n_init=1, random_state=3).fit(channels.numpy()).cluster_centers_
            total, counts = torch.zeros(16, dtype=torch.float64), torch.zeros(16)
            for centroid in torch.from_numpy(centroids):
                indices = centroid.topk(5).indices
                rows = torch.cat([output.hidden_states[0][b, :1], output.hidden_states[0][b, 1:][indices]])[None]
                score = _logits_of_rows(model, pixels[b : b + 1], rows).softmax(-1)[0, label]
                total[indices] += score
                counts[indices] += 1
            expected[b] = torch.where(counts > 0, total / counts.clamp(min=1), 0)
    settings = {"masks": 7, "tokens_ratio": 0.32, "seed": 3}
    for size in (1, 4, 100):
        explanation = whyformer.explain(model, pixels, method="tis", target=[1, 3], batch_size=size, **settings)
        torch.testing.assert_close(explanation.scores, expected)
        assert explanation.diagnostics["masks"] == [7, 7]


def _logits_of_rows(model: torch.nn.Module, pixels: Tensor, rows: Tensor) -> Tensor:
    """Logits with these rows as the input of the first block."""
    layers = model.vit.layers
    handle = layers[0].register_forward_pre_hook(lambda _, args: (rows, *args[1:]))
    try:
        return model(pixels).logits
    finally:
        handle.remove()


def test_blocks_that_require_all_rows_are_refused() -> None:
    """BEiT adds a bias for each pair of positions."""
    from transformers import BeitConfig, BeitForImageClassification

    config = BeitConfig(
        image_size=32, patch_size=8, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=48,
        num_labels=5, use_relative_position_bias=True,
    )  # fmt: skip
    model = randomise(BeitForImageClassification(config))
    with pytest.raises(MethodNotApplicable, match="need all of their rows"):
        whyformer.explain(model, torch.randn(1, 3, 32, 32), method="tis", target=1, masks=4)

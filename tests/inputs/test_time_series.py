"""Time series: the values are the main input, and features of their times are further inputs."""

from __future__ import annotations

import pytest
import torch
import transformers

import whyformer
from zoo import randomise


@pytest.mark.parametrize("channels", [1, 3])
def test_each_time_step_of_a_series_cut_into_patches_has_a_score(channels: int) -> None:
    sizes = {"context_length": 16, "patch_length": 4, "patch_stride": 4, "d_model": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 16}
    config = transformers.PatchTSTConfig(num_input_channels=channels, num_targets=3, **sizes)
    model = randomise(transformers.PatchTSTForClassification(config)).double().eval()
    series = torch.randn(2, 16, channels, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    e = whyformer.explain(model, series.detach(), "input_x_gradient", 1)
    (gradient,) = torch.autograd.grad(model(series).prediction_logits[:, 1].sum(), series)
    torch.testing.assert_close(e.scores, (series * gradient).sum(2).detach())


@pytest.mark.parametrize("kind", ["TimeSeriesTransformer", "Informer"])
@pytest.mark.parametrize("method", ["input_x_gradient", "occlusion"])
def test_values_of_a_time_series_are_the_main_input(kind: str, method: str) -> None:
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    config = getattr(transformers, f"{kind}Config")(prediction_length=4, context_length=6, lags_sequence=[1, 2], num_time_features=2, **sizes)
    model = randomise(getattr(transformers, f"{kind}ForPrediction")(config)).double()
    drawn = torch.Generator().manual_seed(0)
    shapes = {"past_time_features": (2, 8, 2), "future_time_features": (2, 4, 2), "past_values": (2, 8), "future_values": (2, 4)}
    inputs = {name: torch.randn(shape, generator=drawn, dtype=torch.float64) for name, shape in shapes.items()}
    inputs["past_observed_mask"] = torch.ones(2, 8, dtype=torch.float64)
    e = whyformer.explain(model, inputs, method, lambda output: output.params[0].flatten(1)[:, 0])
    assert e.input == "past_values" and e.scores.shape == (2, 8) and e.scores.any()
    alone = whyformer.explain(model, {name: value[1:] for name, value in inputs.items()}, method, lambda output: output.params[0].flatten(1)[:, 0])
    torch.testing.assert_close(e.scores[1], alone.scores[0])

"""Sums of text scores, as documented for each method in docs/explanations.md."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2ForSequenceClassification

import whyformer

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
IDS = torch.tensor([[3, 14, 15, 9, 2, 6], [3, 5, 8, 2, 0, 0]])


def bert(biases: bool) -> Any:
    torch.manual_seed(1)
    model = BertForSequenceClassification(BertConfig(vocab_size=40, num_labels=3, initializer_range=0.3, hidden_act="relu", **SIZES))
    return _with_biases(model, biases)


def gpt2(biases: bool) -> Any:
    torch.manual_seed(1)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2}
    config = GPT2Config(vocab_size=40, n_positions=16, num_labels=3, initializer_range=0.3, activation_function="relu", pad_token_id=0, **sizes)
    return _with_biases(GPT2ForSequenceClassification(config), biases)


def _with_biases(model: Any, biases: bool) -> Any:
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2 if biases else 0.0)
    return model.double().eval()


def explain_and_sum(model: Any, method: str, **settings: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """(explanation, sums of scores, target values) of two texts, one of them padded."""
    inputs = {"input_ids": IDS, "attention_mask": (IDS != 0).long()}
    explanation = whyformer.explain(model, inputs, method, [1, 2], **settings)
    return explanation, explanation.scores.sum(1), explanation.logits[torch.arange(2), torch.tensor([1, 2])]


@pytest.mark.parametrize("build", [bert, gpt2])
@pytest.mark.parametrize("biases", [True, False])
def test_decompx_sums_to_target(build: Any, biases: bool) -> None:
    _, sums, target = explain_and_sum(build(biases), "decompx")
    torch.testing.assert_close(sums, target, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("build", [bert, gpt2])
@pytest.mark.parametrize(("method", "settings"), [("lrp_ah_ln", {"secant": True}), ("cp_lrp", {})])
def test_relevance_without_biases_sums_to_target(build: Any, method: str, settings: dict[str, Any]) -> None:
    _explanation, sums, target = explain_and_sum(build(False), method, **settings)
    torch.testing.assert_close(sums, target, rtol=1e-5, atol=1e-6)  # LayerNorm adds 1e-12 (GPT-2: 1e-5) to the variance
    with_biases, sums, target = explain_and_sum(build(True), method, **settings)
    assert (sums - target).abs().min() > 1e-3
    torch.testing.assert_close(torch.tensor(with_biases.diagnostics["conservation"]["error"], dtype=sums.dtype), (sums - target).abs())


@pytest.mark.parametrize("build", [bert, gpt2])
def test_libragrad_sums_to_target_in_each_block(build: Any) -> None:
    _, sums, target = explain_and_sum(build(False), "libragrad")
    torch.testing.assert_close(sums, 2 * target, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("build", [bert, gpt2])
@pytest.mark.parametrize(("method", "settings"), [
    ("lrp", {"rule": "shared"}), ("raw_attention", {}), ("rollout", {}), ("norm_attention", {}), ("alti", {}), ("value_zeroing", {}),
])  # fmt: skip
def test_normalised_scores_sum_to_one(build: Any, method: str, settings: dict[str, Any]) -> None:
    _, sums, _ = explain_and_sum(build(True), method, **settings)
    torch.testing.assert_close(sums, torch.ones(2, dtype=sums.dtype), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("build", [bert, gpt2])
@pytest.mark.parametrize("method", ["transformer_attribution", "gae"])
def test_map_relevance_includes_identity_of_readout_row(build: Any, method: str) -> None:
    e, sums, _ = explain_and_sum(build(True), method)
    assert bool((sums > 1).all())
    assert bool((e.scores >= 0).all())


@pytest.mark.parametrize("build", [bert, gpt2])
def test_integrated_gradients_sum_to_difference(build: Any) -> None:
    e, sums, _target = explain_and_sum(build(True), "integrated_gradients", steps=200)
    figure = {name: torch.tensor(values, dtype=sums.dtype) for name, values in e.diagnostics["completeness"].items()}
    torch.testing.assert_close(sums, figure["sum"])
    assert bool(((sums - figure["difference"]).abs() <= figure["error"] + 1e-9).all())


def test_relevance_that_grows_until_rounding_matters_has_a_warning() -> None:
    """x / Σ x of two numbers that nearly cancel: in float32, the relative error of the sum is 6 %."""

    class Total(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 2, bias=False)
            with torch.no_grad():
                self.head.weight.copy_(torch.tensor([[1.0, 0, 0], [0, 1, 0]]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x.sum(1))

    x, model = torch.tensor([[[1.0, 2.0, 1.0], [-1 + 1e-6, 1.0, 3.0]]]), Total().eval()
    (warning,) = whyformer.explain(model, x, "lrp", 0).warnings
    assert "rounding" in warning
    assert "float64" in warning
    assert whyformer.explain(model, x, "lrp", 1).warnings == []
    assert whyformer.explain(model.double(), x.double(), "lrp", 0).warnings == []  # the way out

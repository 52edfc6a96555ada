"""Gradients and relevance of attention maps, compared with autograd and with the conserved total."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whyformer
from whyformer.errors import MethodNotApplicable
from whyformer.tape.recording import record_call
from whyformer.tape.sources import find_sources
from whyformer.tape.walking import GRADIENT
from zoo import HEADS, WIDTH, bert, gpt2, hf_vit, prepared, randomise

MODELS: dict[str, Callable[..., tuple[nn.Module, Any]]] = {"vit": hf_vit, "bert": bert, "gpt2": gpt2}


def doubled(build: Callable[..., tuple[nn.Module, Any]], *options: str) -> tuple[nn.Module, dict[str, Tensor]]:
    model, inputs = build(*options)
    named = inputs if isinstance(inputs, dict) else {"pixel_values": inputs}
    return model.double(), {n: v.double() if v.is_floating_point() else v for n, v in named.items()}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_watched_gradients_of_attention_maps_equal_autograd(name: str, attention: str) -> None:
    """Compared with autograd at the maps that transformers returns, padding included."""
    model, inputs = doubled(MODELS[name], "eager")
    output = model(**inputs, output_attentions=True)
    expected = torch.autograd.grad(output.logits[:, 1].sum(), output.attentions)
    ready = prepared(*doubled(MODELS[name], attention))
    task = ready.task(ready.resolver(1), "gae")
    watched: dict[int, tuple[Tensor, Tensor]] = {}

    def watch(block: int, weights: Tensor, gradient: Tensor) -> None:
        watched[block] = weights, gradient

    task.walk(task.attended(), GRADIENT, watch, range(3))
    assert list(watched) == [2, 1, 0]
    for block, (weights, gradient) in watched.items():
        # transformers computes the map of written attention in float32
        torch.testing.assert_close(weights.double(), output.attentions[block].double(), rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(gradient.double(), expected[block].double(), rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("rule", ["shared", "epsilon", "gamma"])
@pytest.mark.parametrize("name", MODELS)
def test_start_equals_score_sum_plus_lost_relevance(name: str, rule: str) -> None:
    explanation = whyformer.explain(*doubled(MODELS[name]), "lrp", target=1, rule=rule)
    figure = explanation.diagnostics["conservation"]
    for i, start in enumerate(figure["start"]):
        lost = sum(losses[i] for losses in figure["given_up_by_operation"].values())
        assert start == pytest.approx(float(explanation.scores[i].sum()) + lost, rel=1e-9)
    if rule == "shared":
        assert max(figure["error"]) < 1e-6
        assert sorted(figure["blocks"]) == ["0", "1", "2"]


@pytest.mark.parametrize(("order", "axis"), [((0, 1, 2, 3, 4), 1), ((0, 2, 1, 3, 4), 2), ((0, 4, 1, 2, 3), 4)])
def test_feature_axis_of_video_is_channel_axis_of_first_convolution(order: tuple[int, ...], axis: int) -> None:
    class Embeds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tubes = nn.Conv3d(3, 4, kernel_size=2, stride=2)

        def forward(self, frames: Tensor) -> Tensor:
            return self.tubes(((frames - 0.5) * 2).permute(order)).flatten(2).mT

    sizes = [2, 3, 4, 6, 8]
    frames = torch.rand([sizes[order.index(i)] for i in range(5)])
    tape, _ = record_call(Embeds().eval(), [frames], {})
    (source,) = find_sources(tape, {"frames": frames})
    assert source.features == axis


class Echo(nn.Module):
    """An encoder whose input repeats each token."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, WIDTH)
        self.positions = nn.Parameter(torch.randn(1, 16, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        x = torch.cat([x, x], 1)
        return self.head(self.encoder(x + self.positions[:, : x.shape[1]]).mean(1))


def test_map_methods_refuse_model_that_repeats_tokens() -> None:
    """Each token has two rows, so no attention map is over tokens; the token's relevance is the sum over both rows."""
    model, ids = randomise(Echo()).double(), torch.arange(4, 10)[None]
    for method in ("rollout", "gae", "transformer_attribution", "gradcam", "decompx", "value_zeroing"):
        with pytest.raises(MethodNotApplicable, match=r"unknown|no recognizable blocks"):
            whyformer.explain(model, {"input_ids": ids}, method, target=1)
    words = model.words(ids).detach().requires_grad_()
    hidden = model.encoder(torch.cat([words, words], 1) + model.positions[:, :12])
    (gradient,) = torch.autograd.grad(model.head(hidden.mean(1))[:, 1].sum(), words)
    explanation = whyformer.explain(model, {"input_ids": ids}, "input_x_gradient", target=1)
    assert torch.allclose(explanation.scores, (words * gradient).sum(-1))

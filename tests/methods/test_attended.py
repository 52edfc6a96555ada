"""Walks that are watched at maps of attention: against autograd, and what their relevance adds up to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whyformer
from whyformer.errors import MethodNotApplicable
from whyformer.methods.task import MapWatch
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
def test_what_flows_to_maps_is_their_gradient(name: str, attention: str) -> None:
    """Autograd's, at the maps that transformers returns; padding included."""
    model, fed = doubled(MODELS[name], "eager")
    output = model(**fed, output_attentions=True)
    wanted = torch.autograd.grad(output.logits[:, 1].sum(), output.attentions)
    ready = prepared(*doubled(MODELS[name], attention))
    task = ready.task(ready.resolver(1), "gae")
    found: dict[int, tuple[Tensor, Tensor]] = {}

    def seen(block: int, weights: Tensor, flow: Tensor) -> None:
        found[block] = weights, flow

    task.walk(GRADIENT, MapWatch(range(3), seen))
    assert list(found) == [2, 1, 0]
    for block, (weights, flow) in found.items():
        # transformers computes the map of written attention in float32
        torch.testing.assert_close(weights.double(), output.attentions[block].double(), rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(flow.double(), wanted[block].double(), rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("rule", ["shared", "epsilon", "gamma"])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_lost_and_what_arrives_is_what_started(name: str, rule: str) -> None:
    found = whyformer.explain(*doubled(MODELS[name]), "lrp", target=1, rule=rule)
    figure = found.diagnostics["conservation"]
    for i, start in enumerate(figure["start"]):
        lost = sum(one[i] for one in figure["given_up_by_operation"].values())
        assert start == pytest.approx(float(found.scores[i].sum()) + lost, rel=1e-9)
    if rule == "shared":
        assert max(figure["error"]) < 1e-6
        assert sorted(figure["blocks"]) == ["0", "1", "2"]


@pytest.mark.parametrize(("order", "axis"), [((0, 1, 2, 3, 4), 1), ((0, 2, 1, 3, 4), 2), ((0, 4, 1, 2, 3), 4)])
def test_the_features_of_a_video_are_the_channels_of_its_first_convolution(order: tuple[int, ...], axis: int) -> None:
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
    """An encoder that reads each token twice."""

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


def test_rows_that_are_looked_at_twice_have_no_map() -> None:
    """A token has two rows there, so that no map is over the tokens; relevance of the token is that of both."""
    model, ids = randomise(Echo()).double(), torch.arange(4, 10)[None]
    for method in ("rollout", "gae", "transformer_attribution", "gradcam", "decompx", "value_zeroing"):
        with pytest.raises(MethodNotApplicable, match=r"unknown|no recognizable blocks"):
            whyformer.explain(model, {"input_ids": ids}, method, target=1)
    words = model.words(ids).detach().requires_grad_()
    hidden = model.encoder(torch.cat([words, words], 1) + model.positions[:, :12])
    (gradient,) = torch.autograd.grad(model.head(hidden.mean(1))[:, 1].sum(), words)
    found = whyformer.explain(model, {"input_ids": ids}, "input_x_gradient", target=1)
    assert torch.allclose(found.scores, (words * gradient).sum(-1))

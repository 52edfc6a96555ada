"""Gradient methods against captum, float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import whyformer
from zoo import ZOO

captum = pytest.importorskip("captum.attr")
# captum sets requires_grad on its inputs and warns about it
pytestmark = pytest.mark.filterwarnings("ignore:Setting gradients on inputs", "ignore:Constructing model")


class Logits(torch.nn.Module):
    """captum needs a model that returns a tensor."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.model(pixel_values=pixels).logits


@pytest.fixture
def image_setup() -> tuple[torch.nn.Module, dict[str, Any], Logits, list[int]]:
    model, inputs = ZOO["hf_vit"]()
    model = model.double()
    inputs = {"pixel_values": (inputs["pixel_values"] if isinstance(inputs, dict) else inputs).double()}
    return model, inputs, Logits(model), [1, 2]


def assert_same(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(ours, theirs.detach(), rtol=tolerance, atol=tolerance * float(theirs.detach().abs().max()))


def test_saliency(image_setup: Any) -> None:
    model, inputs, wrapped, target = image_setup
    theirs = captum.Saliency(wrapped).attribute(inputs["pixel_values"].clone().requires_grad_(), target=target)
    assert_same(whyformer.explain(model, inputs, "saliency", target, norm="l1").scores, theirs.sum(1))
    assert_same(whyformer.explain(model, inputs, "saliency", target, norm="max").scores, theirs.amax(1))


def test_input_x_gradient(image_setup: Any) -> None:
    model, inputs, wrapped, target = image_setup
    theirs = captum.InputXGradient(wrapped).attribute(inputs["pixel_values"].clone().requires_grad_(), target=target)
    assert_same(whyformer.explain(model, inputs, "input_x_gradient", target).scores, theirs.sum(1))


@pytest.mark.parametrize("steps", [3, 50])
def test_integrated_gradients(image_setup: Any, steps: int) -> None:
    model, inputs, wrapped, target = image_setup
    method = captum.IntegratedGradients(wrapped)
    theirs = method.attribute(inputs["pixel_values"], target=target, n_steps=steps, method="gausslegendre")
    ours = whyformer.explain(model, inputs, "integrated_gradients", target, steps=steps, batch_size=5)
    assert_same(ours.scores, theirs.sum(1), 1e-6)  # captum's step sizes are float32


def test_smoothgrad_with_same_noise(image_setup: Any) -> None:
    model, inputs, wrapped, target = image_setup
    x = inputs["pixel_values"]
    sigma = 0.2 * (x.flatten(1).amax(1) - x.flatten(1).amin(1)).reshape(-1, 1, 1, 1)
    total = torch.zeros_like(x)
    for k in range(7):
        noise = torch.from_numpy(np.random.default_rng([3, k]).standard_normal(x.shape[1:]))
        total += captum.Saliency(wrapped).attribute((x + sigma * noise).requires_grad_(), target=target, abs=False)
    ours = whyformer.explain(model, inputs, "smoothgrad", target, samples=7, noise=0.2, seed=3, norm="sum", batch_size=6)
    assert_same(ours.scores, (total / 7).sum(1))


def test_text_gradients_are_taken_at_first_block_input() -> None:
    model, inputs = ZOO["bert"]()
    model = model.double()

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        def replace_input(_: Any, args: Any, kwargs: Any) -> Any:
            return (hidden, *args[1:]), kwargs

        handle = model.bert.encoder.layer[0].register_forward_pre_hook(replace_input, with_kwargs=True)
        try:
            copies = len(hidden) // 2  # captum concatenates the batches of all path points
            return model(**{k: v.repeat(copies, 1) for k, v in inputs.items()}).logits
        finally:
            handle.remove()

    embeddings: list[torch.Tensor] = []
    handle = model.bert.embeddings.register_forward_hook(lambda _m, _a, out: embeddings.append(out.detach()))
    with torch.no_grad():
        model(**inputs)
    handle.remove()
    theirs = captum.IntegratedGradients(forward).attribute(embeddings[0], target=[0, 1], n_steps=20)
    ours = whyformer.explain(model, inputs, "integrated_gradients", [0, 1], steps=20)
    real = inputs["attention_mask"].bool()
    assert_same(ours.scores[real], theirs.sum(-1)[real], 1e-6)

"""Gradient methods against captum, float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import whyformer
from zoo import ZOO

captum = pytest.importorskip("captum.attr")
# captum sets requires_grad on its inputs and says so
pytestmark = pytest.mark.filterwarnings("ignore:Setting gradients on inputs", "ignore:Constructing model")


class Logits(torch.nn.Module):
    """captum wants a tensor out, and for text a place to hook: what enters the first block."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.model(pixel_values=pixels).logits


@pytest.fixture
def picture() -> tuple[torch.nn.Module, dict[str, Any], Logits, list[int]]:
    model, inputs = ZOO["hf_vit"]()
    model = model.double()
    inputs = {"pixel_values": (inputs["pixel_values"] if isinstance(inputs, dict) else inputs).double()}
    return model, inputs, Logits(model), [1, 2]


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(ours, theirs.detach(), rtol=tolerance, atol=tolerance * float(theirs.detach().abs().max()))


def test_saliency(picture: Any) -> None:
    model, inputs, wrapped, target = picture
    theirs = captum.Saliency(wrapped).attribute(inputs["pixel_values"].clone().requires_grad_(), target=target)
    close(whyformer.explain(model, inputs, "saliency", target, norm="l1").scores, theirs.sum(1))
    close(whyformer.explain(model, inputs, "saliency", target, norm="max").scores, theirs.amax(1))


def test_input_x_gradient(picture: Any) -> None:
    model, inputs, wrapped, target = picture
    theirs = captum.InputXGradient(wrapped).attribute(inputs["pixel_values"].clone().requires_grad_(), target=target)
    close(whyformer.explain(model, inputs, "input_x_gradient", target).scores, theirs.sum(1))


@pytest.mark.parametrize("steps", [3, 50])
def test_integrated_gradients(picture: Any, steps: int) -> None:
    model, inputs, wrapped, target = picture
    method = captum.IntegratedGradients(wrapped)
    theirs = method.attribute(inputs["pixel_values"], target=target, n_steps=steps, method="gausslegendre")
    ours = whyformer.explain(model, inputs, "integrated_gradients", target, steps=steps, batch_size=5)
    close(ours.scores, theirs.sum(1), 1e-6)  # captum's step sizes are float32


def test_smoothgrad_with_the_same_noise(picture: Any) -> None:
    model, inputs, wrapped, target = picture
    x = inputs["pixel_values"]
    sigma = 0.2 * (x.flatten(1).amax(1) - x.flatten(1).amin(1)).reshape(-1, 1, 1, 1)
    total = torch.zeros_like(x)
    for k in range(7):
        noise = torch.from_numpy(np.random.default_rng([3, k]).standard_normal(x.shape[1:]))
        total += captum.Saliency(wrapped).attribute((x + sigma * noise).requires_grad_(), target=target, abs=False)
    ours = whyformer.explain(model, inputs, "smoothgrad", target, samples=7, noise=0.2, seed=3, norm="sum", batch_size=6)
    close(ours.scores, (total / 7).sum(1))


def test_text_gradients_are_those_of_the_first_blocks_input() -> None:
    model, inputs = ZOO["bert"]()
    model = model.double()

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        def put(_: Any, args: Any, kwargs: Any) -> Any:
            return (hidden, *args[1:]), kwargs

        handle = model.bert.encoder.layer[0].register_forward_pre_hook(put, with_kwargs=True)
        try:
            copies = len(hidden) // 2  # captum lays the points of the path out one batch after the other
            return model(**{k: v.repeat(copies, 1) for k, v in inputs.items()}).logits
        finally:
            handle.remove()

    entered: list[torch.Tensor] = []
    handle = model.bert.embeddings.register_forward_hook(lambda _m, _a, out: entered.append(out.detach()))
    with torch.no_grad():
        model(**inputs)
    handle.remove()
    theirs = captum.IntegratedGradients(forward).attribute(entered[0], target=[0, 1], n_steps=20)
    ours = whyformer.explain(model, inputs, "integrated_gradients", [0, 1], steps=20)
    real = inputs["attention_mask"].bool()
    close(ours.scores[real], theirs.sum(-1)[real], 1e-6)

"""A sound ``[B, T]``: one number at each moment, cut into frames inside the model (wav2vec 2.0 and its kin)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import whyformer
from zoo import CLASSES, HEADS, WIDTH, randomise


class Listener(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frames = nn.Conv1d(1, WIDTH, 8, 4)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, input_values: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.head(self.encoder(self.frames(input_values[:, None]).transpose(1, 2)).mean(1))


def sound() -> tuple[nn.Module, Tensor]:
    return randomise(Listener()).double(), torch.randn(2, 40, generator=torch.Generator().manual_seed(1)).double()


def test_gradient_times_input_is_the_one_by_hand() -> None:
    model, wave = sound()
    e = whyformer.explain(model, {"input_values": wave}, method="input_x_gradient", target=[1, 3])
    leaf = wave.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(leaf)[[0, 1], [1, 3]].sum(), leaf)
    assert torch.allclose(e.scores, leaf.detach() * gradient, atol=1e-12)
    saliency = whyformer.explain(model, wave, method="saliency", target=[1, 3])
    assert torch.allclose(saliency.scores, gradient.abs(), atol=1e-12)


def test_padding_has_no_scores() -> None:
    model, wave = sound()
    mask = torch.ones_like(wave, dtype=torch.long)
    mask[1, 30:] = 0
    e = whyformer.explain(model, {"input_values": wave, "attention_mask": mask}, method="saliency", target=0)
    assert e.scores[1, 30:].eq(0).all() and e.scores[:, :30].ne(0).all()


def test_occlusion_silences_moments() -> None:
    model, wave = sound()
    e = whyformer.explain(model, wave, method="occlusion", target=2, window=10)
    silent = wave.clone()
    silent[:, 10:20] = 0
    drop = (model(wave) - model(silent))[:, 2]
    assert torch.allclose(e.scores[:, 10:20], drop[:, None].expand(-1, 10), atol=1e-12)


def test_a_frame_is_shared_out_over_its_moments() -> None:
    model, wave = sound()
    found = whyformer.explain(model, wave, method="rollout")
    assert found.scores.shape == wave.shape
    for scores in found.scores:
        assert 2 <= len(scores.unique()) <= 9  # as many as there are frames
        changes = int((scores.diff() != 0).sum())
        assert changes <= 9  # the moments of a frame lie next to each other


def test_other_matrices_are_tables() -> None:
    model, x = nn.Linear(4, 3).eval(), torch.randn(2, 4)
    found = whyformer.explain(model, x, method="input_x_gradient", target=1)
    torch.testing.assert_close(found.scores, x * model.weight[1].detach())

"""Raw waveforms ``[B, T]``, which the model splits into frames (as wav2vec 2.0)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import whyformer
from zoo import CLASSES, HEADS, WIDTH, randomise


class WaveformModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frames = nn.Conv1d(1, WIDTH, 8, 4)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, input_values: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.head(self.encoder(self.frames(input_values[:, None]).transpose(1, 2)).mean(1))


def sound() -> tuple[nn.Module, Tensor]:
    return randomise(WaveformModel()).double(), torch.randn(2, 40, generator=torch.Generator().manual_seed(1)).double()


def test_gradient_times_input_equals_autograd() -> None:
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


def test_occlusion_silences_a_window() -> None:
    model, wave = sound()
    e = whyformer.explain(model, wave, method="occlusion", target=2, window=10)
    silent = wave.clone()
    silent[:, 10:20] = 0
    drop = (model(wave) - model(silent))[:, 2]
    assert torch.allclose(e.scores[:, 10:20], drop[:, None].expand(-1, 10), atol=1e-12)


def test_score_of_a_frame_is_shared_by_its_samples() -> None:
    model, wave = sound()
    e = whyformer.explain(model, wave, method="rollout")
    assert e.scores.shape == wave.shape
    for scores in e.scores:
        assert 2 <= len(scores.unique()) <= 9  # at most the number of frames
        changes = int((scores.diff() != 0).sum())
        assert changes <= 9  # the samples of a frame are adjacent


def test_other_matrices_have_one_score_per_column() -> None:
    model, x = nn.Linear(4, 3).eval(), torch.randn(2, 4)
    e = whyformer.explain(model, x, method="input_x_gradient", target=1)
    torch.testing.assert_close(e.scores, x * model.weight[1].detach())

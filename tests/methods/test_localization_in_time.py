"""Sound and video models trained in the test to recognise a burst or a square, and localization of these in time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import whyformer

LENGTH, BURST = 512, 64
FRAMES, SIDE, PATCH = 6, 12, 4


class ToneClassifier(nn.Module):
    """Classifies which of two tones occurs in noise: frames of 16 samples, one layer, mean pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.frames = nn.Conv1d(1, 16, 16, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(16, 2)

    def forward(self, input_values: Tensor) -> Tensor:
        return self.head(self.encoder(functional.relu(self.frames(input_values[:, None])).transpose(1, 2)).mean(1))


def bursts(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(sounds, tones, start of each burst)"""
    generator = torch.Generator().manual_seed(seed)
    sounds = 0.1 * torch.randn(count, LENGTH, generator=generator)
    tones = torch.randint(2, (count,), generator=generator)
    starts = torch.randint(LENGTH // BURST, (count,), generator=generator) * BURST
    times = torch.arange(BURST, dtype=torch.float32)
    for sound, tone, start in zip(sounds, tones.tolist(), starts.tolist(), strict=True):
        sound[start : start + BURST] += torch.sin(times * (0.4, 1.6)[tone])
    return sounds, tones, starts


class SquareClassifier(nn.Module):
    """Classifies whether the square that appears in one frame is red or blue: patches of each frame, one layer, mean pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(3 * PATCH * PATCH, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(16, 2)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = pixel_values.unfold(3, PATCH, PATCH).unfold(4, PATCH, PATCH)  # B T C r c p p
        x = x.permute(0, 1, 3, 4, 2, 5, 6).flatten(4).flatten(1, 3)
        return self.head(self.encoder(self.patches(x)).mean(1))


def squares(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(videos, colours, (frame, row, column) of the patch with the square)"""
    generator = torch.Generator().manual_seed(seed)
    videos = 0.1 * torch.randn(count, FRAMES, 3, SIDE, SIDE, generator=generator)
    colours = torch.randint(2, (count,), generator=generator)
    positions = torch.stack([torch.randint(n, (count,), generator=generator) for n in (FRAMES, SIDE // PATCH, SIDE // PATCH)], 1)
    for video, colour, (frame, row, column) in zip(videos, colours.tolist(), positions.tolist(), strict=True):
        video[frame, 2 * colour, row * PATCH : row * PATCH + PATCH, column * PATCH : column * PATCH + PATCH] += 1.5
    return videos, colours, positions


def train(model: nn.Module, draw: object, steps: int) -> nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    for step in range(steps):
        inputs, labels, _ = draw(64, 100 + step)  # type: ignore[operator]
        loss = functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def tone_classifier() -> nn.Module:
    torch.manual_seed(0)
    return train(ToneClassifier(), bursts, 120)


@pytest.fixture(scope="module")
def square_classifier() -> nn.Module:
    torch.manual_seed(0)
    return train(SquareClassifier(), squares, 80)


@pytest.mark.parametrize("method", ["input_x_gradient", "attnlrp", "lrp_ah_ln", "occlusion"])
def test_relevance_is_highest_at_burst(tone_classifier: nn.Module, method: str) -> None:
    sounds, tones, starts = bursts(16, 1)
    assert bool((tone_classifier(sounds).argmax(1) == tones).float().mean() > 0.9)
    settings = {"window": 16} if method == "occlusion" else {}
    e = whyformer.explain(tone_classifier, sounds, method, tones.tolist(), **settings)
    shares = e.scores.clamp(min=0).unflatten(1, (-1, BURST)).sum(-1)
    assert float((shares.argmax(1) * BURST == starts).float().mean()) >= 0.9


@pytest.mark.parametrize("method", ["attnlrp", "lrp_ah_ln"])
def test_relevance_is_highest_at_square(square_classifier: nn.Module, method: str) -> None:
    videos, colours, positions = squares(16, 1)
    assert bool((square_classifier(videos).argmax(1) == colours).float().mean() > 0.9)
    e = whyformer.explain(square_classifier, videos, method, colours.tolist())
    assert (e.level, e.frames) == ("pixel", FRAMES)
    cells = e.scores.clamp(min=0).unflatten(2, (-1, PATCH)).unflatten(4, (-1, PATCH)).sum((3, 5)).flatten(1)
    expected = (positions[:, 0] * 3 + positions[:, 1]) * 3 + positions[:, 2]
    assert float((cells.argmax(1) == expected).float().mean()) >= 0.9


def test_rollout_of_video_has_grid_for_each_frame(square_classifier: nn.Module) -> None:
    videos, colours, _ = squares(4, 2)
    e = whyformer.explain(square_classifier, videos, "rollout", colours.tolist())
    assert (e.level, e.frames, e.grid, tuple(e.scores.shape)) == ("patch", FRAMES, (3, 3), (4, FRAMES * 9))


def test_video_with_too_few_frames_raises() -> None:
    import transformers as hf

    options = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "num_labels": 4}
    config = hf.VideoMAEConfig(**options, image_size=16, patch_size=8, num_frames=4, tubelet_size=2)
    model = hf.VideoMAEForVideoClassification(config).eval()
    with pytest.raises(whyformer.errors.InputError, match="a video of 2 frames; it takes 4"):
        whyformer.explain(model, torch.zeros(1, 2, 3, 16, 16), "saliency", 1)
    video = torch.zeros(4, 3, 16, 16)
    with pytest.raises(whyformer.errors.InputError, match="leading axis"):
        whyformer.explain(model, video, "saliency", 1)
    assert whyformer.explain(model, video[None], "saliency", 1).frames  # the way out

"""Sound and video: a model that was trained in the test to hear a burst and to see a square, and maps at the right moment."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import whyformer

LENGTH, BURST = 512, 64
FRAMES, SIDE, PATCH = 6, 12, 4


class Hears(nn.Module):
    """Frames of 16 moments, two layers of attention, the mean: which of two tones sounds somewhere in the noise."""

    def __init__(self) -> None:
        super().__init__()
        self.frames = nn.Conv1d(1, 16, 16, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(16, 2)

    def forward(self, input_values: Tensor) -> Tensor:
        return self.head(self.encoder(functional.relu(self.frames(input_values[:, None])).transpose(1, 2)).mean(1))


def bursts(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(sounds, tones, where each burst begins)"""
    generator = torch.Generator().manual_seed(seed)
    sounds = 0.1 * torch.randn(count, LENGTH, generator=generator)
    tones = torch.randint(2, (count,), generator=generator)
    begins = torch.randint(LENGTH // BURST, (count,), generator=generator) * BURST
    moments = torch.arange(BURST, dtype=torch.float32)
    for sound, tone, begin in zip(sounds, tones.tolist(), begins.tolist(), strict=True):
        sound[begin : begin + BURST] += torch.sin(moments * (0.4, 1.6)[tone])
    return sounds, tones, begins


class Sees(nn.Module):
    """Patches of each frame, one layer of attention, the mean: does the square that appears in one frame shine red or blue?"""

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
    """(videos, colours, (frame, row, column) of the square's patch)"""
    generator = torch.Generator().manual_seed(seed)
    videos = 0.1 * torch.randn(count, FRAMES, 3, SIDE, SIDE, generator=generator)
    colours = torch.randint(2, (count,), generator=generator)
    places = torch.stack([torch.randint(n, (count,), generator=generator) for n in (FRAMES, SIDE // PATCH, SIDE // PATCH)], 1)
    for video, colour, (frame, row, column) in zip(videos, colours.tolist(), places.tolist(), strict=True):
        video[frame, 2 * colour, row * PATCH : row * PATCH + PATCH, column * PATCH : column * PATCH + PATCH] += 1.5
    return videos, colours, places


def trained(model: nn.Module, draw: object, steps: int) -> nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    for step in range(steps):
        inputs, labels, _ = draw(64, 100 + step)  # type: ignore[operator]
        loss = functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def hears() -> nn.Module:
    torch.manual_seed(0)
    return trained(Hears(), bursts, 120)


@pytest.fixture(scope="module")
def sees() -> nn.Module:
    torch.manual_seed(0)
    return trained(Sees(), squares, 80)


@pytest.mark.parametrize("method", ["input_x_gradient", "attnlrp", "lrp_ah_ln", "occlusion"])
def test_a_burst_is_heard_where_it_sounds(hears: nn.Module, method: str) -> None:
    sounds, tones, begins = bursts(16, 1)
    assert bool((hears(sounds).argmax(1) == tones).float().mean() > 0.9)
    settings = {"window": 16} if method == "occlusion" else {}
    e = whyformer.explain(hears, sounds, method, tones.tolist(), **settings)
    shares = e.scores.clamp(min=0).unflatten(1, (-1, BURST)).sum(-1)
    assert float((shares.argmax(1) * BURST == begins).float().mean()) >= 0.9


@pytest.mark.parametrize("method", ["attnlrp", "lrp_ah_ln"])
def test_a_square_is_seen_in_its_frame_and_at_its_place(sees: nn.Module, method: str) -> None:
    videos, colours, places = squares(16, 1)
    assert bool((sees(videos).argmax(1) == colours).float().mean() > 0.9)
    e = whyformer.explain(sees, videos, method, colours.tolist())
    assert (e.level, e.frames) == ("pixel", FRAMES)
    cells = e.scores.clamp(min=0).unflatten(2, (-1, PATCH)).unflatten(4, (-1, PATCH)).sum((3, 5)).flatten(1)
    wanted = (places[:, 0] * 3 + places[:, 1]) * 3 + places[:, 2]
    assert float((cells.argmax(1) == wanted).float().mean()) >= 0.9


def test_tubes_are_cells_of_each_frame(sees: nn.Module) -> None:
    videos, colours, _ = squares(4, 2)
    e = whyformer.explain(sees, videos, "rollout", colours.tolist())
    assert (e.level, e.frames, e.grid, tuple(e.scores.shape)) == ("patch", FRAMES, (3, 3), (4, FRAMES * 9))


def test_a_video_of_too_few_frames_is_told() -> None:
    import transformers as hf

    options = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "num_labels": 4}
    config = hf.VideoMAEConfig(**options, image_size=16, patch_size=8, num_frames=4, tubelet_size=2)
    model = hf.VideoMAEForVideoClassification(config).eval()
    with pytest.raises(whyformer.errors.InputError, match="a video of 2 frames; it takes 4"):
        whyformer.explain(model, torch.zeros(1, 2, 3, 16, 16), "saliency", 1)

"""Rows that a model computes in parts: channels of several convolutions, merged streams, look-ups sample by sample."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import whyformer
from whyformer.errors import MethodNotApplicable

WIDTH, TOKENS, CLASSES = 12, 4, 3


class Embedded(nn.Module):
    """Patches of 4 × 4 pixels, embedded by several convolutions, each of which computes a part of the channels."""

    def __init__(self, kernels: list[int], strides: list[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        each = WIDTH // len(kernels)
        convolutions = (nn.Conv2d(3, each, k, s, (k - s) // 2) for k, s in zip(kernels, strides, strict=True))
        self.parts = nn.ModuleList(convolutions)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(torch.cat([part(x) for part in self.parts], 1).flatten(2).mT).mean(1))


@pytest.mark.parametrize("kernels", [[4, 4], [4, 8], [4, 8, 12], [6, 4]])
@pytest.mark.parametrize("method", ["rollout", "libragrad", "gae"])
def test_channels_of_several_convolutions_are_one_row_of_patches(kernels: list[int], method: str) -> None:
    model, x = Embedded(kernels, [4] * len(kernels)).double().eval(), torch.randn(2, 3, 8, 12, dtype=torch.float64)
    weight = torch.cat([F.pad(part.weight, ((12 - k) // 2,) * 4) for k, part in zip(kernels, model.parts, strict=True)])
    one = Embedded([12], [4]).double().eval()  # all kernels in one of the largest size
    one.load_state_dict({**model.state_dict(), "parts.0.weight": weight, "parts.0.bias": torch.cat([p.bias for p in model.parts])}, strict=False)
    explained = whyformer.explain(model, x, method, target=1)
    expected = whyformer.explain(one, x, method, target=1)
    assert explained.scores.shape == (2, 2, 3) or explained.scores.shape == (2, 6)
    torch.testing.assert_close(explained.scores.flatten(1), expected.scores.flatten(1))


class Inside(nn.Module):
    """Pixels attend inside of each patch, and their features are added to the patches, which attend to one another."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.patch, self.pixel = nn.Linear(12, WIDTH), nn.Linear(3, 4)
        layer = lambda width: nn.TransformerEncoderLayer(width, 2, 8, batch_first=True, norm_first=True)  # noqa: E731
        self.inner, self.outer = (nn.ModuleList([layer(width) for _ in range(depth)]) for width in (4, WIDTH))
        self.merge = nn.ModuleList([nn.Linear(16, WIDTH) for _ in range(depth)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        patches = x.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 4, 5, 1).flatten(1, 2)  # [B, N, 2, 2, 3]
        pixels, state = self.pixel(patches).flatten(0, 1).flatten(1, 2), self.patch(patches.flatten(2))
        for inner, merge, outer in zip(self.inner, self.merge, self.outer, strict=True):
            pixels = inner(pixels)
            state = outer(state + merge(pixels.flatten(1)).view(state.shape))
        return self.head(state.mean(1))


@pytest.mark.parametrize("block", [-1, -2])
def test_maps_of_patches_to_which_merged_pixels_are_added(block: int) -> None:
    model, x = Inside().double().eval(), torch.randn(2, 3, 4, 6, dtype=torch.float64)
    explained = whyformer.explain(model, x, "raw_attention", target=1, block=block)
    maps: list[Tensor] = []
    attention = model.outer[block].self_attn
    norm, layer = model.outer[block].norm1, attention.forward
    handle = model.outer[block].register_forward_pre_hook(lambda _, args: maps.append(layer(*[norm(args[0])] * 3)[1]))
    model(x)
    handle.remove()
    torch.testing.assert_close(explained.scores.flatten(1), maps[0].mean(1))  # the target reads the mean of all rows


@pytest.mark.parametrize("method", ["rollout", "gae", "norm_attention", "value_zeroing"])
def test_maps_of_all_blocks_of_such_patches_are_refused(method: str) -> None:
    with pytest.raises(MethodNotApplicable, match="resolutions"):
        whyformer.explain(Inside().eval(), torch.randn(1, 3, 4, 6), method, target=1)


class SampleBySample(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.block(torch.stack([self.table(ids) for ids in input_ids])).mean(1))


@pytest.mark.parametrize("method", ["lrp", "attnlrp", "input_x_gradient", "gae", "integrated_gradients"])
def test_tokens_looked_up_sample_by_sample_are_refused_with_a_way_out(method: str) -> None:
    model, ids = SampleBySample().eval(), torch.arange(15).view(3, 5)
    with pytest.raises(MethodNotApplicable, match="one sample at a time"):
        whyformer.explain(model, ids, method, target=1)
    setting = {"batch_size": 1, "steps": 2} if method == "integrated_gradients" else {}
    for i in range(3):
        assert whyformer.explain(model, ids[i : i + 1], method, target=1, **setting).scores.shape == (1, 5)

"""Relevance reaches the right input: through a batch norm, for images added to words, through learned queries, for joined patches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import whyformer
from zoo import randomise


class ChannelsLast(torch.autograd.Function):
    """Returns a channels-last gradient; for a batch of one, with an arbitrary batch stride."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _, channels, _, columns = gradient.shape
        last = gradient.movedim(1, -1).contiguous().movedim(-1, 1)
        is_single = len(gradient) == 1
        return last.as_strided(last.shape, (channels, 1, columns * channels, channels)) if is_single else last


class BatchNormModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 2, 2), nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 16, 5)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.head(ChannelsLast.apply(self.norm(self.conv(pixel_values))).flatten(1))


def test_single_image_equals_its_row_of_a_batch_after_batch_norm() -> None:
    model, x = randomise(BatchNormModel()).double(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    batch = whyformer.explain(model, x, "input_x_gradient", [1, 3])
    single = whyformer.explain(model, x[1:], "input_x_gradient", [3])
    assert torch.allclose(single.scores[0], batch.scores[1], rtol=1e-9)


class SingleHeadBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x))[:, None].chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v)[:, 0])


class ImageAddedToWords(nn.Module):
    """Adds image patches to the first words, or only appends them as rows."""

    def __init__(self, appended_only: bool) -> None:
        super().__init__()
        self.appended_only = appended_only
        self.embed, self.patch = nn.Embedding(20, 8), nn.Conv2d(3, 8, 4, 4)
        self.blocks = nn.ModuleList(SingleHeadBlock(8) for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Tensor:
        words, patches = self.embed(input_ids), self.patch(pixel_values).flatten(2).mT
        x = torch.cat([words, patches], 1)
        if not self.appended_only:
            x = torch.cat([words[:, :4] + patches, words[:, 4:], patches], 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


@pytest.mark.parametrize("appended_only", [True, False])
def test_image_patches_added_to_words_are_attributed_to_image(appended_only: bool) -> None:
    """Compared with gradient × input at the pixels and at the word embeddings."""
    model = randomise(ImageAddedToWords(appended_only)).double()
    ids, pixels = torch.randint(0, 20, (2, 6)), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    explanation = whyformer.explain(model, {"input_ids": ids, "pixel_values": pixels}, "input_x_gradient", [1, 3])
    embeddings: list[Tensor] = []

    def make_leaf(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        embeddings.append(output.detach().requires_grad_())
        return embeddings[0]

    handle, leaf = model.embed.register_forward_hook(make_leaf), pixels.clone().requires_grad_()
    logits = model(ids, leaf)
    handle.remove()
    gradients = torch.autograd.grad(logits[0, 1] + logits[1, 3], [leaf, embeddings[0]])
    assert torch.allclose(explanation.part("pixel_values").scores, (pixels * gradients[0]).sum(1), rtol=1e-9)
    assert torch.allclose(explanation.part("input_ids").scores, (embeddings[0] * gradients[1]).sum(-1).detach(), rtol=1e-9)


class LearnedQueryModel(nn.Module):
    """Blocks on learned queries; the input of the first depends on no pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.patch = nn.Parameter(torch.randn(1, 3, 8)), nn.Conv2d(3, 8, 4, 4)
        self.blocks = nn.ModuleList(CrossAttentionBlock() for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x, patches = self.queries.expand(len(pixel_values), -1, -1), self.patch(pixel_values).flatten(2).mT
        for block in self.blocks:
            x = block(x, patches)
        return self.head(x.mean(1))


class CrossAttentionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x: Tensor, patches: Tensor) -> Tensor:
        k, v = self.kv(patches)[:, None].chunk(2, -1)
        return x + self.out(F.scaled_dot_product_attention(self.q(x)[:, None], k, v)[:, 0])


def test_lrp_through_learned_queries_reaches_pixels() -> None:
    model, x = randomise(LearnedQueryModel()), torch.randn(2, 3, 8, 8)
    assert whyformer.explain(model, x, "lrp", [1, 3]).scores.any()


class MergedPatches(nn.Module):
    """Averages the vectors of four patches into one row."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.blocks = nn.Linear(6, 8), nn.ModuleList(SingleHeadBlock(8) for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, inputs_embeds: Tensor, spatial_shapes: Tensor) -> Tensor:
        x = self.patch(inputs_embeds).unflatten(1, (2, 2, 2, 2)).mean((2, 4)).flatten(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def test_score_of_merged_row_is_shared_by_its_patches() -> None:
    inputs = {"inputs_embeds": torch.randn(2, 16, 6), "spatial_shapes": torch.full((2, 2), 4)}
    explanation = whyformer.explain(randomise(MergedPatches()), inputs, "rollout", [1, 3])
    assert explanation.inputs == ("inputs_embeds",)  # spatial_shapes has no tokens
    grid = explanation.scores.unflatten(1, (2, 2, 2, 2))
    assert torch.allclose(grid, grid[:, :, :1, :, :1].expand_as(grid))
    assert len(explanation.scores[0].unique()) == 4

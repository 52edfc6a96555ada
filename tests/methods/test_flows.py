"""What flows back arrives where it belongs: past a batch norm, to a picture that is added to words, past learned queries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import whyformer
from zoo import randomise


class ChannelsLast(torch.autograd.Function):
    """Hands back what flows with its channels last; of one sample with a step from sample to sample that says nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, flow: Tensor) -> Tensor:
        _, channels, _, columns = flow.shape
        last = flow.movedim(1, -1).contiguous().movedim(-1, 1)
        alone = len(flow) == 1
        return last.as_strided(last.shape, (channels, 1, columns * channels, channels)) if alone else last


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 2, 2), nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 16, 5)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.head(ChannelsLast.apply(self.norm(self.conv(pixel_values))).flatten(1))


def test_a_picture_alone_has_the_scores_it_has_among_others_behind_a_batch_norm() -> None:
    model, x = randomise(Normed()).double(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    together = whyformer.explain(model, x, "input_x_gradient", [1, 3])
    alone = whyformer.explain(model, x[1:], "input_x_gradient", [3])
    assert torch.allclose(alone.scores[0], together.scores[1], rtol=1e-9)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x))[:, None].chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v)[:, 0])


class Added(nn.Module):
    """The patches of a picture are added to the words they lie under or follow them in rows of their own."""

    def __init__(self, beside: bool) -> None:
        super().__init__()
        self.beside = beside
        self.embed, self.patch = nn.Embedding(20, 8), nn.Conv2d(3, 8, 4, 4)
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Tensor:
        words, patches = self.embed(input_ids), self.patch(pixel_values).flatten(2).mT
        x = torch.cat([words, patches], 1)
        if not self.beside:
            x = torch.cat([words[:, :4] + patches, words[:, 4:], patches], 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


@pytest.mark.parametrize("beside", [True, False])
def test_what_a_picture_adds_to_words_is_the_pictures(beside: bool) -> None:
    """Gradient × input by hand at the pixels, and at the look-up of the words where their rows hold both."""
    model = randomise(Added(beside)).double()
    ids, pixels = torch.randint(0, 20, (2, 6)), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    found = whyformer.explain(model, {"input_ids": ids, "pixel_values": pixels}, "input_x_gradient", [1, 3])
    looked_up: list[Tensor] = []

    def leave(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        looked_up.append(output.detach().requires_grad_())
        return looked_up[0]

    handle, leaf = model.embed.register_forward_hook(leave), pixels.clone().requires_grad_()
    logits = model(ids, leaf)
    handle.remove()
    flows = torch.autograd.grad(logits[0, 1] + logits[1, 3], [leaf, looked_up[0]])
    assert torch.allclose(found.part("pixel_values").scores, (pixels * flows[0]).sum(1), rtol=1e-9)
    assert torch.allclose(found.part("input_ids").scores, (looked_up[0] * flows[1]).sum(-1).detach(), rtol=1e-9)


class Queries(nn.Module):
    """Learned queries enter the blocks, the first of which holds nothing of the picture."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.patch = nn.Parameter(torch.randn(1, 3, 8)), nn.Conv2d(3, 8, 4, 4)
        self.blocks = nn.ModuleList(Looks() for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x, patches = self.queries.expand(len(pixel_values), -1, -1), self.patch(pixel_values).flatten(2).mT
        for block in self.blocks:
            x = block(x, patches)
        return self.head(x.mean(1))


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x: Tensor, patches: Tensor) -> Tensor:
        k, v = self.kv(patches)[:, None].chunk(2, -1)
        return x + self.out(F.scaled_dot_product_attention(self.q(x)[:, None], k, v)[:, 0])


def test_relevance_passes_blocks_that_learned_queries_enter() -> None:
    model, x = randomise(Queries()), torch.randn(2, 3, 8, 8)
    assert whyformer.explain(model, x, "lrp", [1, 3]).scores.any()


class Merged(nn.Module):
    """Vectors of patches, four of which a tower joins into one row."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.blocks = nn.Linear(6, 8), nn.ModuleList(Block(8) for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, inputs_embeds: Tensor, spatial_shapes: Tensor) -> Tensor:
        x = self.patch(inputs_embeds).unflatten(1, (2, 2, 2, 2)).mean((2, 4)).flatten(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def test_the_score_of_a_row_is_spread_over_the_patches_that_were_joined() -> None:
    inputs = {"inputs_embeds": torch.randn(2, 16, 6), "spatial_shapes": torch.full((2, 2), 4)}
    found = whyformer.explain(randomise(Merged()), inputs, "rollout", [1, 3])
    assert found.inputs == ("inputs_embeds",)  # the shapes are no tokens
    square = found.scores.unflatten(1, (2, 2, 2, 2))
    assert torch.allclose(square, square[:, :, :1, :, :1].expand_as(square))
    assert len(found.scores[0].unique()) == 4

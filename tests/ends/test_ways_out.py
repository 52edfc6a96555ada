"""What a refusal names as the way out works when it is followed; ``auto`` takes the next of its choices."""

from __future__ import annotations

import copy

import pytest
import torch
from test_end_functions import Block, Model, pictures
from torch import Tensor, nn

from whyformer import explain
from whyformer.errors import MethodNotApplicable, WhyformerError
from whyformer.methods import METHODS


class Attention(nn.Module):
    """The first half of a block, without its residual sum."""

    def __init__(self, block: Block, norm: bool) -> None:
        super().__init__()
        self.norm, self.inner, self.apart = block.norm1, block, norm

    def forward(self, x: Tensor) -> Tensor:
        b = self.inner
        q, k, v = b.qkv(self.norm(x) if self.apart else x).unflatten(-1, (3, b.heads, -1)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)
        return b.project((weights @ v).transpose(1, 2).flatten(2))


class Forward(nn.Module):
    def __init__(self, block: Block) -> None:
        super().__init__()
        self.norm, self.mlp = block.norm2, block.mlp

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(x))


class PreNorm(nn.Module):
    """Both halves under one class."""

    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x)


class Pairs(Model):
    """``ModuleList([attention, feed-forward])`` for each block, as in vit-pytorch."""

    def __init__(self, wrapped: bool = False, detached: bool = False) -> None:
        super().__init__()
        halves = [(Attention(copy.deepcopy(b), True), Forward(copy.deepcopy(b))) for b in self.blocks]
        del self.blocks
        self.layers = nn.ModuleList(nn.ModuleList(map(PreNorm, h) if wrapped else h) for h in halves)
        self.detached = detached

    def forward(self, pixels: Tensor) -> Tensor:
        pixels = pixels.detach() if self.detached else pixels
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.places
        for attention, forward in self.layers:
            x = x + attention(x)
            x = x + forward(x)
        return self.head(self.norm(x)[:, 0])


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("method", ["input_x_gradient", "attnlrp", "lrp_ah_ln", "lrp", "cp_lrp", "occlusion"])
def test_halves_of_a_block_are_no_blocks(method: str, wrapped: bool) -> None:
    model = Pairs(wrapped)
    found, wanted = (explain(m, pictures(), method, 1) for m in (model, Model()))
    torch.testing.assert_close(found.scores, wanted.scores, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("wrapped", [False, pytest.param(True, marks=pytest.mark.whole)])
def test_pieces_of_a_block_are_answered_rightly_or_refused(wrapped: bool) -> None:
    for method, row in METHODS.items():
        if row.family == "perturbation":
            continue
        try:
            found = explain(Pairs(wrapped), pictures(), method, 1)
        except WhyformerError:
            continue
        if method != "auto":
            torch.testing.assert_close(
                found.scores, explain(Model(), pictures(), method, 1).scores, rtol=1e-7, atol=1e-10
            )


class Pools(Model):
    """Patches are averaged: there are no blocks."""

    def __init__(self, detached: bool = False) -> None:
        super().__init__()
        del self.blocks
        self.detached = detached

    def forward(self, pixels: Tensor) -> Tensor:
        pixels = pixels.detach() if self.detached else pixels
        return self.head(self.norm(self.patches(pixels).relu().flatten(2).mean(2)))


class Mixes(Model):
    """Rows are mixed by fixed weights, and nothing attends; its halves of blocks are attributes."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks
        self.tokens, self.channels = nn.Linear(17, 17).double(), nn.Linear(16, 16).double()

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.places
        x = x + self.tokens(x.mT).mT
        return self.head(self.norm(x + self.channels(x).relu())[:, 0])


def named(error: Exception) -> list[str]:
    return str(error).partition("Methods that apply: ")[2].replace(" ", "").split(",")


@pytest.mark.parametrize("method", ["libragrad", "gae", "transformer_attribution", "partial_lrp", "gradcam"])
def test_the_methods_named_apply(method: str) -> None:
    model = Pools()
    with pytest.raises(MethodNotApplicable) as caught:
        explain(model, pictures(), method, 1)
    others = named(caught.value)
    assert {"auto", "input_x_gradient", "lrp_ah_ln", "occlusion"} <= set(others)
    assert "gradcam" not in others
    for other in others:
        assert explain(model, pictures(), other, 1).scores.any()


@pytest.mark.parametrize("method", ["libragrad", "gradcam"])
def test_blocks_that_mix_rows_by_fixed_weights(method: str) -> None:
    assert explain(Mixes(), pictures(), method, 1).scores.any()


def test_where_no_graph_leads_back_methods_that_need_none_are_named() -> None:
    model = Pools(detached=True)
    with pytest.raises(MethodNotApplicable) as caught:
        explain(model, pictures(), "gradcam", 1)
    others = named(caught.value)
    assert {"auto", "input_x_gradient", "lrp", "lrp_ah_ln", "occlusion"} <= set(others)
    for other in others:
        assert explain(model, pictures(), other, 1).scores.any()


def test_auto_takes_the_next_choice() -> None:
    e = explain(Pools(), pictures(), "auto", 1)
    assert e.diagnostics["auto"]["method"] == "lrp_ah_ln"
    assert "libragrad" in e.diagnostics["auto"]["passed_over"]


class Optional(Model):
    """A list that holds a place for what this model has none of, as timm's and x-transformers' do."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleList([None, None])
        self.others = nn.ModuleList([None, nn.Sequential(nn.Linear(2, 2))])


@pytest.mark.parametrize("method", ["lrp", "gae", "libragrad", "occlusion"])
def test_a_list_of_nothing(method: str) -> None:
    found, wanted = (explain(m, pictures(), method, 1) for m in (Optional(), Model()))
    torch.testing.assert_close(found.scores, wanted.scores)

"""Attentions and blocks are read off a program, however it is kept in modules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whyformer.models.facts import groups_of
from whyformer.program.attentions import attentions
from whyformer.program.blocks import ProgramBlock, blocks
from whyformer.program.record import Program
from whyformer.program.regions import regions

from .test_record import read

D = 6
generator = torch.Generator().manual_seed(0)
X = torch.randn(2, 5, D, dtype=torch.float64, generator=generator)
W = [torch.randn(D, D, dtype=torch.float64, generator=generator) / 2 for _ in range(8)]


def attend(x: Tensor) -> Tensor:
    q, k, v = (x @ w for w in W[:3])
    return (q @ k.mT).softmax(-1) @ v @ W[3]


def fused(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*(x @ w for w in W[:3])) @ W[3]


def by_hand(x: Tensor) -> Tensor:
    e = (x @ W[0] @ (x @ W[1]).mT).exp()
    return torch.einsum("bqk,bkd->bqd", (e / e.sum(-1, keepdim=True)).contiguous(), x @ W[2]) @ W[3]


def norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, (D,))


def feed(x: Tensor) -> Tensor:
    return F.gelu(x @ W[4]) @ W[5]


def pre(x: Tensor, attention: Callable[[Tensor], Tensor]) -> Tensor:
    x = x + attention(norm(x))
    return x + feed(norm(x))


def post(x: Tensor, attention: Callable[[Tensor], Tensor]) -> Tensor:
    x = norm(x + attention(x))
    return norm(x + feed(x))


def parallel(x: Tensor, attention: Callable[[Tensor], Tensor]) -> Tensor:
    y = norm(x)
    return x + attention(y) + feed(y)


def in_place(x: Tensor, attention: Callable[[Tensor], Tensor]) -> Tensor:
    x += attention(norm(x))
    x += feed(norm(x))
    return x


def run(
    block: Callable[..., Tensor], attention: Callable[[Tensor], Tensor], count: int
) -> tuple[Program, list[Tensor]]:
    """(the program of so many blocks, what enters each and leaves the last)."""
    states = []

    def model(_: nn.Module, x: Tensor) -> Tensor:
        x = x @ W[6]
        for _ in range(count):
            states.append(x.clone())
            x = block(x, attention)
        states.append(x.clone())
        return norm(x)[:, 0] @ W[7]

    return read(model, X), states


@pytest.mark.parametrize("attention", [attend, fused, by_hand])
@pytest.mark.parametrize("block", [pre, post, parallel, in_place])
def test_blocks_in_one_forward(block: Callable[..., Tensor], attention: Callable[[Tensor], Tensor]) -> None:
    program, states = run(block, attention, 3)
    attending = [m.call for m in attentions(program, regions(program))]
    assert len(attending) == 3
    found = blocks(program, attending)
    assert len(found) == 3
    borders = [*(first for first, _ in found), found[-1][1]]
    assert [last for _, last in found] == borders[1:]
    for call, state in zip(borders, states, strict=True):
        assert torch.allclose(program.values[program.calls[call].results[0]].rows[-1], state)


def test_a_block_alone_ends_at_its_last_sum() -> None:
    program, states = run(pre, attend, 1)
    ((_, last),) = blocks(program, [m.call for m in attentions(program, regions(program))])
    assert torch.allclose(program.values[program.calls[last].results[0]].rows[-1], states[-1])


def two_towers(_: nn.Module, x: Tensor) -> Tensor:
    left, right = pre(x @ W[6], attend), pre(x @ W[7], attend)
    return (norm(left)[:, 0] * norm(right)[:, 0]) @ W[5]


def shorter(_: nn.Module, x: Tensor) -> Tensor:
    x = pre(x @ W[6], attend)
    return pre(x[:, ::2], attend).mean(1)


def none(_: nn.Module, x: Tensor) -> Tensor:
    return feed(x @ W[6]).mean(1)


@pytest.mark.parametrize("model", [two_towers, shorter, none])
def test_what_is_no_chain_of_blocks_has_none(model: Callable[..., Tensor]) -> None:
    program = read(model, X)
    assert blocks(program, [m.call for m in attentions(program, regions(program))]) == ()


class Kept(nn.Module):
    """Blocks in containers, and whether each of the container's modules is one."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        attention, feeds = (nn.ModuleList(Part(f) for _ in range(3)) for f in (attend, feed))
        if way == "pairs":
            self.layers = nn.ModuleList(nn.ModuleList(pair) for pair in zip(attention, feeds, strict=True))
        elif way == "flat":
            self.layers = nn.ModuleList(m for pair in zip(attention, feeds, strict=True) for m in pair)
        else:
            self.layers = nn.ModuleList(Whole() for _ in range(3 if way == "blocks" else 2))
            self.last = Whole()
        if way == "back to front":
            self.layers = self.layers[:2] + nn.ModuleList([self.last])

    def forward(self, x: Tensor) -> Tensor:
        x = x @ W[6]
        if self.way == "pairs":
            for attention, branch in self.layers:
                x = x + attention(x)
                x = x + branch(x)
        elif self.way == "flat":
            for layer in self.layers:
                x = x + layer(x)
        else:
            for layer in list(self.layers)[:: -1 if self.way == "back to front" else 1]:
                x = layer(x)
            x = self.last(x) if self.way == "one beside" else x
        return x[:, 0] @ W[7]


class Part(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.inner = function, nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(norm(x))


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed = Part(attend), Part(feed)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.feed(x)


@pytest.mark.parametrize("way", ["blocks", "one beside", "pairs", "flat", "back to front"])
def test_modules_of_a_container_are_blocks_where_they_are_what_the_program_shows(way: str) -> None:
    model = Kept(way)
    (found,) = groups_of(model, ((X,), {})).values()
    if way == "blocks":
        assert found == list(model.layers)
    else:
        assert found == [ProgramBlock(i) for i in range(3)]

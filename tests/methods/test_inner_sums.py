"""Norms of the vectors of attention by hand, where its residual sum lies in a branch of its block, or where an operation
behind it differs between rows or mixes them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import whyformer
from whyformer.explaining import open_model
from whyformer.methods.maps.streams import begin
from whyformer.methods.vectors.mixtures import AttentionVectors
from zoo import randomise

WIDTH, NARROW, HEADS, TOKENS, CLASSES = 12, 6, 3, 18, 3
QUERIES = 4


class Attend(nn.Module):
    """Attention that stores its map, its values and the vector to which its output is added."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(inner, inner), nn.Linear(inner, inner)
        self.v, self.out, self.norm = nn.Linear(width, inner), nn.Linear(inner, inner), nn.LayerNorm(inner)

    def forward(self, asked: Tensor, x: Tensor, residual: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (self.q(asked), self.k(asked), self.v(x)))
        self.map, self.values, self.residual = (q @ k.mT / 2).softmax(-1), v, residual
        return self.out((self.map @ v).transpose(1, 2).flatten(2)) + residual

    def mixed(self, normed: bool) -> Tensor:
        """The norms of the vectors, each row divided by its sum."""
        n, weight = self.map.shape[-1], self.out.weight.unflatten(1, (HEADS, -1))
        parts = torch.einsum("bhij,bhjd,ohd->bijo", self.map, self.values, weight)
        whole = parts.sum(2) + self.out.bias + self.residual
        parts = parts + torch.eye(n)[..., None].double() * self.residual[:, :, None]
        if normed:
            deviation = (whole.var(-1, unbiased=False) + self.norm.eps).sqrt()
            parts = (parts - parts.mean(-1, keepdim=True)) * self.norm.weight / deviation[:, :, None, None]
        sizes = parts.norm(dim=-1)
        return sizes / sizes.sum(-1, keepdim=True)


class Bottleneck(nn.Module):
    """A narrow block, as in MobileBERT: everything in it is bypassed by the wide residual."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.asked, self.attention = nn.Linear(WIDTH, NARROW), nn.Linear(WIDTH, NARROW), Attend(WIDTH, NARROW)
        self.mlp, self.norm = nn.Linear(NARROW, NARROW), nn.LayerNorm(NARROW)
        self.up, self.after = nn.Linear(NARROW, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention.norm(self.attention(self.asked(x), x, self.down(x)))
        y = self.norm(y + self.mlp(y).relu())
        return self.after(x + self.up(y))

    def attentions(self) -> list[tuple[Attend, bool]]:
        return [(self.attention, True)]


class Shortcut(nn.Module):
    """Two attentions, and a branch from behind the first to behind the second, as in LongCat."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attend(WIDTH, WIDTH), Attend(WIDTH, WIDTH)
        self.mlp, self.last, self.branch = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = self.first(y, y, x)
        y = self.norms[1](x)
        around = self.branch(y).tanh()
        x = x + self.mlp(y).relu()
        y = self.norms[2](x)
        x = self.second(y, y, x)
        return x + self.last(self.norms[3](x)).relu() + around

    def attentions(self) -> list[tuple[Attend, bool]]:
        return [(self.first, False), (self.second, False)]


class Classifier(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(block() for _ in range(2)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


@pytest.mark.parametrize("scope", ["residual", "norm"])
@pytest.mark.parametrize("block", [Bottleneck, Shortcut])
def test_norm_attention(block: type[nn.Module], scope: str) -> None:
    model = randomise(Classifier(block)).double().eval()
    x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        model(x)
        row = torch.eye(TOKENS).double()[:1].expand(2, -1, -1)
        for one in list(model.blocks)[::-1]:
            for attention, normed in one.attentions()[::-1]:
                row = row @ attention.mixed(normed and scope == "norm")
    found = whyformer.explain(model, x, "norm_attention", scope=scope).scores
    torch.testing.assert_close(found, row[:, 0], rtol=1e-9, atol=1e-12)


class Altered(nn.Module):
    """A block with an operation that is not the same for all rows.

    Args:
        way: "gate", each row has a gate of its values; "convolution", rows are mixed behind the projection; "delayed",
            some heads have the values of the row before, as in ZAYA; "heads", each head is normalised.
    """

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.q, self.k, self.v, self.out, self.gate, self.mlp = (nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.norm, self.convolution = nn.LayerNorm(WIDTH), nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.x, y = x, self.norm(x)
        q, k = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (self.q(y), self.k(y)))
        self.map, self.values, self.gates = (q @ k.mT / 2).softmax(-1), self.v(y), self.gate(y).sigmoid()
        mixed = self.mixed(self.values)
        self.deviation = (mixed.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        x = x + self.after(mixed / self.deviation if self.way == "heads" else mixed)
        return x + self.mlp(x).relu()

    def mixed(self, values: Tensor) -> Tensor:
        """A·V ``[B, N, H, D]``."""
        values = values.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        if self.way == "delayed":
            before = torch.cat([torch.zeros_like(values[:, :, :1]), values[:, :, :-1]], 2)
            values = torch.cat([values[:, :1], before[:, 1:]], 1)
        return (self.map @ values).transpose(1, 2)

    def after(self, mixed: Tensor) -> Tensor:
        mixed = mixed.flatten(2)
        added = self.out(mixed * self.gates if self.way == "gate" else mixed)
        if self.way == "convolution":
            added = added + self.convolution(added.mT)[..., : added.shape[1]].mT
        return added

    def vectors(self) -> Tensor:
        """v_ij ``[B, N, N, W]``: the sum with the values of row j alone, less the one without values."""
        scale = self.deviation if self.way == "heads" else 1
        origin, parts = self.after(self.mixed(self.values * 0)), list[Tensor]()
        for row in torch.eye(TOKENS).double():
            alone = self.after(self.mixed(self.values * row[:, None]) / scale) - origin
            parts.append(alone + self.x * row[:, None])
        return torch.stack(parts, 2)


@pytest.mark.parametrize("way", ["gate", "convolution", "delayed", "heads"])
def test_operations_that_differ_between_rows(way: str) -> None:
    model = randomise(Classifier(lambda: Altered(way))).double().eval()
    x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        model(x)
        row = torch.eye(TOKENS).double()[:1].expand(2, -1, -1)
        for block in list(model.blocks)[::-1]:
            sizes = block.vectors().norm(dim=-1)
            row = row @ (sizes / sizes.sum(-1, keepdim=True))
    found = whyformer.explain(model, x, "norm_attention").scores
    torch.testing.assert_close(found, row[:, 0], rtol=1e-9, atol=1e-12)


class Reads(nn.Module):
    """Attention of some rows to others, which stores what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, asked: Tensor, keys: Tensor, residual: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (self.q(asked), self.k(keys), self.v(keys)))
        self.map, self.values, self.residual = (q @ k.mT / 2).softmax(-1), v, residual
        return residual + self.out((self.map @ v).transpose(1, 2).flatten(2))


class Anchored(nn.Module):
    """Learned queries that read x; where they look also depends on what entered the layer, as in Conditional DETR."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.anchor = nn.Parameter(torch.randn(QUERIES, WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.same, self.across = (nn.ModuleList(Reads() for _ in range(2)) for _ in range(2))
        self.norms, self.mlp = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(6)), nn.Linear(WIDTH, WIDTH)
        self.tower, self.head = Reads(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x, y = self.tower(x, x, x), self.asked.expand(len(x), -1, -1)
        for i, (same, across) in enumerate(zip(self.same, self.across, strict=True)):
            anchor = self.anchor(y).relu()
            y = self.norms[3 * i](same(y, y, y))
            y = self.norms[3 * i + 1](across(y + anchor, x, y))
            y = self.norms[3 * i + 2](y + self.mlp(y).relu())
        return self.head(y[:, 0])


def test_queries_that_depend_on_an_earlier_state() -> None:
    model = randomise(Anchored()).double().eval()
    x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0)).double()
    task = open_model(model.requires_grad_(False)).prepare(x).task(name="norm_attention", target=0)
    passed = begin(task).passed
    crossing = [n for n, a in passed.attentions.items() if a.keys is not None and a.keys.shape[1] == TOKENS and not a.is_self]
    assert len(crossing) == 2
    with torch.no_grad():
        model(x)
    for number, across in zip(crossing, model.across, strict=True):
        weight = across.out.weight.unflatten(1, (HEADS, -1))
        parts = torch.einsum("bhij,bhjd,ohd->bijo", across.map, across.values, weight)
        mixture = AttentionVectors(task, passed).at(number, "sum")
        torch.testing.assert_close(mixture.of_attention.norms(), parts.norm(dim=-1), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(mixture.own_norms(), across.residual.norm(dim=-1), rtol=1e-9, atol=1e-12)

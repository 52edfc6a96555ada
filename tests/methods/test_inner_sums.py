"""Attention whose residual sum lies in a branch of its block: the norms of its vectors, by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import whyformer
from zoo import randomise

WIDTH, NARROW, HEADS, TOKENS, CLASSES = 12, 6, 3, 5, 3


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
    def __init__(self, block: type[nn.Module]) -> None:
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

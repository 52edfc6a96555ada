"""Norms of attention vectors against references, for residual sums inside a branch and for operations after attention
that differ between rows or mix them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import whyformer
from whyformer.explaining import open_model
from whyformer.methods.maps.stream_maps import begin
from whyformer.methods.vectors.mixtures import AttentionVectors
from zoo import randomise

WIDTH, NARROW, HEADS, TOKENS, CLASSES = 12, 6, 3, 18, 3
QUERIES = 4


class StoringAttention(nn.Module):
    """Attention that stores its map, its values and the vector to which its output is added."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(inner, inner), nn.Linear(inner, inner)
        self.v, self.out, self.norm = nn.Linear(width, inner), nn.Linear(inner, inner), nn.LayerNorm(inner)

    def forward(self, query_input: Tensor, x: Tensor, residual: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (self.q(query_input), self.k(query_input), self.v(x)))
        self.map, self.values, self.residual = (q @ k.mT / 2).softmax(-1), v, residual
        return self.out((self.map @ v).transpose(1, 2).flatten(2)) + residual

    def mixed(self, normed: bool) -> Tensor:
        """Norms of the vectors, each row divided by its sum."""
        n, weight = self.map.shape[-1], self.out.weight.unflatten(1, (HEADS, -1))
        parts = torch.einsum("bhij,bhjd,ohd->bijo", self.map, self.values, weight)
        total = parts.sum(2) + self.out.bias + self.residual
        parts = parts + torch.eye(n)[..., None].double() * self.residual[:, :, None]
        if normed:
            deviation = (total.var(-1, unbiased=False) + self.norm.eps).sqrt()
            parts = (parts - parts.mean(-1, keepdim=True)) * self.norm.weight / deviation[:, :, None, None]
        norms = parts.norm(dim=-1)
        return norms / norms.sum(-1, keepdim=True)


class Bottleneck(nn.Module):
    """A narrow block inside a wide residual, as in MobileBERT."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.query_input, self.attention = nn.Linear(WIDTH, NARROW), nn.Linear(WIDTH, NARROW), StoringAttention(WIDTH, NARROW)
        self.mlp, self.norm = nn.Linear(NARROW, NARROW), nn.LayerNorm(NARROW)
        self.up, self.after = nn.Linear(NARROW, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention.norm(self.attention(self.query_input(x), x, self.down(x)))
        y = self.norm(y + self.mlp(y).relu())
        return self.after(x + self.up(y))

    def attentions(self) -> list[tuple[StoringAttention, bool]]:
        return [(self.attention, True)]


class Shortcut(nn.Module):
    """Two attentions, and a branch from after the first to after the second, as in LongCat."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = StoringAttention(WIDTH, WIDTH), StoringAttention(WIDTH, WIDTH)
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

    def attentions(self) -> list[tuple[StoringAttention, bool]]:
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
def test_norm_attention_equals_reference(block: type[nn.Module], scope: str) -> None:
    model = randomise(Classifier(block)).double().eval()
    x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        model(x)
        row = torch.eye(TOKENS).double()[:1].expand(2, -1, -1)
        for layer in list(model.blocks)[::-1]:
            for attention, normed in layer.attentions()[::-1]:
                row = row @ attention.mixed(normed and scope == "norm")
    result = whyformer.explain(model, x, "norm_attention", scope=scope).scores
    torch.testing.assert_close(result, row[:, 0], rtol=1e-9, atol=1e-12)


class RowDependentBlock(nn.Module):
    """A block with an operation that differs between rows.

    Args:
        variant: "gate", a gate for each row; "convolution", a convolution over rows after the projection; "delayed", some
            heads use values of the previous row, as in ZAYA; "heads", each head is normalised.
    """

    def __init__(self, variant: str) -> None:
        super().__init__()
        self.variant = variant
        self.q, self.k, self.v, self.out, self.gate, self.mlp = (nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.norm, self.convolution = nn.LayerNorm(WIDTH), nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.x, y = x, self.norm(x)
        q, k = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (self.q(y), self.k(y)))
        self.map, self.values, self.gates = (q @ k.mT / 2).softmax(-1), self.v(y), self.gate(y).sigmoid()
        mixed = self.mixed(self.values)
        self.deviation = (mixed.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        x = x + self.after(mixed / self.deviation if self.variant == "heads" else mixed)
        return x + self.mlp(x).relu()

    def mixed(self, values: Tensor) -> Tensor:
        """A·V ``[B, N, H, D]``."""
        values = values.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        if self.variant == "delayed":
            before = torch.cat([torch.zeros_like(values[:, :, :1]), values[:, :, :-1]], 2)
            values = torch.cat([values[:, :1], before[:, 1:]], 1)
        return (self.map @ values).transpose(1, 2)

    def after(self, mixed: Tensor) -> Tensor:
        mixed = mixed.flatten(2)
        added = self.out(mixed * self.gates if self.variant == "gate" else mixed)
        if self.variant == "convolution":
            added = added + self.convolution(added.mT)[..., : added.shape[1]].mT
        return added

    def vectors(self) -> Tensor:
        """v_ij ``[B, N, N, W]``: the sum with only the values of row j minus the sum without values."""
        scale = self.deviation if self.variant == "heads" else 1
        origin, parts = self.after(self.mixed(self.values * 0)), list[Tensor]()
        for row in torch.eye(TOKENS).double():
            contribution = self.after(self.mixed(self.values * row[:, None]) / scale) - origin
            parts.append(contribution + self.x * row[:, None])
        return torch.stack(parts, 2)


@pytest.mark.parametrize("variant", ["gate", "convolution", "delayed", "heads"])
def test_norm_attention_with_operations_that_differ_between_rows(variant: str) -> None:
    model = randomise(Classifier(lambda: RowDependentBlock(variant))).double().eval()
    x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        model(x)
        row = torch.eye(TOKENS).double()[:1].expand(2, -1, -1)
        for block in list(model.blocks)[::-1]:
            sizes = block.vectors().norm(dim=-1)
            row = row @ (sizes / sizes.sum(-1, keepdim=True))
    result = whyformer.explain(model, x, "norm_attention").scores
    torch.testing.assert_close(result, row[:, 0], rtol=1e-9, atol=1e-12)


class StoringCrossAttention(nn.Module):
    """Cross-attention that stores its map, values and residual."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, query_input: Tensor, keys: Tensor, residual: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (self.q(query_input), self.k(keys), self.v(keys)))
        self.map, self.values, self.residual = (q @ k.mT / 2).softmax(-1), v, residual
        return residual + self.out((self.map @ v).transpose(1, 2).flatten(2))


class ConditionalDecoder(nn.Module):
    """Learned queries that attend to x; their attention also depends on the input of the layer, as in Conditional DETR."""

    def __init__(self) -> None:
        super().__init__()
        self.query_input, self.anchor = nn.Parameter(torch.randn(QUERIES, WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.self_attentions, self.cross_attentions = (nn.ModuleList(StoringCrossAttention() for _ in range(2)) for _ in range(2))
        self.norms, self.mlp = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(6)), nn.Linear(WIDTH, WIDTH)
        self.tower, self.head = StoringCrossAttention(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x, y = self.tower(x, x, x), self.query_input.expand(len(x), -1, -1)
        for i, (self_attentions, cross_attentions) in enumerate(zip(self.self_attentions, self.cross_attentions, strict=True)):
            anchor = self.anchor(y).relu()
            y = self.norms[3 * i](self_attentions(y, y, y))
            y = self.norms[3 * i + 1](cross_attentions(y + anchor, x, y))
            y = self.norms[3 * i + 2](y + self.mlp(y).relu())
        return self.head(y[:, 0])


def test_vectors_of_queries_that_depend_on_an_earlier_state() -> None:
    model = randomise(ConditionalDecoder()).double().eval()
    x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0)).double()
    task = open_model(model.requires_grad_(False)).prepare(x).task(name="norm_attention", target=0)
    map_pass = begin(task).map_pass
    cross_numbers = [n for n, a in map_pass.attentions.items() if a.keys is not None and a.keys.shape[1] == TOKENS and not a.is_self]
    assert len(cross_numbers) == 2
    with torch.no_grad():
        model(x)
    for number, cross_attentions in zip(cross_numbers, model.cross_attentions, strict=True):
        weight = cross_attentions.out.weight.unflatten(1, (HEADS, -1))
        parts = torch.einsum("bhij,bhjd,ohd->bijo", cross_attentions.map, cross_attentions.values, weight)
        mixture = AttentionVectors(task, map_pass).at(number, "sum")
        torch.testing.assert_close(mixture.of_attention.norms(), parts.norm(dim=-1), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(mixture.residual_norms(), cross_attentions.residual.norm(dim=-1), rtol=1e-9, atol=1e-12)

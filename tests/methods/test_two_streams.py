"""Norm attention, Grad-CAM and value zeroing on two texts of different length with cross-attention, against references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import whyformer
from zoo import randomise

WIDTH, HEADS, CLASSES = 12, 3, 4
LENGTHS = [(7, 4), (3, 5), (9, 4)]  # of the memory text and of the reading text


class ResidualAttention(nn.Module):
    """x + attention of the rows of x to those of y, optionally with the values of one row of y set to 0."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def map(self, normed: Tensor, y: Tensor) -> Tensor:
        q, k = (f(t).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f, t in ((self.q, normed), (self.k, y)))
        return (q @ k.mT / 2).softmax(-1)

    def values(self, y: Tensor) -> Tensor:
        return self.v(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def forward(self, x: Tensor, y: Tensor | None = None, zeroed_row: int | None = None) -> Tensor:
        normed = self.norm(x)
        y = normed if y is None else y
        values = self.values(y)
        if zeroed_row is not None:
            values = values.index_fill(2, torch.tensor([zeroed_row]), 0)
        return x + self.out((self.map(normed, y) @ values).transpose(1, 2).flatten(2))


class StreamBlock(nn.Module):
    """Self-attention, optional cross-attention, and an MLP."""

    def __init__(self, across: bool) -> None:
        super().__init__()
        self.own, self.across = ResidualAttention(), ResidualAttention() if across else None
        self.norm, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor | None = None, own: int | None = None, across: int | None = None) -> Tensor:
        x = self.own(x, zeroed_row=own)
        if self.across is not None:
            x = self.across(x, y, across)
        return x + self.mlp(self.norm(x)).tanh()


class MemoryReader(nn.Module):
    """Classifies ``input_ids``, whose rows attend to those of ``memory_ids``."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(40, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.lower = nn.ModuleList(StreamBlock(False) for _ in range(2))
        self.upper = nn.ModuleList(StreamBlock(True) for _ in range(2))

    def forward(self, input_ids: Tensor, memory_ids: Tensor) -> Tensor:
        return self.head(self.states(input_ids, memory_ids)[1][-1][:, -1])

    def states(self, input_ids: Tensor, memory_ids: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs and outputs of the blocks of both texts."""
        y, x = [self.words(memory_ids)], [self.words(input_ids)]
        for block in self.lower:
            y.append(block(y[-1]))
        for block in self.upper:
            x.append(block(x[-1], y[-1]))
        return y, x


def build_reader(lengths: tuple[int, int]) -> tuple[MemoryReader, dict[str, Tensor]]:
    draws = torch.Generator().manual_seed(0)
    memory, inputs = (torch.randint(2, 40, (2, n), generator=draws) for n in lengths)
    model = randomise(MemoryReader()).double().eval().requires_grad_(False)
    return model, {"input_ids": inputs, "memory_ids": memory}


def propagate(lengths: tuple[int, int], lower: list[Tensor], upper: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Propagate the last row of the reading text through its self- and cross-attention maps ``[B, Q, K]``, and the
    memory rows through theirs."""
    memory_length, length = lengths
    row, memory_row = torch.zeros(2, 1, length).double(), torch.zeros(2, 1, memory_length).double()
    row[..., -1] = 1
    for self_map, cross_map in reversed(upper):
        memory_row = memory_row + row @ cross_map
        row = row @ self_map
    for self_map in reversed(lower):
        memory_row = memory_row @ self_map
    return {"input_ids": row[:, 0], "memory_ids": memory_row[:, 0]}


def check(method: str, lengths: tuple[int, int], expected: dict[str, Tensor], tolerance: float = 1e-9, **settings: object) -> None:
    model, inputs = build_reader(lengths)
    e = whyformer.explain(model, inputs, method, 1, **settings)
    for name, scores in expected.items():
        assert float(scores.abs().max()) > 1e-3
        assert torch.allclose(e.part(name).scores, scores, rtol=tolerance, atol=1e-12)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_value_zeroing_with_cross_attention(lengths: tuple[int, int]) -> None:
    model, inputs = build_reader(lengths)
    y, x = model.states(**inputs)

    def far(block: StreamBlock, before: Tensor, after: Tensor, which: str, count: int) -> Tensor:
        changed = [block(before, y[-1], **{which: t}) for t in range(count)]
        return torch.stack([1 - torch.cosine_similarity(u, after, dim=-1) for u in changed], -1)

    memory_length, length = lengths
    lower = [far(b, y[i], y[i + 1], "own", memory_length) for i, b in enumerate(model.lower)]
    lower = [m / m.sum(-1, keepdim=True) for m in lower]
    upper = []
    for i, block in enumerate(model.upper):
        self_changes, cross_changes = far(block, x[i], x[i + 1], "own", length), far(block, x[i], x[i + 1], "across", memory_length)
        sums = self_changes.sum(-1, keepdim=True) + cross_changes.sum(-1, keepdim=True)
        upper.append((self_changes / sums, cross_changes / sums))
    check("value_zeroing", lengths, propagate(lengths, lower, upper), 1e-6)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("scope", ["residual", "attention", "heads"])
def test_norm_attention_with_cross_attention(lengths: tuple[int, int], scope: str) -> None:
    model, inputs = build_reader(lengths)
    y, x = model.states(**inputs)

    def received(attend: ResidualAttention, queries: Tensor, keys: Tensor) -> Tensor:
        """Vectors that row i receives from row j in each head, ``[B, H, Q, K, D]``."""
        weight = attend.out.weight.unflatten(1, (HEADS, -1))
        return torch.einsum("bhqk,bhkd,ohd->bhqko", attend.map(attend.norm(queries), keys), attend.values(keys), weight)

    def self_norms(attend: ResidualAttention, rows: Tensor) -> Tensor:
        vectors = received(attend, rows, attend.norm(rows))
        if scope == "heads":
            return vectors.norm(dim=-1).mean(1)
        residual = torch.diag_embed(rows.mT, dim1=1, dim2=2) if scope == "residual" else 0
        norms = (vectors.sum(1) + residual).norm(dim=-1)
        return norms / norms.sum(-1, keepdim=True) if scope == "residual" else norms

    lower = [self_norms(block.own, rows) for block, rows in zip(model.lower, y, strict=False)]
    upper = []
    for block, rows in zip(model.upper, x, strict=False):
        attended = block.own(rows)
        vectors = received(block.across, attended, y[-1])
        upper.append((self_norms(block.own, rows), torch.zeros(2, lengths[1], lengths[0]).double()))
        if scope == "residual":
            norms, residual = vectors.sum(1).norm(dim=-1), attended.norm(dim=-1)
            sums = (norms.sum(-1) + residual)[..., None]
            upper.append((torch.diag_embed(residual / sums[..., 0]), norms / sums))
        else:
            norms = vectors.norm(dim=-1).mean(1) if scope == "heads" else vectors.sum(1).norm(dim=-1)
            upper.append((torch.zeros(2, lengths[1], lengths[1]).double(), norms))
    if scope == "residual":
        expected = propagate(lengths, lower, upper)
    else:  # the identity is added, and rows are divided by their sum
        eye = torch.eye(lengths[0]).double(), torch.eye(lengths[1]).double()
        lower = [(m + eye[0]) / (m + eye[0]).sum(-1, keepdim=True) for m in lower]
        sums = [1 + a.sum(-1, keepdim=True) + c.sum(-1, keepdim=True) for a, c in upper]
        expected = propagate(lengths, lower, [((a + eye[1]) / s, c / s) for (a, c), s in zip(upper, sums, strict=True)])
    check("norm_attention", lengths, expected, scope=scope)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_gradcam_with_cross_attention(lengths: tuple[int, int]) -> None:
    model, inputs = build_reader(lengths)
    y, x = model.states(**inputs)
    block = model.upper[-1]
    features = block.own.norm(x[-2]).requires_grad_()
    attend = block.own
    mixed = attend.map(features, features) @ attend.values(features)
    rows = block.across(x[-2] + attend.out(mixed.transpose(1, 2).flatten(2)), y[-1])
    logits = model.head((rows + block.mlp(block.norm(rows)).tanh())[:, -1])
    (gradient,) = torch.autograd.grad(logits[:, 1].sum(), features)
    expected = torch.einsum("bnd,bd->bn", features.detach(), gradient.mean(1)).clamp(min=0)
    check("gradcam", lengths, {"input_ids": expected})


def test_gradcam_features_exclude_positions_added_after_norm() -> None:
    """The features of Grad-CAM are the norm output, without position embeddings added to queries and keys only."""

    class PositionedBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.v, self.k = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.locations = nn.Parameter(torch.randn(6, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            normed = self.norm(x)
            with_positions = normed + self.locations
            return x + (with_positions @ self.k(with_positions).mT / 3).softmax(-1) @ self.v(normed)

    class PositionedModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(40, WIDTH), nn.Linear(WIDTH, CLASSES)
            self.blocks = nn.ModuleList(PositionedBlock() for _ in range(2))

        def forward(self, input_ids: Tensor) -> Tensor:
            x = self.words(input_ids)
            for block in self.blocks:
                x = block(x)
            return self.head(x.mean(1))

    model = randomise(PositionedModel()).double().eval().requires_grad_(False)
    ids = torch.randint(2, 40, (2, 6), generator=torch.Generator().manual_seed(0))
    x = model.blocks[0](model.words(ids))
    block = model.blocks[1]
    normed = block.norm(x).requires_grad_()
    with_positions = normed + block.locations
    state = x + (with_positions @ block.k(with_positions).mT / 3).softmax(-1) @ block.v(normed)
    (gradient,) = torch.autograd.grad(model.head(state.mean(1))[:, 1].sum(), normed)
    expected = torch.einsum("bnd,bd->bn", normed.detach(), gradient.mean(1)).clamp(min=0)
    e = whyformer.explain(model, {"input_ids": ids}, "gradcam", 1)
    assert torch.allclose(e.scores, expected, rtol=1e-9, atol=1e-12)

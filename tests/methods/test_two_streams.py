"""Methods of vectors, blocks and zeroed values on two texts of different length, one of which looks at the other: by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import whyformer
from zoo import randomise

WIDTH, HEADS, CLASSES = 12, 3, 4
LENGTHS = [(7, 4), (3, 5), (9, 4)]  # of the text that is looked at, and of the one that looks


class Attend(nn.Module):
    """x + attention of the rows of x to those of y; with the values of one row of y set to zero on request."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def map(self, normed: Tensor, y: Tensor) -> Tensor:
        q, k = (f(t).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f, t in ((self.q, normed), (self.k, y)))
        return (q @ k.mT / 2).softmax(-1)

    def values(self, y: Tensor) -> Tensor:
        return self.v(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def forward(self, x: Tensor, y: Tensor | None = None, without: int | None = None) -> Tensor:
        normed = self.norm(x)
        y = normed if y is None else y
        values = self.values(y)
        if without is not None:
            values = values.index_fill(2, torch.tensor([without]), 0)
        return x + self.out((self.map(normed, y) @ values).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Looks at its own rows, then perhaps at others, then an MLP."""

    def __init__(self, across: bool) -> None:
        super().__init__()
        self.own, self.across = Attend(), Attend() if across else None
        self.norm, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor | None = None, own: int | None = None, across: int | None = None) -> Tensor:
        x = self.own(x, without=own)
        if self.across is not None:
            x = self.across(x, y, across)
        return x + self.mlp(self.norm(x)).tanh()


class Reader(nn.Module):
    """A class of ``input_ids``, whose rows look at those of ``memory_ids``."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(40, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.lower = nn.ModuleList(Block(False) for _ in range(2))
        self.upper = nn.ModuleList(Block(True) for _ in range(2))

    def forward(self, input_ids: Tensor, memory_ids: Tensor) -> Tensor:
        return self.head(self.states(input_ids, memory_ids)[1][-1][:, -1])

    def states(self, input_ids: Tensor, memory_ids: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """What enters and leaves the blocks of both texts."""
        y, x = [self.words(memory_ids)], [self.words(input_ids)]
        for block in self.lower:
            y.append(block(y[-1]))
        for block in self.upper:
            x.append(block(x[-1], y[-1]))
        return y, x


def built(lengths: tuple[int, int]) -> tuple[Reader, dict[str, Tensor]]:
    draws = torch.Generator().manual_seed(0)
    memory, own = (torch.randint(2, 40, (2, n), generator=draws) for n in lengths)
    model = randomise(Reader()).double().eval().requires_grad_(False)
    return model, {"input_ids": own, "memory_ids": memory}


def carried(lengths: tuple[int, int], lower: list[Tensor], upper: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """The last row of the text that looks, through [own | across] maps ``[B, Q, K]``, then the rows that it looked at
    through theirs."""
    others, n = lengths
    row, other = torch.zeros(2, 1, n).double(), torch.zeros(2, 1, others).double()
    row[..., -1] = 1
    for own, across in reversed(upper):
        other = other + row @ across
        row = row @ own
    for own in reversed(lower):
        other = other @ own
    return {"input_ids": row[:, 0], "memory_ids": other[:, 0]}


def check(method: str, lengths: tuple[int, int], wanted: dict[str, Tensor], tolerance: float = 1e-9, **settings: object) -> None:
    model, inputs = built(lengths)
    e = whyformer.explain(model, inputs, method, 1, **settings)
    for name, scores in wanted.items():
        assert float(scores.abs().max()) > 1e-3
        assert torch.allclose(e.part(name).scores, scores, rtol=tolerance, atol=1e-12)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_zeroed_values(lengths: tuple[int, int]) -> None:
    model, inputs = built(lengths)
    y, x = model.states(**inputs)

    def far(block: Block, before: Tensor, after: Tensor, which: str, count: int) -> Tensor:
        changed = [block(before, y[-1], **{which: t}) for t in range(count)]
        return torch.stack([1 - torch.cosine_similarity(u, after, dim=-1) for u in changed], -1)

    others, n = lengths
    lower = [far(b, y[i], y[i + 1], "own", others) for i, b in enumerate(model.lower)]
    lower = [m / m.sum(-1, keepdim=True) for m in lower]
    upper = []
    for i, block in enumerate(model.upper):
        own, across = far(block, x[i], x[i + 1], "own", n), far(block, x[i], x[i + 1], "across", others)
        sums = own.sum(-1, keepdim=True) + across.sum(-1, keepdim=True)
        upper.append((own / sums, across / sums))
    check("value_zeroing", lengths, carried(lengths, lower, upper), 1e-6)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("scope", ["residual", "attention", "heads"])
def test_norms_of_vectors(lengths: tuple[int, int], scope: str) -> None:
    model, inputs = built(lengths)
    y, x = model.states(**inputs)

    def got(attend: Attend, queries: Tensor, keys: Tensor) -> Tensor:
        """What row i gets from row j by each head, ``[B, H, Q, K, D]``."""
        weight = attend.out.weight.unflatten(1, (HEADS, -1))
        return torch.einsum("bhqk,bhkd,ohd->bhqko", attend.map(attend.norm(queries), keys), attend.values(keys), weight)

    def own(attend: Attend, rows: Tensor) -> Tensor:
        vectors = got(attend, rows, attend.norm(rows))
        if scope == "heads":
            return vectors.norm(dim=-1).mean(1)
        kept = torch.diag_embed(rows.mT, dim1=1, dim2=2) if scope == "residual" else 0
        norms = (vectors.sum(1) + kept).norm(dim=-1)
        return norms / norms.sum(-1, keepdim=True) if scope == "residual" else norms

    lower = [own(block.own, rows) for block, rows in zip(model.lower, y, strict=False)]
    upper = []
    for block, rows in zip(model.upper, x, strict=False):
        behind = block.own(rows)
        vectors = got(block.across, behind, y[-1])
        upper.append((own(block.own, rows), torch.zeros(2, lengths[1], lengths[0]).double()))
        if scope == "residual":
            norms, kept = vectors.sum(1).norm(dim=-1), behind.norm(dim=-1)
            sums = (norms.sum(-1) + kept)[..., None]
            upper.append((torch.diag_embed(kept / sums[..., 0]), norms / sums))
        else:
            norms = vectors.norm(dim=-1).mean(1) if scope == "heads" else vectors.sum(1).norm(dim=-1)
            upper.append((torch.zeros(2, lengths[1], lengths[1]).double(), norms))
    if scope == "residual":
        wanted = carried(lengths, lower, upper)
    else:  # the identity is added, and rows are divided by their sums
        eye = torch.eye(lengths[0]).double(), torch.eye(lengths[1]).double()
        lower = [(m + eye[0]) / (m + eye[0]).sum(-1, keepdim=True) for m in lower]
        sums = [1 + a.sum(-1, keepdim=True) + c.sum(-1, keepdim=True) for a, c in upper]
        wanted = carried(lengths, lower, [((a + eye[1]) / s, c / s) for (a, c), s in zip(upper, sums, strict=True)])
    check("norm_attention", lengths, wanted, scope=scope)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_gradcam_of_a_block(lengths: tuple[int, int]) -> None:
    model, inputs = built(lengths)
    y, x = model.states(**inputs)
    block = model.upper[-1]
    features = block.own.norm(x[-2]).requires_grad_()
    attend = block.own
    mixed = attend.map(features, features) @ attend.values(features)
    rows = block.across(x[-2] + attend.out(mixed.transpose(1, 2).flatten(2)), y[-1])
    logits = model.head((rows + block.mlp(block.norm(rows)).tanh())[:, -1])
    (flow,) = torch.autograd.grad(logits[:, 1].sum(), features)
    wanted = torch.einsum("bnd,bd->bn", features.detach(), flow.mean(1)).clamp(min=0)
    check("gradcam", lengths, {"input_ids": wanted})


def test_positions_behind_a_norm_are_no_part_of_it() -> None:
    """The features of Grad-CAM are those of the norm, without positions that queries and keys alone get."""

    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.v, self.k = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.places = nn.Parameter(torch.randn(6, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            normed = self.norm(x)
            placed = normed + self.places
            return x + (placed @ self.k(placed).mT / 3).softmax(-1) @ self.v(normed)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(40, WIDTH), nn.Linear(WIDTH, CLASSES)
            self.blocks = nn.ModuleList(Placed() for _ in range(2))

        def forward(self, input_ids: Tensor) -> Tensor:
            x = self.words(input_ids)
            for block in self.blocks:
                x = block(x)
            return self.head(x.mean(1))

    model = randomise(Model()).double().eval().requires_grad_(False)
    ids = torch.randint(2, 40, (2, 6), generator=torch.Generator().manual_seed(0))
    x = model.blocks[0](model.words(ids))
    block = model.blocks[1]
    normed = block.norm(x).requires_grad_()
    placed = normed + block.places
    state = x + (placed @ block.k(placed).mT / 3).softmax(-1) @ block.v(normed)
    (flow,) = torch.autograd.grad(model.head(state.mean(1))[:, 1].sum(), normed)
    wanted = torch.einsum("bnd,bd->bn", normed.detach(), flow.mean(1)).clamp(min=0)
    e = whyformer.explain(model, {"input_ids": ids}, "gradcam", 1)
    assert torch.allclose(e.scores, wanted, rtol=1e-9, atol=1e-12)

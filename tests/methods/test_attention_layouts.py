"""Unusual layouts of attention against references: padded local blocks, heads merged with the batch axis, attention before
any input is read, and token mixing without a map."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import whyformer
from whyformer.errors import MethodNotApplicable
from zoo import randomise

WIDTH, HEADS, CLASSES = 12, 3, 3


class LocalAttention(nn.Module):
    """Local attention of each block of rows to itself and to adjacent blocks, with padded keys and values, as in LongT5."""

    def __init__(self, block: int) -> None:
        super().__init__()
        self.block = block
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        size, count = self.block, -(-x.shape[1] // self.block)
        padding = count * size - x.shape[1]
        q, k, v = (functional.pad(f(x), (0, 0, 0, padding)).unflatten(1, (count, size)) for f in (self.q, self.k, self.v))
        k, v = (self.with_neighbours(functional.pad(t, (0, 0, 0, 0, 1, 1))) for t in (k, v))
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(2, 3) for t in (q, k, v))
        position = torch.arange(3 * size)[None] + size * torch.arange(-1, count - 1)[:, None]
        outside = (position < 0) | (position >= x.shape[1])
        scores = (q @ k.mT / 2).masked_fill(outside[:, None, None], -torch.inf)
        self.map = scores.softmax(-1)
        mixed = (self.map @ v).transpose(2, 3).flatten(3).flatten(1, 2)
        return self.out(mixed[:, : x.shape[1]])

    @staticmethod
    def with_neighbours(blocks: Tensor) -> Tensor:
        return torch.cat([blocks[:, :-2], blocks[:, 1:-1], blocks[:, 2:]], 2)

    def full_map(self, rows: int) -> Tensor:
        """``[B, N, N]``, the mean over heads."""
        result = torch.zeros(len(self.map), rows, rows).double()
        for i in range(rows):
            block, inside = divmod(i, self.block)
            for j, weight in enumerate(self.map[:, block, :, inside].mean(1).unbind(-1)):
                key = j + self.block * (block - 1)
                if 0 <= key < rows:
                    result[:, i, key] = weight
        return result


class ResidualStack(nn.Module):
    """A residual stack of branches."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.embed, self.branches = nn.Linear(WIDTH, WIDTH), nn.ModuleList(branches)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for branch in self.branches:
            x = x + branch(x)
        return self.head(x[:, -1])


def random_inputs(samples: int, rows: int) -> Tensor:
    return torch.randn(samples, rows, WIDTH, generator=torch.Generator().manual_seed(0)).double()


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize(("rows", "block"), [(7, 16), (10, 16), (8, 4), (12, 4)])
def test_rollout_of_local_attention(rows: int, block: int, samples: int) -> None:
    model = randomise(ResidualStack(LocalAttention(block), LocalAttention(block))).double().eval().requires_grad_(False)
    x = random_inputs(samples, rows)
    model(x)
    scores = torch.eye(rows).double()[-1:].expand(samples, 1, -1)
    for layer in reversed(model.branches):
        augmented = layer.full_map(rows) + torch.eye(rows)
        scores = scores @ (augmented / augmented.sum(-1, keepdim=True))
    result = whyformer.explain(model, x, "rollout").scores
    assert torch.allclose(result, scores[:, 0], atol=1e-12)


class QueryDecoder(nn.Module):
    """Learned queries with self-attention, then cross-attention to the input, twice."""

    def __init__(self, merge_heads: bool) -> None:
        super().__init__()
        self.queries, self.merge_heads = nn.Parameter(torch.randn(4, WIDTH)), merge_heads
        self.q, self.k, self.v, self.out = (nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def attend(self, i: int, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = (f[i](t).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f, t in ((self.q, x), (self.k, y), (self.v, y)))
        if not self.merge_heads:
            return self.out[i](((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2))
        q, k, v = (t.reshape(-1, *t.shape[2:]) for t in (q, k, v))  # [B · H, N, D]
        mixed = torch.bmm(torch.bmm(q / 2, k.mT).softmax(-1), v)
        return self.out[i](mixed.view(len(x), HEADS, *mixed.shape[1:]).transpose(1, 2).reshape(len(x), -1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.queries.expand(len(x), -1, -1)
        for i in (0, 2):
            rows = rows + self.attend(i, rows, rows)
            rows = rows + self.attend(i + 1, rows, x)
        return self.head(rows.mean(1))


@pytest.mark.parametrize("method", ["gae", "rollout", "transformer_attribution", "value_zeroing"])
def test_heads_merged_with_batch_axis_have_same_scores(method: str) -> None:
    separate, merged = (randomise(QueryDecoder(b)).double().eval() for b in (False, True))
    merged.load_state_dict(separate.state_dict())
    x = random_inputs(2, 5)
    expected = whyformer.explain(separate, x, method, [0, 2]).scores
    result = whyformer.explain(merged, x, method, [0, 2]).scores
    assert float(expected.abs().max()) > 0
    assert torch.allclose(result, expected, atol=1e-10)


class OwnAttention(nn.Module):
    """``nn.MultiheadAttention``, which merges heads with the batch axis before it adds a key of zeros."""

    def __init__(self, **settings: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, add_zero_attn=True, **settings)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("add_bias_kv", [False, True])
@pytest.mark.parametrize("method", ["raw_attention", "gae", "rollout", "transformer_attribution"])
def test_constant_keys_beside_merged_heads_are_the_same_for_all_heads(method: str, add_bias_kv: bool) -> None:
    stack = ResidualStack(*(OwnAttention(add_bias_kv=add_bias_kv) for _ in range(2)))
    model = randomise(stack).double().eval().requires_grad_(False)
    x = random_inputs(3, 5)
    result = whyformer.explain(model, x, method, 1).scores
    expected = torch.cat([whyformer.explain(model, x[i : i + 1], method, 1).scores for i in range(3)])
    assert torch.allclose(result, expected, atol=1e-10)
    if method == "raw_attention":
        y = model.embed(x)
        y = y + model.branches[0](y)
        weights = model.branches[1].attention(y, y, y)[1]  # the mean over heads
        assert torch.allclose(result, weights[:, -1, :5], atol=1e-10)


class MixingDecoder(QueryDecoder):
    """Mixes the input rows by a matrix before learned queries attend to them."""

    def __init__(self, mixing: bool) -> None:
        super().__init__(merge_heads=False)
        self.mix, self.mixing = nn.Linear(5, 5), mixing

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.mix(x.mT).mT + x if self.mixing else x.tanh())


@pytest.mark.parametrize("method", ["gae", "rollout", "raw_attention"])
def test_mixing_without_a_map_is_refused(method: str) -> None:
    x = random_inputs(2, 5)
    assert whyformer.explain(randomise(MixingDecoder(False)).double().eval(), x, method, 1).scores.any()
    with pytest.raises(MethodNotApplicable):
        whyformer.explain(randomise(MixingDecoder(True)).double().eval(), x, method, 1)


class TokenFirstModel(nn.Module):
    """Two texts with the token axis first, as in FSMT, optionally with experts on some of the rows."""

    def __init__(self, experts: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Embedding(20, WIDTH), nn.Embedding(20, WIDTH)
        self.layer, self.experts = nn.Linear(WIDTH, WIDTH), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.threshold, self.head = 0.0, nn.Linear(2 * WIDTH, CLASSES)
        self.places = nn.Parameter(torch.randn(4, 1, WIDTH))
        self.uses_experts = experts

    def embed(self, table: nn.Embedding, ids: Tensor) -> Tensor:
        rows = table(ids).transpose(0, 1) + self.places[: ids.shape[1]]
        return (rows + rows.tanh()).reshape(-1, WIDTH)

    def forward(self, input_ids: Tensor, other_ids: Tensor) -> Tensor:
        rows = self.embed(self.a, input_ids)
        self.row_sizes, x = rows.abs().mean(-1), self.layer(rows).tanh()
        if self.uses_experts:
            expert_of_row, outputs = (self.row_sizes > self.threshold).long(), torch.zeros_like(x)
            for i in expert_of_row.unique().tolist():
                indices = (expert_of_row == i).nonzero().flatten()
                outputs = outputs.index_add(0, indices, self.experts[i](x[indices]))
            x = outputs
        x = x.view(input_ids.shape[1], -1, WIDTH).mean(0)
        y = self.layer(self.embed(self.b, other_ids)).tanh()
        return self.head(torch.cat([x, y.view(other_ids.shape[1], -1, WIDTH).mean(0)], -1))


def two_texts() -> dict[str, Tensor]:
    return {"input_ids": torch.tensor([[3, 4, 5, 6], [7, 8, 9, 3]]), "other_ids": torch.tensor([[1, 2, 3], [9, 8, 7]])}


def test_integrated_gradients_of_token_first_model_are_complete() -> None:
    model, inputs = randomise(TokenFirstModel(False)).double().eval().requires_grad_(False), two_texts()
    e = whyformer.explain(model, inputs, "integrated_gradients", 1, steps=64, baseline="zero")
    saved_weights, tables = [], (model.a, model.b)
    for table in tables:
        table.weight.data, weight = torch.zeros_like(table.weight), table.weight.data
        saved_weights.append(weight)
    at_baseline = model(**inputs)[:, 1]
    for table, weight in zip(tables, saved_weights, strict=True):
        table.weight.data = weight
    summed = sum(e.part(n).scores.sum(1) for n in inputs)
    assert torch.allclose(summed, model(**inputs)[:, 1] - at_baseline, atol=1e-3)


@pytest.mark.parametrize("threshold", [0.5, 1.0, 2.0])
def test_integrated_gradients_with_other_experts_on_the_path_equal_autograd(threshold: float) -> None:
    """The second text is read after other operations than in the plain pass."""
    model, inputs, steps = randomise(TokenFirstModel(True)).double().eval().requires_grad_(False), two_texts(), 6
    model(**inputs)
    model.threshold = threshold * float(model.row_sizes.median())  # at the baseline all rows use the same expert
    e = whyformer.explain(model, inputs, "integrated_gradients", 1, steps=steps, baseline="zero")
    tables = {model.a: "input_ids", model.b: "other_ids"}
    rows = {n: table(inputs[n]) for table, n in tables.items()}
    expected = {n: torch.zeros_like(x) for n, x in rows.items()}
    for node, weight in zip(*np.polynomial.legendre.leggauss(steps), strict=True):
        points = {n: (x * (node + 1) / 2).requires_grad_() for n, x in rows.items()}
        moved = {table: nn.Module() for table in tables}
        for table, n in tables.items():
            moved[table].forward = lambda _, x=points[n]: x
        model.a, model.b = (moved[table] for table in tables)
        gradients = torch.autograd.grad(model(**inputs)[:, 1].sum(), list(points.values()))
        for n, gradient in zip(points, gradients, strict=True):
            expected[n] += weight / 2 * gradient * rows[n]
    for n, scores in expected.items():
        torch.testing.assert_close(e.part(n).scores, scores.sum(-1))

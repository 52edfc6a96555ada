"""Blocks without attention, repeated embedding residuals, pooling by a matrix, and experts, against reference implementations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import whyformer
from tape.recorded_structure import read_structure
from whyformer.errors import MethodNotApplicable
from zoo import randomise

WIDTH, HEADS, TOKENS, CLASSES = 12, 3, 6, 3


class HybridAttention(nn.Module):
    """Attention that stores its map and can zero the values of a token."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.zeroed_token: int | None = None  # token whose values are set to 0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.zeroed_token is not None:
            v = v.index_fill(2, torch.tensor(self.zeroed_token), 0)
        self.map = (q @ k.mT / 2).softmax(-1)
        return self.out((self.map @ v).transpose(1, 2).flatten(2))


class CausalConvolution(nn.Module):
    """A causal convolution over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.mT)[..., : x.shape[1]].mT


class CachedConvolution(nn.Module):
    """A causal convolution over rows, written as a sum over an empty cache and the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, 3))

    def forward(self, x: Tensor) -> Tensor:
        cached = torch.cat([x.new_zeros(len(x), 2, WIDTH), x], 1)
        return (cached.unfold(1, 3, 1) * self.weight).sum(-1)


class LinearAttention(nn.Module):
    """Linear attention with decay: q kᵀ over all rows, without a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        decay = 0.5 ** (torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])).clamp(min=0)
        return (self.q(x) @ self.k(x).mT * decay.tril().to(x)) @ self.v(x)


class RoundedByOthers(nn.Module):
    """A layer whose rounding errors depend on the other rows, as those of rows that are sorted by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + 1e-16 * x.mean(1, keepdim=True)


class RoutedExperts(nn.Module):
    """Routes each row to its top expert. Experts are called in a loop, or on rows sorted by expert."""

    def __init__(self, *, sort: bool = False) -> None:
        super().__init__()
        self.sort = sort
        self.router, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        share, expert_of_row = self.router(rows).softmax(-1).max(-1)
        out = torch.zeros_like(rows)
        if self.sort:
            order, counts = expert_of_row.argsort(stable=True), functional.one_hot(expert_of_row, 3).sum(0).tolist()
            outputs = [expert(expert_rows) for expert, expert_rows in zip(self.experts, rows[order].split(counts), strict=True)]
            return out.index_add(0, order, torch.cat(outputs).tanh() * share[order, None]).view_as(x)
        for i, expert in enumerate(self.experts):
            expert_rows = (expert_of_row == i).nonzero().flatten()
            out = out.index_add(0, expert_rows, expert(rows[expert_rows]).tanh() * share[expert_rows, None])
        return out.view_as(x)


class HybridLayer(nn.Module):
    """Residual branches, each with a norm before it."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in branches)

    def forward(self, x: Tensor) -> Tensor:
        self.normed = []
        for branch, norm in zip(self.branches, self.norms, strict=True):
            self.normed.append(norm(x))
            x = x + branch(self.normed[-1])
        return x


class Encoder(nn.Module):
    """Layers, optionally with gated embedding residuals after each layer, and with rows pooled by a matrix."""

    def __init__(self, layers: Sequence[nn.Module], *, embedding_residual: bool = False, pool: bool = False) -> None:
        super().__init__()
        self.layers, self.embedding_residual, self.pool = nn.ModuleList(layers), embedding_residual, pool
        self.gates = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in layers)
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        embedded = x = self.embed(x)
        if self.pool:
            x = functional.one_hot(torch.arange(TOKENS) // 2).to(x).T.expand(len(x), -1, -1) @ x / 2
        for layer, gate in zip(self.layers, self.gates, strict=True):
            x = layer(x)
            x = x + gate(x).sigmoid() * embedded if self.embedding_residual else x
        return self.head(x[:, -1])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def build_encoder(*kinds: str, embedding_residual: bool = False, pool: bool = False) -> tuple[Encoder, Tensor]:
    """``kinds``: branches of each layer: a attention, c convolution, k convolution with a cache, d linear attention, m MLP, r rounded by others, e experts, s sorted experts."""
    make = {"a": HybridAttention, "c": CausalConvolution, "k": CachedConvolution, "d": LinearAttention, "r": RoundedByOthers, "m": mlp, "e": RoutedExperts, "s": partial(RoutedExperts, sort=True)}
    layers = [HybridLayer(*(make[kind]() for kind in branches)) for branches in kinds]
    model = randomise(Encoder(layers, embedding_residual=embedding_residual, pool=pool)).double().eval().requires_grad_(False)
    return model, torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0)).double()


@pytest.mark.parametrize("tokens", [TOKENS, 1])
@pytest.mark.parametrize(
    ("kinds", "count"),
    [
        (("am", "am"), 0),
        (("cm", "am"), 1),
        (("km", "am"), 1),
        (("dm", "am"), 1),
        (("am", "dm", "am"), 1),
        (("am", "cm", "cm", "am"), 2),
        (("mam", "mam"), 0),
        (("macm", "macm"), 0),  # a convolution and an attention in each block
        (("ae", "ae"), 0),
        (("ar", "am"), 0),
    ],
)
def test_blocks_without_attention_are_counted(kinds: tuple[str, ...], count: int, tokens: int) -> None:
    model, x = build_encoder(*kinds)
    stream = read_structure(model, x[:, :tokens]).stream
    assert stream.mixing_count == count
    assert [bool(b.attentions) for b in stream.all_blocks] == ["a" in kind for kind in kinds]
    assert stream.all_blocks == stream.blocks or count
    ends = [b.exit for b in stream.all_blocks]
    assert [b.entry for b in stream.all_blocks[1:]] == ends[:-1]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_gradcam_of_block_without_attention(number: int) -> None:
    model, x = build_encoder("cm", "am", "cm")
    logits = model(x.clone().requires_grad_())
    features = model.layers[number].normed[0]
    (gradient,) = torch.autograd.grad(logits[:, 1].sum(), features)
    expected = torch.einsum("bnd,bd->bn", features.detach(), gradient.mean(1)).clamp(min=0)
    result = whyformer.explain(model, x, "gradcam", 1, blocks=number).scores
    assert float(expected.max()) > 0
    assert torch.allclose(result, expected, rtol=1e-9, atol=1e-12)


def gae(model: Encoder, x: Tensor, target: int) -> Tensor:
    logits = model(x.clone().requires_grad_())
    maps = [layer.branches[0].map for layer in model.layers]
    gradients = torch.autograd.grad(logits[:, target].sum(), maps)
    relevance = torch.eye(maps[0].shape[-1]).double().expand(2, -1, -1)
    for a, g in zip(maps, gradients, strict=True):
        relevance = relevance + (a * g).clamp(min=0).mean(1).detach() @ relevance
    return relevance[:, -1]


def test_gae_with_embedding_residuals() -> None:
    model, x = build_encoder("am", "am", "am", embedding_residual=True)
    blocks = read_structure(model, x).stream.blocks
    assert [len(b.attentions) for b in blocks] == [1, 1, 1]
    assert [b.entry for b in blocks[1:]] == [b.exit for b in blocks[:-1]]
    assert torch.allclose(whyformer.explain(model, x, "gae", 2).scores, gae(model, x, 2), rtol=1e-9)


def test_matrix_pooling_has_a_row_for_each_output() -> None:
    model, x = build_encoder("am", "am", pool=True)
    stream = read_structure(model, x).stream
    assert stream.rows.shape == (2, TOKENS // 2)
    assert len(stream.blocks) == 2


@pytest.mark.parametrize("experts", ["e", "s"])
def test_value_zeroing_with_experts_after_attention(experts: str) -> None:
    model, x = build_encoder(f"a{experts}", f"a{experts}")
    steps = []
    for layer in model.layers:
        states: list[Tensor] = []
        handle = layer.register_forward_hook(lambda m, a, out, states=states: states.append(out))
        for token in (None, *range(TOKENS)):
            layer.branches[0].zeroed_token = token
            model(x)
        layer.branches[0].zeroed_token = None
        handle.remove()
        plain, *changed = states
        distances = 1 - torch.cosine_similarity(torch.stack(changed, 2), plain[:, :, None], dim=-1)
        steps.append(distances / distances.sum(-1, keepdim=True))
    expected = (steps[1] @ steps[0])[:, -1]
    assert torch.allclose(whyformer.explain(model, x, "value_zeroing").scores, expected, rtol=1e-7)


class PostNormStack(nn.Module):
    """Post-norm layers of a convolution and an MLP."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branch for _ in range(layers) for branch in (CausalConvolution(), mlp()))
        self.norms, self.head = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in self.branches), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for branch, norm in zip(self.branches, self.norms, strict=True):
            x = norm(x + branch(x))
        return self.head(x[:, -1])


@pytest.mark.parametrize("layers", [2, 3])
def test_post_norm_layer_of_two_branches_is_one_block(layers: int) -> None:
    model = randomise(PostNormStack(layers)).double().eval().requires_grad_(False)
    stream = read_structure(model, torch.randn(2, TOKENS, WIDTH).double()).stream
    assert len(stream.all_blocks) == layers


class DenseHeads(nn.Module):
    """A head on the normalised output of each layer, as in dense prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(HybridLayer(HybridAttention(), mlp()) for _ in range(3)), nn.LayerNorm(WIDTH)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in self.layers)

    def forward(self, x: Tensor) -> Tensor:
        logits = []
        for layer, head in zip(self.layers, self.heads, strict=True):
            x = layer(x)
            logits.append(head(self.norm(x)[:, -1]))
        return sum(logits)


def test_blocks_with_a_head_each_are_found() -> None:
    model = randomise(DenseHeads()).double().eval().requires_grad_(False)
    blocks = read_structure(model, torch.randn(2, TOKENS, WIDTH).double()).stream.blocks
    assert [len(b.attentions) for b in blocks] == [1, 1, 1]
    assert [b.entry for b in blocks[1:]] == [b.exit for b in blocks[:-1]]


class TwoStateLayers(nn.Module):
    """Two versions of each state, which every layer mixes, so no single value is the output of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(HybridAttention() for _ in range(2)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        a, b = x, x.tanh()
        for attend in self.layers:
            y = attend(a + b)
            a, b = a + y + 0.5 * b, b - 0.3 * y + 0.2 * a
        return self.head(a + b)[:, -1]


def test_value_zeroing_without_state_between_attentions_is_refused() -> None:
    model = randomise(TwoStateLayers()).eval()
    with pytest.raises(MethodNotApplicable, match="value_zeroing is not supported yet"):
        whyformer.explain(model, torch.randn(2, TOKENS, WIDTH), "value_zeroing", 0)

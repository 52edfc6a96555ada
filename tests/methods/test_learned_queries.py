"""Learned queries with self-attention before cross-attention, as in DETR: attention map methods against references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import whyformer
from zoo import randomise

WIDTH, HEADS, QUERIES, TOKENS, CLASSES = 12, 3, 4, 6, 3


class MapStoringAttention(nn.Module):
    """x + attention of x to y; stores its map."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, query_input: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (self.q(query_input), self.k(keys), self.v(values)))
        self.map = (q @ k.mT / 2).softmax(-1)
        return self.norm(x + self.out((self.map @ v).transpose(1, 2).flatten(2)))


class DetectorLayer(nn.Module):
    def __init__(self, across: bool) -> None:
        super().__init__()
        self.own, self.across = MapStoringAttention(), MapStoringAttention() if across else None
        self.mlp, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, locations: Tensor, memory: Tensor | None = None) -> Tensor:
        x = self.own(x, x + locations, x + locations, x)
        if self.across is not None:
            x = self.across(x, x + locations, memory, memory)
        return self.norm(x + self.mlp(x).tanh())


class QueryDetector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.locations, self.query_input = nn.Parameter(torch.randn(TOKENS, WIDTH)), nn.Embedding(QUERIES, WIDTH)
        self.encoder = nn.ModuleList(DetectorLayer(False) for _ in range(2))
        self.decoder = nn.ModuleList(DetectorLayer(True) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.encoder:
            x = layer(x, self.locations)
        query_input = self.query_input.weight[None].repeat(len(x), 1, 1)
        state = torch.zeros_like(query_input)
        for layer in self.decoder:
            state = layer(state, query_input, x)
        return self.head(state[:, 1])


def build_detector() -> tuple[QueryDetector, Tensor]:
    model = randomise(QueryDetector()).double().eval()
    return model, torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0)).double()


def maps_and_gradients(model: QueryDetector, x: Tensor, target: int) -> tuple[list[Tensor], list[Tensor]]:
    """Attention maps in order of execution, and ∂logit/∂A of each."""
    logits = model(x)
    maps = [a.map for layer in (*model.encoder, *model.decoder) for a in (layer.own, layer.across) if a is not None]
    return maps, list(torch.autograd.grad(logits[:, target].sum(), maps))


@pytest.mark.parametrize("target", range(CLASSES))
def test_gae_equals_reference(target: int) -> None:
    model, x = build_detector()
    fused = [(a * g).clamp(min=0).mean(1).detach() for a, g in zip(*maps_and_gradients(model, x, target), strict=True)]

    def normalised(r: Tensor) -> Tensor:
        """N(R) = R̂ / rowsum(R̂) + I with R̂ = R − I"""
        eye = torch.eye(r.shape[-1]).double()
        sums = (r - eye).sum(-1, keepdim=True)
        return torch.where(sums != 0, (r - eye) / torch.where(sums != 0, sums, 1), 0) + eye

    encoder_relevance = torch.eye(TOKENS).double().expand(2, -1, -1)
    for attention in fused[:2]:
        encoder_relevance = encoder_relevance + attention @ encoder_relevance
    query_relevance, cross_relevance = torch.eye(QUERIES).double().expand(2, -1, -1), torch.zeros(2, QUERIES, TOKENS).double()
    for self_map, cross_map in zip(fused[2::2], fused[3::2], strict=True):
        query_relevance, cross_relevance = query_relevance + self_map @ query_relevance, cross_relevance + self_map @ cross_relevance
        cross_relevance = cross_relevance + normalised(query_relevance).mT @ cross_map @ normalised(encoder_relevance)
    e = whyformer.explain(model.requires_grad_(False), x, "gae", target)
    assert float(fused[2].abs().max()) > 1e-6  # the first self-attention of the queries is constant, and is included
    assert torch.allclose(e.scores, cross_relevance[:, 1], rtol=1e-9, atol=1e-12)


def test_rollout_equals_reference() -> None:
    model, x = build_detector()
    maps = [m.mean(1).detach() for m in maps_and_gradients(model, x, 0)[0]]
    row, tokens = torch.zeros(2, 1, QUERIES).double(), torch.zeros(2, 1, TOKENS).double()
    row[..., 1] = 1
    for self_map, cross_map in zip(maps[2::2][::-1], maps[3::2][::-1], strict=True):
        tokens, row = tokens + row @ cross_map / 2, row / 2  # rows of [I, A] sum to 2
        row = (row + row @ self_map) / 2
    for attention in maps[:2][::-1]:
        tokens = (tokens + tokens @ attention) / 2
    e = whyformer.explain(model.requires_grad_(False), x, "rollout")
    assert torch.allclose(e.scores, tokens[:, 0], rtol=1e-9)


@pytest.mark.parametrize("method", ["agcam", "gae", "rollout", "transformer_attribution", "partial_lrp", "value_zeroing", "libragrad"])
def test_batch_equals_single_samples(method: str) -> None:
    model, x = build_detector()
    model.requires_grad_(False)
    batch = whyformer.explain(model, x, method, 1).scores
    single = torch.cat([whyformer.explain(model, sample, method, 1).scores for sample in x.split(1)])
    assert float(batch.abs().max()) > 0
    assert torch.allclose(batch, single, rtol=1e-9, atol=1e-12 * float(batch.abs().max()))

"""Learned queries that look at one another before they look at an input, as DETR's do: methods of maps by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import whyformer
from zoo import randomise

WIDTH, HEADS, QUERIES, TOKENS, CLASSES = 12, 3, 4, 6, 3


class Attend(nn.Module):
    """x + attention of x to y; the map is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, asked: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (self.q(asked), self.k(keys), self.v(values)))
        self.map = (q @ k.mT / 2).softmax(-1)
        return self.norm(x + self.out((self.map @ v).transpose(1, 2).flatten(2)))


class Layer(nn.Module):
    def __init__(self, across: bool) -> None:
        super().__init__()
        self.own, self.across = Attend(), Attend() if across else None
        self.mlp, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, places: Tensor, memory: Tensor | None = None) -> Tensor:
        x = self.own(x, x + places, x + places, x)
        if self.across is not None:
            x = self.across(x, x + places, memory, memory)
        return self.norm(x + self.mlp(x).tanh())


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.places, self.asked = nn.Parameter(torch.randn(TOKENS, WIDTH)), nn.Embedding(QUERIES, WIDTH)
        self.encoder = nn.ModuleList(Layer(False) for _ in range(2))
        self.decoder = nn.ModuleList(Layer(True) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.encoder:
            x = layer(x, self.places)
        asked = self.asked.weight[None].repeat(len(x), 1, 1)
        state = torch.zeros_like(asked)
        for layer in self.decoder:
            state = layer(state, asked, x)
        return self.head(state[:, 1])


def built() -> tuple[Detector, Tensor]:
    model = randomise(Detector()).double().eval()
    return model, torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0)).double()


def maps_and_gradients(model: Detector, x: Tensor, target: int) -> tuple[list[Tensor], list[Tensor]]:
    """The maps, in the order of execution, and ∂logit/∂A of each."""
    logits = model(x)
    maps = [a.map for layer in (*model.encoder, *model.decoder) for a in (layer.own, layer.across) if a is not None]
    return maps, list(torch.autograd.grad(logits[:, target].sum(), maps))


@pytest.mark.parametrize("target", range(CLASSES))
def test_gae(target: int) -> None:
    model, x = built()
    fused = [(a * g).clamp(min=0).mean(1).detach() for a, g in zip(*maps_and_gradients(model, x, target), strict=True)]

    def excess(r: Tensor) -> Tensor:
        """N(R) = R̂ / rowsum(R̂) + I with R̂ = R − I"""
        eye = torch.eye(r.shape[-1]).double()
        sums = (r - eye).sum(-1, keepdim=True)
        return torch.where(sums != 0, (r - eye) / torch.where(sums != 0, sums, 1), 0) + eye

    own = torch.eye(TOKENS).double().expand(2, -1, -1)
    for one in fused[:2]:
        own = own + one @ own
    among, across = torch.eye(QUERIES).double().expand(2, -1, -1), torch.zeros(2, QUERIES, TOKENS).double()
    for looks, reads in zip(fused[2::2], fused[3::2], strict=True):
        among, across = among + looks @ among, across + looks @ across
        across = across + excess(among).mT @ reads @ excess(own)
    e = whyformer.explain(model.requires_grad_(False), x, "gae", target)
    assert float(fused[2].abs().max()) > 1e-6  # the first map among the queries is a constant, and counts
    assert torch.allclose(e.scores, across[:, 1], rtol=1e-9, atol=1e-12)


def test_rollout() -> None:
    model, x = built()
    maps = [m.mean(1).detach() for m in maps_and_gradients(model, x, 0)[0]]
    row, tokens = torch.zeros(2, 1, QUERIES).double(), torch.zeros(2, 1, TOKENS).double()
    row[..., 1] = 1
    for looks, reads in zip(maps[2::2][::-1], maps[3::2][::-1], strict=True):
        tokens, row = tokens + row @ reads / 2, row / 2  # rows of [I, A] sum to 2
        row = (row + row @ looks) / 2
    for one in maps[:2][::-1]:
        tokens = (tokens + tokens @ one) / 2
    e = whyformer.explain(model.requires_grad_(False), x, "rollout")
    assert torch.allclose(e.scores, tokens[:, 0], rtol=1e-9)


@pytest.mark.parametrize("method", ["gae", "rollout", "transformer_attribution", "partial_lrp", "value_zeroing", "libragrad"])
def test_a_batch_is_its_samples(method: str) -> None:
    model, x = built()
    model.requires_grad_(False)
    both = whyformer.explain(model, x, method, 1).scores
    single = torch.cat([whyformer.explain(model, one, method, 1).scores for one in x.split(1)])
    assert float(both.abs().max()) > 0
    assert torch.allclose(both, single, rtol=1e-9, atol=1e-12 * float(both.abs().max()))

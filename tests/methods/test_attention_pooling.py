"""Pooling by a softmax over tokens is one function, however it is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import whyformer
from whyformer.errors import MethodNotApplicable
from whyformer.methods import METHODS

Pooling = Callable[[nn.Module, Tensor], Tensor]

# the scores of a token are w·x + b, or those of a gated layer; the first of each group is the reference
ONE_HEAD: dict[str, Pooling] = {
    "einsum": lambda m, x: torch.einsum("bn,bnd->bd", m.score(x)[..., 0].softmax(-1), x),
    "product and sum": lambda m, x: (m.score(x).softmax(1) * x).sum(1),
    "product and sum of flat scores": lambda m, x: (m.score(x).squeeze(-1).softmax(-1)[..., None] * x).sum(1),
    "product and sum that keeps the axis": lambda m, x: (x * m.score(x).softmax(1)).sum(1, keepdim=True).squeeze(1),
    "transposed": lambda m, x: torch.bmm(m.score(x).softmax(1).transpose(1, 2), x)[:, 0],
    "matrix product": lambda m, x: (m.score(x).transpose(1, 2).softmax(-1) @ x).squeeze(1),
}
HEADS: dict[str, Pooling] = {
    "matrix product": lambda m, x: (m.scores(x).transpose(1, 2).softmax(-1) @ x).flatten(1),
    "product and sum": lambda m, x: (m.scores(x).softmax(1)[..., None] * x[:, :, None]).sum(1).flatten(1),
}
GATED: dict[str, Pooling] = {
    "einsum": lambda m, x: torch.einsum("bn,bnd->bd", m.gated(x)[..., 0].softmax(-1), x),
    "product and sum": lambda m, x: (m.gated(x).softmax(1) * x).sum(1),
}
GROUPS = {"one head": ONE_HEAD, "heads": HEADS, "gated": GATED}
METHODS_OF_MAPS = ("rollout", "gae", "transformer_attribution", "raw_attention", "alti", "decompx", "grad_sam", "attnlrp")


class Pooled(nn.Module):
    def __init__(self, pooling: Pooling, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))
        self.score, self.scores = nn.Linear(8, 1), nn.Linear(8, 3)
        self.first, self.second = nn.Linear(8, 4), nn.Linear(8, 4)
        self.weights, self.head = nn.Linear(4, 1), nn.Linear(width, 3)
        self.pooling = pooling

    def gated(self, x: Tensor) -> Tensor:
        return self.weights(self.first(x).tanh() * self.second(x).sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.pooling(self, x))


def scores(group: str, way: str, method: str) -> Tensor:
    model = Pooled(GROUPS[group][way], 24 if group == "heads" else 8).eval().double()
    vectors = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1)).double()
    return whyformer.explain(model, vectors, method, 1).scores


@pytest.mark.parametrize("method", METHODS_OF_MAPS)
@pytest.mark.parametrize(("group", "way"), [(group, way) for group, ways in GROUPS.items() for way in [*ways][1:]])
def test_pooling_has_the_same_scores_in_all_forms(group: str, way: str, method: str) -> None:
    assert method in METHODS
    expected = scores(group, next(iter(GROUPS[group])), method)
    torch.testing.assert_close(scores(group, way, method), expected, rtol=0, atol=1e-9 * float(expected.abs().max()))


class Residual(nn.Module):
    """Adds what is computed from each token alone, or with ``mixes`` from its neighbours too."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.inner = nn.Conv1d(8, 8, 3, padding=1) if mixes else nn.Conv1d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x.mT).relu().mT


@pytest.mark.parametrize("before", [(), (False,), (False, False)], ids=["nothing", "one MLP", "two MLPs"])
@pytest.mark.parametrize(("group", "way"), [(g, w) for g, ways in GROUPS.items() for w in ways if ways[w] is not HEADS["matrix product"]])
def test_pooling_without_attention_before_it(group: str, way: str, before: tuple[bool, ...]) -> None:
    model = Pooled(GROUPS[group][way], 24 if group == "heads" else 8).eval().double()
    model.blocks = nn.ModuleList(map(Residual, before)).double()
    vectors = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1)).double()
    x = vectors
    for block in model.blocks:
        x = block(x)
    score = {"one head": model.score, "heads": model.scores, "gated": model.gated}[group]
    weights = score(x).softmax(1).detach().requires_grad_()
    logits = model.head((weights.mT @ x.detach()).flatten(1))
    (gradient,) = torch.autograd.grad(logits[:, 1].sum(), weights)
    for method, expected in (("raw_attention", weights.detach()), ("gae", (gradient * weights.detach()).clamp(min=0))):
        torch.testing.assert_close(whyformer.explain(model, vectors, method, 1).scores, expected.mean(-1))


@pytest.mark.parametrize("method", ["rollout", "gae", "transformer_attribution"])
def test_pooling_of_tokens_mixed_without_attention_is_refused(method: str) -> None:
    model = Pooled(ONE_HEAD["einsum"], 8).eval()
    model.blocks = nn.ModuleList([Residual(True)])
    with pytest.raises(MethodNotApplicable):
        whyformer.explain(model, torch.randn(2, 5, 8), method, 1)


@pytest.mark.parametrize("method", ["rollout", "gae", "transformer_attribution"])
def test_several_queries_without_attention_before_them_are_refused(method: str) -> None:
    model = Pooled(HEADS["matrix product"], 24).eval()
    model.blocks = nn.ModuleList()
    with pytest.raises(MethodNotApplicable):
        whyformer.explain(model, torch.randn(2, 5, 8), method, 1)

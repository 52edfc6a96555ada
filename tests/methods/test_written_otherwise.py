"""The same function written in two ways has the same scores: experts, softmaxes that are shifted, norms behind a product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import whyformer

WIDTH, HEADS, EXPERTS = 16, 2, 3
METHODS = ["transformer_attribution", "lrp", "gae", "rollout", "attnlrp"]


class Reads(nn.Module):
    """Two blocks of attention and something else, written in one of two ways."""

    def __init__(self, part: str, other: bool) -> None:
        super().__init__()
        self.part, self.other, self.words = part, other, nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList(Block(part, other) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)
        self.eval()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


class Block(nn.Module):
    def __init__(self, part: str, other: bool) -> None:
        super().__init__()
        self.part, self.other = part, other
        self.joint, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.router, self.sink = nn.Linear(WIDTH, EXPERTS), nn.Parameter(torch.randn(1, HEADS, 1, 1))
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 4)
        self.bias = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 4)
        self.mixes = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.joint(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out((self.map(q @ k.mT / 3) @ v).transpose(1, 2).flatten(2))
        return x + (self.experts(x.flatten(0, 1)).view(x.shape) if self.part == "experts" else self.normed(x))

    def map(self, scores: Tensor) -> Tensor:
        if self.part != "sinks":
            return scores.softmax(-1)
        scores = torch.cat([scores, self.sink.expand(len(scores), -1, scores.shape[2], 1)], -1)
        if self.other:
            scores = scores - scores.max(-1, keepdim=True).values
        return scores.softmax(-1)[..., :-1]

    def normed(self, x: Tensor) -> Tensor:
        inverse = (x.pow(2).mean(-1, keepdim=True) + 0.5).rsqrt()
        return self.mixes(x) * inverse if self.other and self.part == "norm" else self.mixes(x * inverse)

    def experts(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).topk(1)
        if not self.other:
            rows = []
            for i in range(len(x)):
                e = int(chosen[i])
                rows.append(torch.nn.functional.linear(x[i], self.up[e].T, self.bias[e]).relu() @ self.down[e])
            return torch.stack(rows) * weight
        order = chosen[:, 0].argsort(stable=True)
        ends = torch.histc(chosen.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0).int()
        hidden = torch._grouped_mm(x[order], self.up, offs=ends) + self.bias[chosen[order, 0]]
        made = torch._grouped_mm(hidden.relu(), self.down, offs=ends)
        return made[order.argsort()] * weight


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("part", ["experts", "sinks", "norm"])
def test_the_same_function_has_the_same_scores(part: str, method: str) -> None:
    found = []
    for other in (False, True):
        torch.manual_seed(0)
        model, ids = Reads(part, other), {"input_ids": torch.randint(1, 20, (2, 8))}
        found.append(whyformer.explain(model, ids, method, 1))
    plain, other_way = found
    torch.testing.assert_close(other_way.logits, plain.logits, rtol=1e-5, atol=1e-5)
    assert (other_way.scores - plain.scores).abs().max() < 1e-4 * plain.scores.abs().max()


class ClassToken(nn.Module):
    """A class token attends to the other rows and is added to what it gets: kept apart, or as a row beside the others."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.apart = apart
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.query, self.key, self.value, self.head = (nn.Linear(8, n) for n in (8, 8, 8, 3))

    def forward(self, x: Tensor) -> Tensor:
        token = self.token.expand(len(x), -1, -1)
        rows = torch.cat([token, x], 1)
        if not self.apart:
            token = rows[:, :1]
        weights = (self.query(rows[:, :1]) @ self.key(rows).mT).softmax(-1)
        return self.head((token + weights @ self.value(rows))[:, 0])


@pytest.mark.parametrize("rule", ["separate", "shared", "epsilon"])
def test_a_class_token_takes_its_share_wherever_it_is_kept(rule: str) -> None:
    """One row of each sample is no bias, although it is the same for all rows that there are."""
    found, x = [], torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for apart in (True, False):
        torch.manual_seed(0)
        model = ClassToken(apart).double().eval()
        found.append(whyformer.explain(model, x, "lrp", target=1, rule=rule).scores)
        single = whyformer.explain(model, x[1:], "lrp", target=1, rule=rule).scores
        torch.testing.assert_close(single, found[-1][1:], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)

"""Equivalent implementations have the same scores: experts, softmax with a shift, norm after a product, class tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import whyformer

WIDTH, HEADS, EXPERTS = 16, 2, 3
METHODS = ["transformer_attribution", "lrp", "gae", "rollout", "attnlrp"]


class EquivalentModel(nn.Module):
    """Two blocks with attention and ``part``, in one of two implementations."""

    def __init__(self, part: str, alternative: bool) -> None:
        super().__init__()
        self.part, self.alternative, self.words = part, alternative, nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList(EquivalentBlock(part, alternative) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)
        self.eval()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


class EquivalentBlock(nn.Module):
    def __init__(self, part: str, alternative: bool) -> None:
        super().__init__()
        self.part, self.alternative = part, alternative
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
        if self.alternative:
            scores = scores - scores.max(-1, keepdim=True).values
        return scores.softmax(-1)[..., :-1]

    def normed(self, x: Tensor) -> Tensor:
        inverse = (x.pow(2).mean(-1, keepdim=True) + 0.5).rsqrt()
        return self.mixes(x) * inverse if self.alternative and self.part == "norm" else self.mixes(x * inverse)

    def experts(self, x: Tensor) -> Tensor:
        weight, expert = self.router(x).softmax(-1).topk(1)
        if not self.alternative:
            rows = []
            for i in range(len(x)):
                e = int(expert[i])
                rows.append(torch.nn.functional.linear(x[i], self.up[e].T, self.bias[e]).relu() @ self.down[e])
            return torch.stack(rows) * weight
        order = expert[:, 0].argsort(stable=True)
        ends = torch.histc(expert.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0).int()
        hidden = torch._grouped_mm(x[order], self.up, offs=ends) + self.bias[expert[order, 0]]
        outputs = torch._grouped_mm(hidden.relu(), self.down, offs=ends)
        return outputs[order.argsort()] * weight


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("part", ["experts", "sinks", "norm"])
def test_equivalent_implementations_have_same_scores(part: str, method: str) -> None:
    results = []
    for alternative in (False, True):
        torch.manual_seed(0)
        model, ids = EquivalentModel(part, alternative), {"input_ids": torch.randint(1, 20, (2, 8))}
        results.append(whyformer.explain(model, ids, method, 1))
    plain, alternative_result = results
    torch.testing.assert_close(alternative_result.logits, plain.logits, rtol=1e-5, atol=1e-5)
    assert (alternative_result.scores - plain.scores).abs().max() < 1e-4 * plain.scores.abs().max()


class ClassToken(nn.Module):
    """A class token with attention to all rows and a residual, stored separately or as one of the rows."""

    def __init__(self, separate_token: bool) -> None:
        super().__init__()
        self.separate_token = separate_token
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.query, self.key, self.value, self.head = (nn.Linear(8, n) for n in (8, 8, 8, 3))

    def forward(self, x: Tensor) -> Tensor:
        token = self.token.expand(len(x), -1, -1)
        rows = torch.cat([token, x], 1)
        if not self.separate_token:
            token = rows[:, :1]
        weights = (self.query(rows[:, :1]) @ self.key(rows).mT).softmax(-1)
        return self.head((token + weights @ self.value(rows))[:, 0])


@pytest.mark.parametrize("rule", ["separate", "shared", "epsilon"])
def test_class_token_has_same_relevance_separate_or_as_row(rule: str) -> None:
    """The class token is not a bias, although it is equal in all samples."""
    results, x = [], torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for separate_token in (True, False):
        torch.manual_seed(0)
        model = ClassToken(separate_token).double().eval()
        results.append(whyformer.explain(model, x, "lrp", target=1, rule=rule).scores)
        single = whyformer.explain(model, x[1:], "lrp", target=1, rule=rule).scores
        torch.testing.assert_close(single, results[-1][1:], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)

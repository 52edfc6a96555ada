"""Inputs of one token, whose attention maps have a single element, equal the same inputs with padding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import whyformer
from whyformer.errors import MethodNotApplicable
from zoo import randomise


class Attend(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (layer(t).unflatten(-1, (2, 4)).transpose(1, 2) for layer, t in ((self.q, x), (self.k, y), (self.v, y)))
        mixed = F.scaled_dot_product_attention(q, k, v, None if mask is None else mask[:, None, None, :])
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Translator(nn.Module):
    """An encoder, and a decoder of the ids shifted by one, with a start token; the head reads its first row."""

    def __init__(self, *, in_place: bool = True, learned: bool = False) -> None:
        super().__init__()
        self.table, self.in_place, self.learned = nn.Embedding(20, 8), in_place, learned
        self.query = nn.Parameter(torch.randn(1, 1, 8))
        self.encode, self.attend, self.cross = (nn.ModuleList(Attend() for _ in range(2)) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def shifted(self, ids: Tensor) -> Tensor:
        if not self.in_place:
            return torch.cat([torch.full_like(ids[:, :1], 3), ids[:, :-1]], 1)
        moved = ids.new_zeros(ids.shape)
        moved[:, 1:] = ids[:, :-1].clone()
        moved[:, 0] = 3
        return moved

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask.bool()
        x = self.table(input_ids)
        for layer in self.encode:
            x = layer(x, x, mask)
        y = self.query.expand(len(x), -1, -1) if self.learned else self.table(self.shifted(input_ids))
        first = torch.arange(y.shape[1])[None].expand(len(y), -1) < 1
        for attend, cross in zip(self.attend, self.cross, strict=True):
            y = cross(attend(y, y, first), x, mask)
        return self.head(y[:, 0])


def translator(**options: bool) -> Translator:
    model = Translator(**options).eval().double()
    randomise(model)
    return model


def inputs(rows: int, padding: int) -> dict[str, Tensor]:
    ids = torch.zeros(rows, 1 + padding, dtype=torch.long)
    ids[:, 0] = torch.arange(5, 5 + rows)
    return {"input_ids": ids, "attention_mask": (torch.arange(1 + padding) < 1).long().expand(rows, -1)}


@pytest.mark.parametrize("method", ["rollout", "gae", "attnlrp", "libragrad", "gradcam", "norm_attention"])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_start_token_alone_is_a_row_of_the_decoder(in_place: bool, method: str) -> None:
    model = translator(in_place=in_place)
    alone = whyformer.explain(model, inputs(2, 0), method=method, target=1)
    padded = whyformer.explain(model, inputs(2, 2), method=method, target=1)
    assert list(alone.inputs) == list(padded.inputs)
    for name in alone.inputs:
        torch.testing.assert_close(alone.part(name).scores, padded.part(name).scores[:, :1], rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("method", ["rollout", "gae", "transformer_attribution"])
def test_one_learned_query_of_one_token_is_not_taken_for_the_token(method: str) -> None:
    with pytest.raises(MethodNotApplicable, match="unknown"):
        whyformer.explain(translator(learned=True), inputs(1, 0), method=method, target=1)

"""Models whose last block attends to a second input alone."""

from __future__ import annotations

import re

import pytest
import torch
from test_two_streams import CLASSES, WIDTH, ResidualAttention, StreamBlock
from torch import Tensor, nn

import whyformer
from whyformer.errors import MethodNotApplicable
from zoo import randomise


class Reader(nn.Module):
    """A class of ``ids``, whose rows attend by turns to themselves and to ``vectors``, at the end to ``vectors``."""

    def __init__(self, turns: int, normed: bool, follows: bool) -> None:
        super().__init__()
        self.words, self.vectors, self.head = nn.Embedding(40, WIDTH), nn.Linear(5, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.own = nn.ModuleList(StreamBlock(False) for _ in range(turns))
        self.across, self.last = nn.ModuleList(ResidualAttention() for _ in range(turns)), nn.Linear(WIDTH, WIDTH)
        self.follows = follows
        for attend in self.across:
            attend.norm = attend.norm if normed else nn.Identity()

    def forward(self, ids: Tensor, vectors: Tensor) -> Tensor:
        x, y = self.words(ids), self.vectors(vectors)
        for own, across in zip(self.own, self.across, strict=True):
            x = across(own(x), y)
        x = x + self.last(x).tanh() if self.follows else x
        return self.head(x.mean(1))


def built(turns: int, normed: bool, follows: bool = False) -> tuple[Reader, dict[str, Tensor]]:
    draws = torch.Generator().manual_seed(1)
    inputs = {
        "ids": torch.randint(2, 40, (2, 6), generator=draws),
        "vectors": torch.randn(2, 4, 5, generator=draws, dtype=torch.float64),
    }
    return randomise(Reader(turns, normed, follows)).double().eval(), inputs


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("turns", [1, 2])
def test_gradcam_reads_what_the_queries_of_cross_attention_are_computed_from(
    turns: int, normed: bool, follows: bool
) -> None:
    model, inputs = built(turns, normed, follows)
    kept: list[Tensor] = []
    hook = model.across[-1].norm.register_forward_hook(lambda module, args, output: kept.append(output))
    logits = model(**inputs)
    hook.remove()
    # without a norm, features are the input of the block, which also feeds the residual
    (gradient,) = torch.autograd.grad(logits[:, 1].sum(), kept[0])
    wanted = torch.einsum("bnd,bd->bn", kept[0], gradient.mean(1)).clamp(min=0)
    found = whyformer.explain(model, inputs, "gradcam", 1)
    assert torch.allclose(found.scores, wanted, atol=1e-10)
    single = whyformer.explain(model, {n: t[1:] for n, t in inputs.items()}, "gradcam", 1)
    assert torch.allclose(single.scores[0], wanted[1], atol=1e-10)


@pytest.mark.parametrize("method", ["raw_attention", "partial_lrp", "gradcam_attention"])
@pytest.mark.parametrize("turns", [1, 2])
def test_a_block_that_does_not_attend_to_the_input_names_one_that_does(turns: int, method: str) -> None:
    model, inputs = built(turns, normed=True)
    with pytest.raises(MethodNotApplicable, match="does not attend to its input 'ids'") as refused:
        whyformer.explain(model, inputs, method, 1)
    assert "no attention connects" not in str(refused.value)
    (block,) = re.findall(r"block=(\d+)", str(refused.value))
    assert whyformer.explain(model, inputs, method, 1, block=int(block)).scores.abs().sum() > 0
    layers = re.findall(r"'layers': (\d+)", str(refused.value))
    assert len(layers) == (method == "raw_attention")
    for number in map(int, layers):
        found = whyformer.explain(model, inputs, method, 1, aggregation={"layers": number})
        assert torch.equal(found.scores, whyformer.explain(model, inputs, method, 1, block=number).scores)

"""Pooling over blocks: the formula written out slowly, and what it promises."""

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import whyformer
import zoo
from whyformer import targets
from whyformer.errors import InputError
from whyformer.methods.pooling import pooled

PROMPT = [5, 17, 3, 8, 21, 9]


@cache
def llama() -> Any:
    return zoo.llama_lm()[0].double()


def maps(blocks: int = 7, samples: int = 3, tokens: int = 11, seed: int = 0) -> torch.Tensor:
    """Maps that agree in part."""
    generator = torch.Generator().manual_seed(seed)
    common, own = (torch.randn(*shape, samples, tokens, generator=generator, dtype=torch.float64) for shape in ((1,), (blocks,)))
    return common.pow(3) + 0.3 * own


def slowly(products: np.ndarray) -> np.ndarray:
    """One sample's ``[B, N]`` -> ``[N]``, token by token."""
    blocks, tokens = products.shape
    unit = np.abs(products).mean() / 10_000
    voices = [[math.asinh(p / unit) for p in row] for row in products]
    correlations = [float(np.corrcoef(voices[a], voices[b])[0, 1]) for a in range(blocks) for b in range(blocks) if a != b]
    number = min(max(blocks / (1 + (blocks - 1) * sum(correlations) / len(correlations)), 1), 2)
    scores = [math.sinh(number * sum(row[j] for row in voices) / blocks) for j in range(tokens)]
    kept = sum(abs(products[:, j].sum()) for j in range(tokens))
    return np.array([s * kept / sum(map(abs, scores)) for s in scores])


@pytest.mark.parametrize("blocks", [2, 7, 24])
def test_the_formula_written_out(blocks: int) -> None:
    own = maps(blocks)
    found = pooled(own, "agreement")
    for i in range(own.shape[1]):
        np.testing.assert_allclose(found[i].numpy(), slowly(own[:, i].numpy()), rtol=1e-9)
    assert torch.equal(pooled(own, "sum"), own.sum(0))


def test_blocks_that_say_the_same_count_as_one() -> None:
    one = maps(1)
    torch.testing.assert_close(pooled(one.expand(9, -1, -1), "agreement"), 9 * one[0], atol=1e-12, rtol=1e-9)
    assert torch.equal(pooled(one, "agreement"), one[0])


def test_agreement_counts_for_more_than_one_loud_block() -> None:
    own = torch.ones(8, 1, 6, dtype=torch.float64) * torch.tensor([1.0, 3.0, -2.0, 0.1, 0.2, 0.0])
    own[:, 0, 5] = torch.tensor([24.0, *[0.0] * 7])
    assert own.sum(0)[0, 1] == own.sum(0)[0, 5] == 24
    found = pooled(own, "agreement")[0]
    assert found[5] < found[3] < found[0] < found[1]
    assert found[2] < 0


def test_the_scale_is_that_of_the_sum_whatever_the_unit_and_the_sign() -> None:
    own = maps()
    found = pooled(own, "agreement")
    torch.testing.assert_close(found.abs().sum(-1), own.sum(0).abs().sum(-1), atol=0, rtol=1e-12)
    torch.testing.assert_close(pooled(1e-6 * own, "agreement"), 1e-6 * found, atol=1e-18, rtol=1e-9)
    torch.testing.assert_close(pooled(-own, "agreement"), -found, atol=1e-12, rtol=1e-9)


def test_tokens_that_nothing_arrives_at_change_nothing() -> None:
    own = maps()
    wider = torch.cat([torch.zeros(7, 3, 2), own, torch.zeros(7, 3, 4)], -1).double()
    found = pooled(wider, "agreement")
    torch.testing.assert_close(found[:, 2:13], pooled(own, "agreement"), atol=1e-12, rtol=1e-9)
    assert not found[:, :2].any()
    assert not found[:, 13:].any()
    torch.testing.assert_close(pooled(own[:, 1:2], "agreement")[0], pooled(own, "agreement")[1], atol=1e-12, rtol=1e-9)


def test_few_tokens_many_blocks_and_nothing_at_all() -> None:
    two = torch.tensor([[[1.0, 3.0]], [[3.0, 1.0]]])
    torch.testing.assert_close(pooled(two, "agreement"), torch.tensor([[4.0, 4.0]]))
    many = pooled(1e20 * torch.randn(400, 2, 30, generator=torch.Generator().manual_seed(0)), "agreement")
    assert many.isfinite().all()
    assert many.dtype == torch.float32
    assert not pooled(torch.zeros(3, 2, 5), "agreement").any()


@pytest.mark.parametrize("method", ["attnlrp", "cp_lrp", "gim"])
def test_every_rule_and_blocks_that_run_again(method: str) -> None:
    own, target = llama(), targets.LogProbability(11)
    settings = {"share": 1, "pool": "agreement"}
    wanted = whyformer.explain(own, torch.tensor([PROMPT]), method, target, **settings)
    summed = whyformer.explain(own, torch.tensor([PROMPT]), method, target, **{**settings, "pool": "sum"})
    assert not torch.allclose(wanted.scores, summed.scores, atol=1e-6)
    assert float(wanted.scores.abs().sum()) == pytest.approx(float(summed.scores.abs().sum()), rel=1e-9)
    again = whyformer.explain(own, torch.tensor([PROMPT]), method, target, checkpoint=True, **settings)
    torch.testing.assert_close(again.scores, wanted.scores, atol=1e-10, rtol=0)
    padded = whyformer.explain(
        own, {"input_ids": torch.tensor([[*PROMPT, 0, 0], [7, 6, *PROMPT]]), "attention_mask": torch.tensor([[*[1] * 6, 0, 0], [1] * 8])},
        method, target, **settings,
    )  # fmt: skip
    torch.testing.assert_close(padded.scores[0, :6], wanted.scores[0], atol=1e-10, rtol=0)
    assert not padded.scores[0, 6:].any()


def test_what_is_taken_where_nothing_is_said() -> None:
    own, ids, word = llama(), torch.tensor([PROMPT]), targets.LogProbability(11)
    e = whyformer.explain(own, ids, "attnlrp", word)
    assert (e.diagnostics["share"], e.diagnostics["pool"]) == (0.8, "agreement")
    assert torch.equal(e.scores, whyformer.explain(own, ids, "attnlrp", word, share=0.8, pool="agreement").scores)
    assert whyformer.explain(own, ids, "attnlrp", word, pool="sum").diagnostics["share"] == 0.8
    logit = whyformer.explain(own, ids, "attnlrp", 11, share=0.8)
    assert logit.diagnostics["pool"] == "sum"
    assert "pool" not in whyformer.explain(own, ids, "attnlrp", 11).diagnostics
    with pytest.raises(InputError, match="pool"):
        whyformer.explain(own, ids, "attnlrp", word, pool="mean")

"""The attention rule against loops over every query, key and channel (methods.md §1.2–1.3)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from whyformer.rules.core import Call, Pass, Rule, Ruled
from whyformer.rules.relevance import attention, elementary

B, H, Q, K, D = 2, 2, 4, 5, 3
SCALE = D**-0.5


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def lower_triangle() -> Tensor:
    return torch.ones(Q, K, dtype=torch.bool).tril(1)


MASKS: dict[str, Tensor | None] = {
    "none": None,
    "padding, bool": torch.tensor([[True] * 5, [True] * 3 + [False] * 2])[:, None, None, :],
    "padding, -inf": torch.tensor([[0.0] * 5, [0.0] * 3 + [-math.inf] * 2], dtype=torch.float64)[:, None, None, :],
    "padding, -10000": torch.tensor([[0.0] * 5, [0.0] * 3 + [-1e4] * 2], dtype=torch.float64)[:, None, None, :],
    "padding, smallest": torch.tensor([[0.0] * 5, [0.0] * 3 + [torch.finfo(torch.float64).min] * 2], dtype=torch.float64)[:, None, None, :],
    "causal, bool": lower_triangle(),
    "bias": random(1, H, Q, K, seed=9),
    "bias and padding": random(1, H, Q, K, seed=9) + torch.tensor([[0.0] * 5, [0.0] * 3 + [-math.inf] * 2], dtype=torch.float64)[:, None, None, :],
}  # fmt: skip


def whole_mask(mask: Tensor | None) -> Tensor:
    if mask is None:
        return torch.zeros(B, H, Q, K, dtype=torch.float64)
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -math.inf)
    return mask.expand(B, H, Q, K)


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, start: Tensor, *, normalised: bool) -> dict[str, Tensor]:
    """One number at a time."""
    bias = whole_mask(mask)
    scores, maps = torch.zeros(B, H, Q, K, dtype=torch.float64), torch.zeros(B, H, Q, K, dtype=torch.float64)
    for b, h, i in torch.cartesian_prod(torch.arange(B), torch.arange(H), torch.arange(Q)).tolist():
        for j in range(K):
            scores[b, h, i, j] = sum(q[b, h, i, d] * k[b, h, j, d] for d in range(D)) * SCALE
        raised = [math.exp(scores[b, h, i, j] + bias[b, h, i, j]) for j in range(K)]
        maps[b, h, i] = torch.tensor([e / sum(raised) for e in raised], dtype=torch.float64)
    r_maps, r_v = torch.zeros_like(maps), torch.zeros_like(v)
    for b, h, i, d in torch.cartesian_prod(*map(torch.arange, (B, H, Q, D))).tolist():
        terms = [maps[b, h, i, j] * v[b, h, j, d] for j in range(K)]
        for j in range(K):
            share = terms[j] / sum(terms) * start[b, h, i, d] / 2
            r_maps[b, h, i, j] += share
            r_v[b, h, j, d] += share
    r_scores = r_maps.clone()
    if mask is not None and mask.dtype != torch.bool and bool(((mask != 0) & (mask > -1e4)).any()):
        # the addition of a bias to the scores: its own share is given up
        allowed = bias > -1e4
        total = torch.where(allowed, scores + bias, 1.0)
        ours, theirs = torch.where(allowed, scores / total * r_maps, 0), torch.where(allowed, bias / total * r_maps, 0)
        if normalised:
            for b in range(B):
                a, c = float(ours[b].sum()), float(theirs[b].sum())
                ours[b] *= abs(a) / (abs(a) + abs(c)) * float(r_maps[b].sum()) / a
        r_scores = ours
    r_q, r_k = torch.zeros_like(q), torch.zeros_like(k)
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, (B, H, Q, K))).tolist():
        if r_scores[b, h, i, j] == 0:
            continue
        for d in range(D):
            share = q[b, h, i, d] * k[b, h, j, d] * SCALE / scores[b, h, i, j] * r_scores[b, h, i, j] / 2
            r_q[b, h, i, d] += share
            r_k[b, h, j, d] += share
    return {"A": maps, "R_A": r_maps, "q": r_q, "k": r_k, "v": r_v}


def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, flow: Tensor, rule: Rule, *, relevance: bool) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}
    info = {"mask": mask, "scale": SCALE, "observe": lambda a, r: seen.update({"A": a, "R_A": r})}
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    output = Ruled.apply(rule, Pass(relevance=relevance, batch=B), compute, info, *leaves)
    flows = torch.autograd.grad(output, leaves, flow)
    return {**seen, **dict(zip("qkv", flows, strict=True))}


RULES = {
    True: Rule("attention", attention.attention_relevance(), attention.attention_gradient, keep_output=True),
    False: Rule("attention", attention.attention_relevance(elementary.add_plain), attention.attention_gradient, keep_output=True),
}


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("name", MASKS)
def test_against_loops(name: str, normalised: bool) -> None:
    q, k, v, start = random(B, H, Q, D), random(B, H, K, D, seed=1), random(B, H, K, D, seed=2), random(B, H, Q, D, seed=3)
    got = run(q, k, v, MASKS[name], start, RULES[normalised], relevance=True)
    wanted = reference(q, k, v, MASKS[name], start, normalised=normalised)
    for part, value in wanted.items():
        assert torch.allclose(got[part], value, rtol=1e-8, atol=1e-10), part


@pytest.mark.parametrize("name", MASKS)
def test_gradient_pass_equals_autograd(name: str) -> None:
    q, k, v, flow = random(B, H, Q, D), random(B, H, K, D, seed=1), random(B, H, K, D, seed=2), random(B, H, Q, D, seed=3)
    got = run(q, k, v, MASKS[name], flow, RULES[True], relevance=False)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    maps = ((leaves[0] @ leaves[1].mT) * SCALE + whole_mask(MASKS[name])).softmax(-1)
    wanted = torch.autograd.grad(maps @ leaves[2], [*leaves, maps], flow)
    for part, value in zip(("q", "k", "v", "R_A"), wanted, strict=True):
        assert torch.allclose(got[part], value, atol=1e-12), part


@pytest.mark.parametrize("name", ["none", "padding, bool", "padding, -inf", "causal, bool"])
def test_conservation(name: str) -> None:
    """Half of what arrives goes to the values, half to the map; half of that to queries and half to keys."""
    q, k, v, start = random(B, H, Q, D), random(B, H, K, D, seed=1), random(B, H, K, D, seed=2), random(B, H, Q, D, seed=3)
    got = run(q, k, v, MASKS[name], start, RULES[True], relevance=True)
    total = float(start.sum())
    assert float(got["v"].sum()) == pytest.approx(total / 2)
    assert float(got["R_A"].sum()) == pytest.approx(total / 2)
    assert float(got["q"].sum()) == pytest.approx(total / 4)
    assert float(got["k"].sum()) == pytest.approx(total / 4)


def test_padded_keys_and_values_get_nothing() -> None:
    q, k, v, start = random(B, H, Q, D), random(B, H, K, D, seed=1), random(B, H, K, D, seed=2), random(B, H, Q, D, seed=3)
    for name in ("padding, bool", "padding, -inf", "padding, -10000", "padding, smallest", "bias and padding"):
        got = run(q, k, v, MASKS[name], start, RULES[True], relevance=True)
        assert got["v"][1, :, 3:].eq(0).all(), name
        assert got["k"][1, :, 3:].eq(0).all(), name
        assert all(x.isfinite().all() for x in got.values()), name


def test_a_query_that_may_look_nowhere_gets_nothing() -> None:
    """A fused kernel gives such a row zeros, the plain softmax NaN."""
    mask = torch.ones(B, 1, Q, K, dtype=torch.bool)
    mask[0, :, 2] = False
    q, k, v, start = random(B, H, Q, D), random(B, H, K, D, seed=1), random(B, H, K, D, seed=2), random(B, H, Q, D, seed=3)
    for relevance in (True, False):
        got = run(q, k, v, mask, start, RULES[True], relevance=relevance)
        assert all(x.isfinite().all() for x in got.values())
        assert got["q"][0, :, 2].eq(0).all()


def test_by_hand() -> None:
    """One head, one query (q = 1), two keys with k = (0, ln 3), d = 1, scale 1; v = (2, 6); R = 1.

    Scores (0, ln 3), A = (1/4, 3/4), output 1/2 + 9/2 = 5. Terms 1/2 and 9/2: shares 1/10 and 9/10, halved: R_A = R_v =
    (1/20, 9/20). Scores: the first is 0, so its relevance is lost; the second: q and k get 9/40 each.
    """
    q, k, v = (torch.tensor(x, dtype=torch.float64).reshape(1, 1, -1, 1).requires_grad_() for x in ([1.0], [0.0, math.log(3)], [2.0, 6.0]))
    seen: list[Tensor] = []
    info = {"mask": None, "scale": 1.0, "observe": lambda a, r: seen.extend((a, r))}
    output = Ruled.apply(RULES[True], Pass(relevance=True), functional.scaled_dot_product_attention, info, q, k, v)
    r_q, r_k, r_v = torch.autograd.grad(output, (q, k, v), torch.ones_like(output))
    assert output.item() == pytest.approx(5)
    assert seen[0].flatten().tolist() == pytest.approx([1 / 4, 3 / 4])
    assert seen[1].flatten().tolist() == pytest.approx([1 / 20, 9 / 20])
    assert r_v.flatten().tolist() == pytest.approx([1 / 20, 9 / 20])
    assert r_q.item() == pytest.approx(9 / 40)
    assert r_k.flatten().tolist() == pytest.approx([0, 9 / 40])


@pytest.mark.parametrize(
    ("mask", "is_bias"),
    [
        (None, False),
        (torch.tensor([True, False]), False),
        (torch.tensor([0.0, -math.inf]), False),
        (torch.tensor([0.0, torch.finfo(torch.float32).min]), False),
        (torch.tensor([0.0, -1e4]), False),
        (torch.tensor([0.5, 0.0]), True),
        (torch.tensor([0.5, -math.inf]), True),
    ],
)
def test_only_a_bias_takes_a_share_of_the_scores(mask: Tensor | None, is_bias: bool) -> None:
    assert (attention.additive_bias(mask) is not None) == is_bias


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_few_heads_at_a_time_give_the_same_gradients(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = random(B, H, Q, D), random(B, H, K, D, seed=1), random(B, H, K, D, seed=2)
    flow, seen = random(B, H, Q, D, seed=3), {False: [], True: []}

    def gradients(by_heads: bool) -> list[Tensor]:
        info = {
            "mask": MASKS[mask], "scale": SCALE, "by_heads": by_heads,
            "observe": lambda a, g: seen[by_heads].append((a, g.clone())),
        }  # fmt: skip
        call = Call((q, k, v), None, (True, True, True), torch.add, Pass(), info)
        return [g for g in attention.attention_gradient(call, flow) if g is not None]

    monkeypatch.setattr(attention, "_AT_ONCE", 1)
    whole, parts = gradients(False), gradients(True)
    assert len(seen[True]) == H
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-14)
    for which in (0, 1):
        torch.testing.assert_close(seen[False][0][which], torch.cat([part[which] for part in seen[True]], 1))


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_few_heads_at_a_time_give_the_same_relevance(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bias all heads at once, for it takes a share of all scores."""
    q, k, v = random(B, H, Q, D), random(B, H, K, D, seed=1), random(B, H, K, D, seed=2)
    relevance, seen = random(B, H, Q, D, seed=3), {False: [], True: []}
    rule = attention.attention_relevance()

    def flows(by_heads: bool) -> list[Tensor]:
        info = {
            "mask": MASKS[mask], "scale": SCALE, "by_heads": by_heads,
            "observe": lambda a, r: seen[by_heads].append((a, r.clone())),
        }  # fmt: skip
        output = attention.masked_softmax(q @ k.mT * SCALE, MASKS[mask]) @ v
        call = Call((q, k, v), output, (True, True, True), torch.add, Pass(relevance=True), info)
        return [r for r in rule(call, relevance) if r is not None]

    monkeypatch.setattr(attention, "_AT_ONCE", 1)
    whole, parts = flows(False), flows(True)
    assert len(seen[True]) == (H if attention.additive_bias(MASKS[mask]) is None else 1)
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    for which in (0, 1):
        torch.testing.assert_close(seen[False][0][which], torch.cat([part[which] for part in seen[True]], 1))

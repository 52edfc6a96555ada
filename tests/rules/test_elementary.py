"""Rules of additions and products: the paper's Eq. 6–10 and its two lemmas, against loops written out."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from single import run_rule
from whyformer.rules.core import Pass, Rule, safe_divide, unbroadcast
from whyformer.rules.relevance import elementary

ADD = Rule("add", elementary.add_plain, elementary.add_gradient)
NORMALISED = Rule("add", elementary.add_normalised, elementary.add_gradient)
PRODUCT = Rule("product", elementary.product_halved)
WEIGHTED = Rule("weighted sum", elementary.z_rule)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def normalise(u: Tensor, v: Tensor, total: float) -> tuple[Tensor, Tensor]:
    """The paper's normalisation of two operands' relevances of one sample (between Eq. 9 and Lemma 2)."""
    a, b = float(u.sum()), float(v.sum())
    return (
        u * abs(a) / (abs(a) + abs(b)) * total / a,
        v * abs(b) / (abs(a) + abs(b)) * total / b,
    )


# -- Lemma 1 and the example that motivates the normalisation ------------------------------------------------------
def test_example_of_exploding_relevance() -> None:
    """Eq. 8–9: u = (e^a, e^b), v = (1 − e^a, 1 − e^b), R = (1, 1): R^u = u and R^v = v, of any size, with sum 2."""
    a, b = 6.0, 9.0
    u = torch.tensor([[math.exp(a), math.exp(b)]], dtype=torch.float64)
    v = 1 - u
    start = torch.ones(1, 2, dtype=torch.float64)
    r_u, r_v = run_rule(ADD, torch.add, (u, v), start)
    assert torch.allclose(r_u, u) and torch.allclose(r_v, v)
    assert float(r_u.sum() + r_v.sum()) == pytest.approx(2)
    # ΣR^u = S, ΣR^v = 2 − S with S = e^a + e^b: normalised sums S/(2S − 2) · 2 = S/(S − 1) and (S − 2)/(S − 1), of size 1
    n_u, n_v = run_rule(NORMALISED, torch.add, (u, v), start)
    s = math.exp(a) + math.exp(b)
    assert float(n_u.sum()) == pytest.approx(s / (s - 1))
    assert float(n_v.sum()) == pytest.approx((s - 2) / (s - 1))
    # within each operand the proportions stay: R̄^u_1 = e^a / S · S/(S − 1) = e^a / (S − 1)
    assert n_u[0].tolist() == pytest.approx([math.exp(a) / (s - 1), math.exp(b) / (s - 1)])
    assert n_v[0].tolist() == pytest.approx([(math.exp(a) - 1) / (s - 1), (math.exp(b) - 1) / (s - 1)])


@given(seed=st.integers(0, 10**6), size=st.integers(1, 20))
def test_lemma_1_addition_conserves(seed: int, size: int) -> None:
    u, v, start = random(1, size, seed=seed), random(1, size, seed=seed + 1), random(1, size, seed=seed + 2)
    r_u, r_v = run_rule(ADD, torch.add, (u, v), start)
    assert float((r_u + r_v - start).abs().max()) <= 1e-9 * float(r_u.abs().max() + 1)  # even value by value


@given(seed=st.integers(0, 10**6), rows=st.integers(1, 4), inner=st.integers(1, 5), columns=st.integers(1, 4))
def test_lemma_1_a_product_does_not_conserve_until_it_is_halved(seed: int, rows: int, inner: int, columns: int) -> None:
    """Each operand alone already receives all of ΣR: Eq. 6 counts it twice."""
    u, v, start = random(1, rows, inner, seed=seed), random(1, inner, columns, seed=seed + 1), random(1, rows, columns, seed=seed + 2)
    whole = run_rule(WEIGHTED, torch.matmul, (u, v), start)
    total, noise = float(start.sum()), 1e-9 * (1 + max(float(r.abs().max()) for r in whole))
    assert float(whole[0].sum()) == pytest.approx(total, abs=noise)
    assert float(whole[1].sum()) == pytest.approx(total, abs=noise)
    halved = run_rule(PRODUCT, torch.matmul, (u, v), start)
    assert float(halved[0].sum() + halved[1].sum()) == pytest.approx(total, abs=noise)


# -- Lemma 2 ---------------------------------------------------------------------------------------------------------
@given(seed=st.integers(0, 10**6), size=st.integers(1, 12), positive=st.booleans())
def test_lemma_2(seed: int, size: int, positive: bool) -> None:
    """(i) ΣR̄^u + ΣR̄^v = ΣR; (ii) both sums lie between 0 and ΣR (Eq. 10; for ΣR < 0 between ΣR and 0)."""
    u, v, start = random(2, size, seed=seed), random(2, size, seed=seed + 1), random(2, size, seed=seed + 2)
    start = start.abs() if positive else start
    r_u, r_v = run_rule(NORMALISED, torch.add, (u, v), start)
    for sample in range(2):
        total = float(start[sample].sum())
        ours, theirs = float(r_u[sample].sum()), float(r_v[sample].sum())
        noise = 1e-9 * (1 + float(r_u.abs().max() + r_v.abs().max()))
        assert ours + theirs == pytest.approx(total, abs=noise)
        for part in (ours, theirs):
            assert min(0.0, total) - noise <= part <= max(0.0, total) + noise


def test_a_sum_of_the_other_sign_is_flipped() -> None:
    """Quirk 9 of the reference, kept: u = (2, −1), v = (−1, 2), R = (1, −3).

    u + v = (1, 1), so R^u = (2, 3), R^v = (−1, −6): sums 5 and −7, ΣR = −2. Normalised sums: 5/12 · (−2) and 7/12 · (−2),
    so R̄^u = (2, 3) · (−10/12) / 5 = (−1/3, −1/2) and R̄^v = (−1, −6) · (−14/12) / (−7) = (−1/6, −1).
    """
    u, v, start = (torch.tensor([row], dtype=torch.float64) for row in ([2.0, -1.0], [-1.0, 2.0], [1.0, -3.0]))
    r_u, r_v = run_rule(NORMALISED, torch.add, (u, v), start)
    assert r_u[0].tolist() == pytest.approx([-1 / 3, -1 / 2])
    assert r_v[0].tolist() == pytest.approx([-1 / 6, -1])


# -- dense references --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(1, 1), (2, 5), (3, 4, 6), (2, 3, 4, 5)])
def test_normalised_addition_sums_per_sample(shape: tuple[int, ...]) -> None:
    u, v, start = random(*shape), random(*shape, seed=1), random(*shape, seed=2)
    r_u, r_v = run_rule(NORMALISED, torch.add, (u, v), start)
    for b in range(shape[0]):
        parts = u[b] * start[b] / (u[b] + v[b]), v[b] * start[b] / (u[b] + v[b])
        wanted = normalise(*parts, float(start[b].sum()))
        assert torch.allclose(r_u[b], wanted[0], rtol=1e-9)
        assert torch.allclose(r_v[b], wanted[1], rtol=1e-9)


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_normalised_addition_with_tokens_first(batch: int) -> None:
    """``[N, B, D]``: the sums run over tokens and width of one sample, also where there are as many tokens as samples."""
    tokens = 3
    u, v, start = (random(batch, tokens, 4, seed=s) for s in range(3))
    wanted = run_rule(NORMALISED, torch.add, (u, v), start, batch=batch)
    turned = [x.transpose(0, 1).contiguous() for x in (u, v, start)]
    got = run_rule(NORMALISED, torch.add, turned[:2], turned[2], batch=batch, sequence_first=True)
    for a, b in zip(got, wanted, strict=True):
        assert torch.allclose(a.transpose(0, 1), b, rtol=1e-12)


def test_normalised_addition_over_windows() -> None:
    """``[B · windows, n, D]``: windows of one sample lie next to each other and are summed together."""
    batch, windows = 2, 4
    u, v, start = (random(batch * windows, 3, 5, seed=s) for s in range(3))
    got = run_rule(NORMALISED, torch.add, (u, v), start, batch=batch)
    whole = [x.reshape(batch, -1) for x in (u, v, start)]
    wanted = run_rule(NORMALISED, torch.add, whole[:2], whole[2], batch=batch)
    for a, b in zip(got, wanted, strict=True):
        assert torch.allclose(a.reshape(batch, -1), b, rtol=1e-12)


@pytest.mark.parametrize("rule", [ADD, NORMALISED], ids=["plain", "normalised"])
@pytest.mark.parametrize("other", [(1, 3, 4), (3, 4), (4,), (2, 1, 4), (2, 3, 1)])
def test_additions_that_broadcast(rule: Rule, other: tuple[int, ...]) -> None:
    """As for the stretched operand written out; its copies' relevance is summed."""
    u, v, start = random(2, 3, 4), random(*other, seed=1), random(2, 3, 4, seed=2)
    r_u, r_v = run_rule(rule, torch.add, (u, v), start)
    w_u, w_v = run_rule(rule, torch.add, (u, v.expand(2, 3, 4).contiguous()), start)
    assert torch.allclose(r_u, w_u, rtol=1e-12)
    assert torch.allclose(r_v, unbroadcast(w_v, v.shape), rtol=1e-12)
    assert r_v.shape == v.shape


@pytest.mark.parametrize("rule", [ADD, NORMALISED], ids=["plain", "normalised"])
def test_a_difference_is_the_sum_with_the_negative(rule: Rule) -> None:
    u, v, start = (random(2, 5, seed=s) for s in range(3))
    minus = run_rule(rule, torch.sub, (u, v), start, info={"signs": (1, -1)})
    plus = run_rule(rule, torch.add, (u, -v), start)
    for a, b in zip(minus, plus, strict=True):
        assert torch.allclose(a, b, rtol=1e-12)


def test_the_share_of_a_constant_is_given_up() -> None:
    """Only the carrying operand is told; its share does not grow by what the other gives up."""
    u, v, start = (random(2, 5, seed=s) for s in range(3))
    both = run_rule(NORMALISED, torch.add, (u, v), start)
    (one,) = run_rule(NORMALISED, torch.add, (u, v), start, carrying=(True, False))
    assert torch.equal(one, both[0])


def test_an_addition_to_minus_infinity() -> None:
    """A forbidden place of an attention mask carries nothing and makes no NaN."""
    u, start = random(1, 4), random(1, 4, seed=1)
    mask = torch.tensor([[0.0, 0.0, float("-inf"), 0.0]], dtype=torch.float64)
    start[0, 2] = 0
    (got,) = run_rule(NORMALISED, torch.add, (u, mask), start, carrying=(True, False))
    assert got.isfinite().all()
    assert got[0, 2] == 0
    assert torch.allclose(got[0, [0, 1, 3]], start[0, [0, 1, 3]])


@pytest.mark.parametrize("shapes", [((2, 3), (3, 4)), ((2, 2, 3), (2, 3, 4)), ((2, 3, 4, 5), (2, 3, 5, 2))])
def test_product_against_every_term_written_out(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """z_ijk = u_ij v_jk; R_ij = ½ Σ_k z_ijk / Σ_j' z_ij'k · R_ik, and v_jk the same summed over i."""
    u, v = random(*shapes[0]), random(*shapes[1], seed=1)
    start = random(*(u @ v).shape, seed=2)
    r_u, r_v = run_rule(PRODUCT, torch.matmul, (u, v), start)
    z = u[..., :, :, None] * v[..., None, :, :]
    share = z / z.sum(-2, keepdim=True) * start[..., :, None, :] / 2
    assert torch.allclose(r_u, share.sum(-1), rtol=1e-9)
    assert torch.allclose(r_v, share.sum(-3), rtol=1e-9)


def test_product_by_hand() -> None:
    """(1 2) · (3, −1)ᵀ = 3 − 2 = 1, R = 4: shares 3/1 and −2/1 of 4, halved: 6 and −4 to each operand."""
    u, v, start = (torch.tensor(x, dtype=torch.float64) for x in ([[1.0, 2.0]], [[3.0], [-1.0]], [[4.0]]))
    r_u, r_v = run_rule(PRODUCT, torch.matmul, (u, v), start)
    assert r_u.tolist() == [[6, -4]]
    assert r_v.tolist() == [[6], [-4]]


@pytest.mark.parametrize(
    "compute",
    [lambda x: x.mean(1), lambda x: x.sum((1, 2)), lambda x: x @ random(4, 2, seed=5), lambda x: torch.einsum("bnd,n->bd", x, random(3, seed=6))],
    ids=["mean", "sum", "matmul", "einsum"],
)
def test_weighted_sums(compute) -> None:
    """R_i = Σ_o x_i J_oi / y_o · R_o with the Jacobian J written out."""
    x = random(2, 3, 4)
    output = compute(x)
    start = random(*output.shape, seed=1)
    (got,) = run_rule(WEIGHTED, compute, (x,), start)
    jacobian = torch.autograd.functional.jacobian(compute, x).reshape(output.numel(), -1)
    wanted = (jacobian * x.reshape(1, -1) / output.reshape(-1, 1) * start.reshape(-1, 1)).sum(0).reshape(x.shape)
    assert torch.allclose(got, wanted, rtol=1e-9)
    assert float(got.sum()) == pytest.approx(float(start.sum()))


def test_product_of_two_branches_gives_half_to_each() -> None:
    u, v, start = random(2, 3, 4), random(2, 3, 1, seed=1), random(2, 3, 4, seed=2)
    r_u, r_v = run_rule(Rule("mul", elementary.multiply_halved), torch.mul, (u, v), start)
    assert torch.equal(r_u, start / 2)
    assert torch.allclose(r_v, start.sum(-1, keepdim=True) / 2)


@pytest.mark.parametrize("compute", [torch.tanh, torch.nn.functional.gelu, lambda x: x.softmax(-1), lambda x: torch.nn.functional.layer_norm(x, (4,))])
def test_identity(compute) -> None:
    start = random(2, 3, 4, seed=1)
    (got,) = run_rule(Rule("identity", elementary.identity), compute, (random(2, 3, 4),), start)
    assert torch.equal(got, start)


# -- arithmetic ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_safe_division(dtype: torch.dtype) -> None:
    """Nothing is added to a denominator; 0 and what underflows to it give 0."""
    tiny = torch.finfo(dtype).tiny
    top = torch.tensor([1.0, 1.0, 0.0, -3.0, 2.0], dtype=dtype)
    bottom = torch.tensor([0.0, -0.0, 0.0, 2.0, tiny / 2], dtype=dtype)
    assert safe_divide(top, bottom).tolist() == [0.0, 0.0, 0.0, -1.5, 0.0]


def test_safe_division_keeps_the_sign_of_a_small_denominator() -> None:
    """The reference adds 1e-9: −1e-9 would become a division by 0 (methods.md §8 #7)."""
    top, bottom = torch.tensor([1.0], dtype=torch.float64), torch.tensor([-1e-9], dtype=torch.float64)
    assert safe_divide(top, bottom).item() == pytest.approx(-1e9)


def test_sums_per_sample() -> None:
    values = torch.arange(24.0).reshape(2, 3, 4)
    assert Pass(batch=2).per_sample(values).tolist() == [66, 210]
    assert Pass(batch=3, sequence_first=True).per_sample(values).tolist() == [60, 92, 124]
    assert Pass(batch=1).per_sample(values[:1]).tolist() == [66]
    factor = torch.tensor([1.0, 10.0])
    assert torch.equal(Pass(batch=2).spread(factor, values).expand_as(values)[1], torch.full((3, 4), 10.0))


def test_the_ledger_books_what_arrives_and_what_leaves() -> None:
    from whyformer.rules.core import Ruled

    run = Pass(relevance=True, batch=2)
    u, v = random(2, 3).requires_grad_(), random(2, 3, seed=1)
    start = random(2, 3, seed=2)
    torch.autograd.grad(Ruled.apply(ADD, run, torch.add, {}, u, v), u, start)
    arrived, left = run.ledger["add"]
    assert torch.allclose(arrived, start.sum(-1))
    assert torch.allclose(left + (v * start / (u.detach() + v)).sum(-1), arrived)

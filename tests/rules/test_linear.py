"""Rules of linear layers and convolutions against dense float64 references: every product z_oj = w_oj x_j is written out."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from whyformer.rules.core import Call, Pass, Rule, Ruled
from whyformer.rules.relevance import linear

Shape = tuple[int, ...]
SHAPES: list[tuple[Shape, int]] = [((1, 1), 1), ((1, 4), 3), ((5, 3), 7), ((2, 6, 8), 5), ((2, 3, 4, 5), 6)]


def ratio(top: Tensor, bottom: Tensor) -> Tensor:
    """top / bottom, 0 where bottom is 0: an output without a product of that kind gives nothing."""
    return torch.where(bottom == 0, 0, top / torch.where(bottom == 0, 1, bottom))


# -- references: x [M, I], w [O, I], R [M, O]; z [M, O, I] -------------------------------------------------------------
def products(x: Tensor, weight: Tensor) -> Tensor:
    return x[:, None, :] * weight[None]


def shared(x: Tensor, weight: Tensor, bias: Tensor | None, relevance: Tensor, *, alpha: float = 1.0) -> Tensor:
    z = products(x, weight)
    up, down = z.clamp(min=0), z.clamp(max=0)
    up, down = ratio(up, up.sum(-1, keepdim=True)), ratio(down, down.sum(-1, keepdim=True))
    return ((alpha * up - (alpha - 1) * down) * relevance[..., None]).sum(1)


def separate(x: Tensor, weight: Tensor, bias: Tensor | None, relevance: Tensor) -> Tensor:
    z = products(x, weight)
    both_up = z * ((x > 0)[:, None] & (weight > 0)[None])
    both_down = z * ((x < 0)[:, None] & (weight < 0)[None])
    share = ratio(both_up, both_up.sum(-1, keepdim=True)) + ratio(both_down, both_down.sum(-1, keepdim=True))
    return (share * relevance[..., None]).sum(1)


def epsilon(x: Tensor, weight: Tensor, bias: Tensor | None, relevance: Tensor, *, epsilon: float) -> Tensor:
    z = products(x, weight)
    y = z.sum(-1) + (0 if bias is None else bias)
    stabilised = torch.where(y < 0, y - epsilon, y + epsilon)
    return (ratio(z, stabilised[..., None]) * relevance[..., None]).sum(1)


def gamma(x: Tensor, weight: Tensor, bias: Tensor | None, relevance: Tensor, *, gamma: float) -> Tensor:
    z = products(x, weight)
    favoured = torch.where(z.sum(-1, keepdim=True) < 0, z.clamp(max=0), z.clamp(min=0))
    z = z + gamma * favoured
    return (ratio(z, z.sum(-1, keepdim=True)) * relevance[..., None]).sum(1)


RULES: dict[str, tuple[Rule, Any]] = {
    "shared": (Rule("linear", linear.alpha_beta(1.0), linear.layer_gradient, keep_output=True), shared),
    "alpha 2": (Rule("linear", linear.alpha_beta(2.0), linear.layer_gradient, keep_output=True), lambda *a: shared(*a, alpha=2.0)),
    "alpha 1.5": (Rule("linear", linear.alpha_beta(1.5), linear.layer_gradient, keep_output=True), lambda *a: shared(*a, alpha=1.5)),
    "separate": (Rule("linear", linear.separate, linear.layer_gradient), separate),
    "epsilon": (Rule("linear", linear.epsilon(1e-2), linear.layer_gradient, keep_output=True), lambda *a: epsilon(*a, epsilon=1e-2)),
    "epsilon 0": (Rule("linear", linear.epsilon(0.0), linear.layer_gradient, keep_output=True), lambda *a: epsilon(*a, epsilon=0.0)),
    "gamma": (Rule("linear", linear.gamma(0.25), linear.layer_gradient, keep_output=True), lambda *a: gamma(*a, gamma=0.25)),
    "gamma 3": (Rule("linear", linear.gamma(3.0), linear.layer_gradient, keep_output=True), lambda *a: gamma(*a, gamma=3.0)),
}
every_rule = pytest.mark.parametrize("name", RULES)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def apply(name: str, x: Tensor, weight: Tensor, bias: Tensor | None, relevance: Tensor, *, flow: bool = True) -> Tensor:
    """What arrives at x; ``flow=False`` sends an ordinary gradient through the same graph."""
    x = x.clone().requires_grad_()
    operands = [weight] if bias is None else [weight, bias]
    output = Ruled.apply(RULES[name][0], Pass(relevance=flow, batch=x.shape[0]), functional.linear, {}, x, *operands)
    assert torch.equal(output, functional.linear(x, *operands))
    return torch.autograd.grad(output, x, relevance)[0]


def dense(name: str, x: Tensor, weight: Tensor, bias: Tensor | None, relevance: Tensor) -> Tensor:
    flat = RULES[name][1](x.reshape(-1, x.shape[-1]), weight, bias, relevance.reshape(-1, relevance.shape[-1]))
    return flat.reshape(x.shape)


@pytest.mark.part(times=2)
@every_rule
@pytest.mark.parametrize(("shape", "outputs"), SHAPES)
@pytest.mark.parametrize("biased", [True, False])
def test_against_the_dense_reference(name: str, shape: Shape, outputs: int, biased: bool) -> None:
    x, weight, relevance = random(*shape), random(outputs, shape[-1], seed=1), random(*shape[:-1], outputs, seed=2)
    bias = random(outputs, seed=3) if biased else None
    assert torch.allclose(apply(name, x, weight, bias, relevance), dense(name, x, weight, bias, relevance), rtol=1e-9, atol=1e-9)


@every_rule
@pytest.mark.parametrize("alive", [0, 1, 3, 8])
def test_leaving_dead_rows_out_changes_nothing(name: str, alive: int) -> None:
    """Behind a CLS readout nearly every row carries nothing and is skipped; wherever the live ones lie."""
    x, weight, bias = random(1, 8, 5), random(4, 5, seed=1), random(4, seed=3)
    for rows in itertools.islice(itertools.combinations(range(8), alive), 12):
        relevance = torch.zeros(1, 8, 4, dtype=torch.float64)
        relevance[:, list(rows)] = random(1, alive, 4, seed=2)
        got = apply(name, x, weight, bias, relevance)
        assert torch.allclose(got, dense(name, x, weight, bias, relevance), rtol=1e-9, atol=1e-9)
        assert got[:, [r for r in range(8) if r not in rows]].eq(0).all()


def test_live_rows_are_found_only_where_that_saves_work() -> None:
    flow = torch.zeros(10, 3)
    assert linear.live_rows(flow) is not None
    flow[4, 1] = 1
    rows = linear.live_rows(flow)
    assert rows is not None and rows.tolist() == [4]
    flow[:, 0] = 1
    assert linear.live_rows(flow) is None


@every_rule
@pytest.mark.parametrize("kind", ["zero input", "zero weights", "ones"])
def test_degenerate_values_give_no_nan(name: str, kind: str) -> None:
    x = torch.zeros(2, 3, dtype=torch.float64) if kind == "zero input" else torch.ones(2, 3, dtype=torch.float64)
    weight = torch.zeros(4, 3, dtype=torch.float64) if kind == "zero weights" else torch.ones(4, 3, dtype=torch.float64)
    got = apply(name, x, weight, None, torch.ones(2, 4, dtype=torch.float64))
    assert got.isfinite().all()
    if kind != "ones":
        assert got.eq(0).all()


@every_rule
@given(rows=st.integers(1, 4), inputs=st.integers(1, 6), outputs=st.integers(1, 5), seed=st.integers(0, 10**6), zeros=st.floats(0, 0.7))
def test_any_shape_and_any_zeros(name: str, rows: int, inputs: int, outputs: int, seed: int, zeros: float) -> None:
    """Exact zeros in the input, in the weights and in the relevance: 0/0 is 0, not NaN."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return values * (torch.rand(*shape, generator=generator) >= zeros)

    x, weight, relevance = draw(rows, inputs), draw(outputs, inputs), draw(rows, outputs)
    wanted = dense(name, x, weight, None, relevance)
    # where an output nearly cancels, its products' shares are large, and their rounding with them
    z = products(x, weight).abs().sum(-1)
    y = functional.linear(x, weight).abs()
    steep = float(torch.where(y > 0, z / torch.where(y > 0, y, 1), 1).max())
    scale = 1 + float(wanted.abs().max())
    assert torch.allclose(apply(name, x, weight, None, relevance), wanted, rtol=0, atol=1e-12 * scale * steep)


@every_rule
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("alive", [1, 6])
def test_gradient_pass_through_the_same_graph(name: str, biased: bool, alive: int) -> None:
    x, weight, bias = random(2, 6, 5), random(4, 5, seed=1), random(4, seed=3) if biased else None
    flow = torch.zeros(2, 6, 4, dtype=torch.float64)
    flow[:, :alive] = random(2, alive, 4, seed=2)
    assert torch.allclose(apply(name, x, weight, bias, flow, flow=False), flow @ weight, atol=1e-14)


# -- conservation ---------------------------------------------------------------------------------------------------
@given(seed=st.integers(0, 10**6), name=st.sampled_from(["shared", "alpha 2", "alpha 1.5", "gamma", "gamma 3", "epsilon 0"]))
def test_conservation(seed: int, name: str) -> None:
    """Without a bias the sum is kept wherever an output has products of the signs that the rule shares out."""
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((2, 12), (5, 12)))
    relevance = torch.rand(2, 5, generator=generator, dtype=torch.float64)
    got = apply(name, x, weight, None, relevance)
    z = products(x, weight)
    if name.startswith("alpha") or name == "shared":
        # 12 random products of one sign: never seen; then that unit's relevance is lost (methods.md §8 #8)
        relevance = relevance * (z > 0).any(-1)
    # a sum of shares of an output that nearly cancels is a difference of large numbers
    assert torch.allclose(got.sum(-1), relevance.sum(-1), rtol=1e-7, atol=1e-10 * float(got.abs().max()))


def test_a_unit_without_a_positive_product_loses_its_relevance() -> None:
    """TA's Linear (methods.md §8 #8): x = (1, 2), w = (−1, −3): both products negative, so q is empty."""
    x, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[-1.0, -3.0]])
    assert apply("shared", x, weight, None, torch.tensor([[1.0]])).tolist() == [[0.0, 0.0]]


def test_the_published_baseline_doubles_relevance() -> None:
    """Its (+,+) and (−,−) products each take all of R (methods.md §8 #8).

    x = (1, −2), w = (3, −4): (+,+) product 3, share 3/3 of R = 1; (−,−) product 8, share 8/8 of R = 1. ΣR = 2.
    """
    x, weight = torch.tensor([[1.0, -2.0]]), torch.tensor([[3.0, -4.0]])
    assert apply("separate", x, weight, None, torch.tensor([[1.0]])).tolist() == [[1.0, 1.0]]
    # TA shares one denominator: 3/11 and 8/11
    assert torch.allclose(apply("shared", x, weight, None, torch.tensor([[1.0]])), torch.tensor([[3 / 11, 8 / 11]]))


# -- fractions by hand ----------------------------------------------------------------------------------------------
def test_fractions_by_hand() -> None:
    """x = (1, 2, −1); two outputs with w_1 = (2, 1, −1), w_2 = (1, −1, 3); R = (3, 5).

    z_1 = (2, 2, 1), sum 5; z_2 = (1, −2, −3), sum −4.

    αβ, α = 1: output 1 shares 2/5, 2/5, 1/5 of 3 = 6/5, 6/5, 3/5; output 2 has the one positive product 1, so all 5 go to
    x_1: (31/5, 6/5, 3/5).

    αβ, α = 2, β = 1: output 1: 2·(6/5, 6/5, 3/5), no negative product: (12/5, 12/5, 6/5). Output 2: 2·5 = 10 to x_1, minus
    5·(0, 2/5, 3/5) = (0, 2, 3): (10, −2, −3). Sum (62/5, 2/5, −9/5), and 55/5 = 11: output 1 is counted α = 2 times
    because it has nothing to inhibit (2·3 + 5 = 11).

    ε = 0: output 1 as above (y = Σz = 5); output 2: z/y = (−1/4, 2/4, 3/4) of 5 = (−5/4, 10/4, 15/4).
    Sum: (6/5 − 5/4, 6/5 + 5/2, 3/5 + 15/4) = (−1/20, 37/10, 87/20); ΣR = 8.

    γ = 1: output 1 (Σz > 0, z⁺ added): z doubles, shares unchanged: (6/5, 6/5, 3/5). Output 2 (Σz < 0, z⁻ added):
    (1, −4, −6), sum −9: shares (−1/9, 4/9, 6/9) of 5: (−5/9, 20/9, 30/9). ΣR = 8.
    """
    x = torch.tensor([[1.0, 2.0, -1.0]], dtype=torch.float64)
    weight = torch.tensor([[2.0, 1.0, -1.0], [1.0, -1.0, 3.0]], dtype=torch.float64)
    relevance = torch.tensor([[3.0, 5.0]], dtype=torch.float64)
    RULES["gamma 1"] = (Rule("linear", linear.gamma(1.0), keep_output=True), None)
    wanted = {
        "shared": [31 / 5, 6 / 5, 3 / 5],
        "alpha 2": [62 / 5, 2 / 5, -9 / 5],
        "epsilon 0": [-1 / 20, 37 / 10, 87 / 20],
        "gamma 1": [6 / 5 - 5 / 9, 6 / 5 + 20 / 9, 3 / 5 + 30 / 9],
    }
    try:
        for name, values in wanted.items():
            got = apply(name, x, weight, None, relevance)
            assert torch.allclose(got, torch.tensor([values], dtype=torch.float64), atol=1e-14), name
    finally:
        del RULES["gamma 1"]


def test_the_bias_takes_no_relevance_but_with_epsilon() -> None:
    """x = 2, w = 3, b = 4, R = 10. αβ: the one positive product takes all, 10. ε = 0: 6 / (6 + 4) of 10 = 6."""
    x, weight, bias, relevance = (torch.tensor(v, dtype=torch.float64) for v in ([[2.0]], [[3.0]], [4.0], [[10.0]]))
    assert apply("shared", x, weight, bias, relevance).item() == pytest.approx(10)
    assert apply("epsilon 0", x, weight, bias, relevance).item() == pytest.approx(6)


def test_the_stabilizer_has_the_denominators_sign() -> None:
    """x = 1, w = −0.01, ε = 0.01: −0.01 / (−0.01 − 0.01) = 1/2; an unsigned ε would divide by 0."""
    x, weight, relevance = (torch.tensor(v, dtype=torch.float64) for v in ([[1.0]], [[-0.01]], [[1.0]]))
    assert apply("epsilon", x, weight, None, relevance).item() == pytest.approx(0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_stays_finite_and_close(dtype: torch.dtype) -> None:
    x, weight, relevance = random(4, 16), random(8, 16, seed=1), random(4, 8, seed=2)
    wanted = dense("shared", x, weight, None, relevance)
    got = apply("shared", x.to(dtype), weight.to(dtype), None, relevance.to(dtype)).double()
    assert got.isfinite().all()
    assert (got - wanted).abs().max() / wanted.abs().max() < (1e-4 if dtype is torch.float32 else 0.15)


# -- convolutions ---------------------------------------------------------------------------------------------------
CONVOLUTIONS: dict[str, tuple[Shape, Shape, dict[str, Any]]] = {
    "patches": ((2, 3, 8, 8), (5, 3, 4, 4), {"stride": 4}),
    "patches, not square": ((2, 3, 4, 6), (5, 3, 2, 3), {"stride": (2, 3)}),
    "overlapping": ((1, 2, 6, 5), (3, 2, 3, 3), {"stride": 2, "padding": 1}),
    "dilated": ((1, 2, 7, 7), (3, 2, 2, 2), {"dilation": 2}),
    "grouped": ((1, 4, 5, 5), (6, 2, 3, 3), {"groups": 2}),
    "same": ((1, 2, 5, 5), (3, 2, 3, 3), {"padding": "same"}),
    "remainder": ((1, 2, 7, 9), (3, 2, 4, 4), {"stride": 4}),
    "one axis": ((2, 3, 9), (4, 3, 3), {"stride": 2, "padding": 1}),
    "tubes": ((1, 2, 4, 4, 4), (3, 2, 2, 2, 2), {"stride": 2}),
    "transposed": ((2, 3, 4, 4), (3, 5, 2, 2), {"stride": 2, "output_padding": 0}),
    "transposed, grouped": ((1, 4, 3, 3), (4, 3, 3, 3), {"stride": 2, "groups": 2, "output_padding": 0}),
    "transposed, one axis": ((2, 3, 5), (3, 2, 3), {"padding": 1, "output_padding": 0}),
}


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, info: dict[str, Any]) -> Tensor:
    turned = {3: functional.conv_transpose1d, 4: functional.conv_transpose2d}
    straight = {3: functional.conv1d, 4: functional.conv2d, 5: functional.conv3d}
    return (turned if "output_padding" in info else straight)[x.dim()](x, weight, bias, **info)


def as_matrix(shape: Shape, weight: Tensor, info: dict[str, Any]) -> Tensor:
    """``[O, I]``: the convolution of one sample, read off the unit vectors."""
    size = int(torch.tensor(shape[1:]).prod())
    units = torch.eye(size, dtype=torch.float64).reshape(size, *shape[1:])
    return convolve(units, weight, None, info).flatten(1).T


def run_convolution(rule: Rule, name: str, biased: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """(R of x, x, the convolution as a matrix, R of y, its bias as that of the matrix)."""
    shape, kernel, options = CONVOLUTIONS[name]
    info = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, **options}
    units = kernel[1] * info["groups"] if "output_padding" in info else kernel[0]
    x, weight, bias = random(*shape), random(*kernel, seed=1), random(units, seed=3) if biased else None
    output = convolve(x, weight, bias, info)
    relevance = random(*output.shape, seed=2)
    operands = (x, weight) if bias is None else (x, weight, bias)
    needs = (True, *(False for _ in operands[1:]))
    call = Call(operands, output if rule.keep_output else None, needs, lambda *_: output, Pass(relevance=True, batch=shape[0]), info)
    (got, *others) = rule.relevance(call, relevance)
    assert all(other is None for other in others)
    assert got is not None
    spread = None if bias is None else bias.repeat_interleave(output[0, 0].numel())
    return got, x, as_matrix(shape, weight, info), relevance, spread


@pytest.mark.part(times=2)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("biased", [True, False])
def test_convolution_is_a_linear_layer(rule: str, name: str, biased: bool) -> None:
    """Each rule of a linear layer, on the matrix that the convolution is."""
    run, reference = RULES[rule]
    got, x, matrix, relevance, bias = run_convolution(run, name, biased)
    wanted = reference(x.flatten(1), matrix, bias, relevance.flatten(1)).reshape(x.shape)
    assert torch.allclose(got, wanted, rtol=1e-9, atol=1e-9 * (1 + float(wanted.abs().max())))


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_gradient_of_a_convolution(name: str) -> None:
    got, x, matrix, flow, _ = run_convolution(Rule("gradient", linear.layer_gradient), name, True)
    assert torch.allclose(got, (flow.flatten(1) @ matrix).reshape(x.shape), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("biased", [True, False])
def test_convolution_box(name: str, biased: bool) -> None:
    """z^B: R_j = Σ_o (w x − w⁺ l − w⁻ h)_oj / Σ_j' (…)_oj' R_o, l and h the sample's own range."""
    got, x, matrix, relevance, _ = run_convolution(Rule("box", linear.box), name, biased)
    flat = x.flatten(1)
    low, high = flat.amin(1)[:, None, None], flat.amax(1)[:, None, None]
    z = flat[:, None] * matrix - low * matrix.clamp(min=0) - high * matrix.clamp(max=0)
    wanted = (ratio(z, z.sum(-1, keepdim=True)) * relevance.flatten(1)[..., None]).sum(1)
    assert torch.allclose(got, wanted.reshape(x.shape), rtol=1e-9, atol=1e-9)
    # the box rule always conserves
    assert torch.allclose(got.flatten(1).sum(1), relevance.flatten(1).sum(1), atol=1e-9)


def test_convolution_box_by_hand() -> None:
    """One pixel row (1, 3, −1), one kernel (2, −1, 1) over all of it; l = −1, h = 3, R = 1.

    z_1 = 2·1 − 2·(−1) = 4; z_2 = −1·3 + 1·3 = 0; z_3 = 1·(−1) − 1·(−1) = 0: all of R goes to the first pixel.
    With x_2 = 2 and h = 3 made by a fourth pixel that the stride leaves out: z_2 = −2 + 3 = 1: shares 4/5, 1/5, 0.
    """
    info = {"stride": 3, "padding": 0, "dilation": 1, "groups": 1}
    weight = torch.tensor([[[2.0, -1.0, 1.0]]])
    for row, wanted in (([1.0, 3.0, -1.0], [1.0, 0.0, 0.0]), ([1.0, 2.0, -1.0, 3.0], [4 / 5, 1 / 5, 0.0, 0.0])):
        x = torch.tensor([[row]])
        call = Call((x, weight), None, (True, False), lambda *_: x, Pass(relevance=True), info)
        got = linear.box(call, torch.ones(1, 1, 1))[0]
        assert got is not None
        assert torch.allclose(got, torch.tensor([[wanted]]))

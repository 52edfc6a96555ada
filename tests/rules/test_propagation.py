"""Rules of relevance against dense float64 references, and against published code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import whyformer
import zoo
from leading_axis import walk_back
from whyformer.errors import UnknownOperation
from whyformer.rules import linear
from whyformer.rules.propagation import LINEAR_RULES, deep_taylor, divide, layerwise
from whyformer.tape.program import Program, read_program
from whyformer.tape.recording import record
from whyformer.tape.tables import KINDS
from whyformer.tape.values import Tape
from whyformer.tape.walking import GRADIENT, Composite

Function = Callable[[Tensor], Tensor]
B, N, D = 2, 4, 6


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def relevance(function: Function, x: Tensor, composite: Composite, flow: Tensor | None = None, *, pixels: bool = False) -> Tensor:
    """Relevance of x, the input of a model if ``pixels`` is set, else a value inside."""
    tape, y = record(lambda x: function(x if pixels else x * 1), x)
    root = tape.number(x) if pixels else tape.calls[0].results[0]
    program = read_program(tape, [root], tape.number(y))
    flow = random(*y.shape, seed=9).to(y.dtype) if flow is None else flow
    return walk_back(program, tape, [(composite, {program.output: flow})], wanted=[root])[0][root]


def assert_equal(got: Tensor, wanted: Tensor, tolerance: float = 1e-9) -> None:
    assert got.isfinite().all()
    error = (got - wanted.reshape(got.shape)).abs().max() / wanted.abs().max().clamp(min=1e-300)
    assert error <= tolerance, f"differs by {float(error):.1e} of the maximum"


# -- references: x [M, I], w [O, I], R [M, O]; each product z_oj = w_oj x_j is written out -------------------------------
def ratio(top: Tensor, bottom: Tensor) -> Tensor:
    return torch.where(bottom == 0, 0, top / torch.where(bottom == 0, 1, bottom))


def dense(x: Tensor, w: Tensor, b: Tensor, r: Tensor, share: Callable[[list[float], float], list[float]]) -> Tensor:
    """share: (z_oj for all j, bias) -> how much of R_o each j gets."""
    found = torch.zeros_like(x)
    for m in range(len(x)):
        for o in range(len(w)):
            z = [float(w[o, j] * x[m, j]) for j in range(x.shape[1])]
            found[m] += torch.tensor(share(z, float(b[o])), dtype=x.dtype) * r[m, o]
    return found


def over(z: list[float], total: float) -> list[float]:
    return [0.0 if total == 0 else v / total for v in z]


def by_sign(z: list[float], bias: float, alpha: float = 1.0) -> list[float]:
    up, down = [max(v, 0.0) for v in z], [min(v, 0.0) for v in z]
    return [alpha * u - (alpha - 1) * d for u, d in zip(over(up, sum(up)), over(down, sum(down)), strict=True)]


def by_gamma(z: list[float], bias: float, gamma: float) -> list[float]:
    sign = -1 if sum(z) < 0 else 1
    z = [v + gamma * v * (v * sign > 0) for v in z]
    return over(z, sum(z))


def by_epsilon(z: list[float], bias: float, epsilon: float) -> list[float]:
    y = sum(z) + bias
    return over(z, y - epsilon if y < 0 else y + epsilon)


def separate(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    z = x[:, None] * w[None]
    parts = (z * ((x[:, None] > 0) & (w > 0)), z * ((x[:, None] < 0) & (w < 0)))
    return sum(((ratio(p, p.sum(-1, keepdim=True)) * r[..., None]).sum(1) for p in parts), torch.zeros_like(x))


LAYERS: dict[str, tuple[Composite, Callable[..., Tensor]]] = {
    "deep Taylor": (deep_taylor(), lambda *a: dense(*a, by_sign)),
    "deep Taylor, α 2": (deep_taylor(2.0), lambda *a: dense(*a, lambda z, b: by_sign(z, b, 2.0))),
    "alpha_beta": (layerwise("alpha_beta"), lambda *a: dense(*a, by_sign)),
    "alpha_beta, α 1.5": (layerwise("alpha_beta", alpha=1.5), lambda *a: dense(*a, lambda z, b: by_sign(z, b, 1.5))),
    "separate": (layerwise("separate"), separate),
    "epsilon": (layerwise("epsilon", epsilon=1e-2), lambda *a: dense(*a, lambda z, b: by_epsilon(z, b, 1e-2))),
    "epsilon 0": (layerwise("epsilon", epsilon=0.0), lambda *a: dense(*a, lambda z, b: by_epsilon(z, b, 0.0))),
    "gamma": (layerwise("gamma"), lambda *a: dense(*a, lambda z, b: by_gamma(z, b, 0.25))),
    "gamma 3": (layerwise("gamma", gamma=3.0), lambda *a: dense(*a, lambda z, b: by_gamma(z, b, 3.0))),
}
every_rule = pytest.mark.parametrize("rule", LAYERS)


# -- linear layers -----------------------------------------------------------------------------------------------------
@pytest.mark.part(times=2)
@every_rule
@pytest.mark.parametrize(("shape", "units"), [((1, 1), 1), ((1, 4), 3), ((5, 3), 7), ((2, 6, 8), 5), ((2, 3, 4, 5), 6)])
def test_layer(rule: str, shape: tuple[int, ...], units: int) -> None:
    composite, reference = LAYERS[rule]
    x, w, b, r = random(*shape), random(units, shape[-1], seed=1), random(units, seed=2), random(*shape[:-1], units, seed=3)
    wanted = reference(x.flatten(0, -2), w, b, r.flatten(0, -2))
    assert_equal(relevance(lambda x: F.linear(x, w, b), x, composite, r), wanted)


@every_rule
def test_layer_of_zeros(rule: str) -> None:
    """Rows, columns and weights of zeros, and outputs whose products have one sign, lose relevance and make no NaN."""
    x, w, b, r = random(5, D), random(7, D, seed=1), random(7, seed=2), random(5, 7, seed=3)
    x[0], x[:, 1], w[0], w[1], x[1], b[0] = 0, 0, 0, w[1].abs(), -x[1].abs(), 0
    composite, reference = LAYERS[rule]
    assert_equal(relevance(lambda x: F.linear(x, w, b), x, composite, r), reference(x, w, b, r))


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "addmm": lambda x, w, b: torch.addmm(b, x.flatten(0, 1), w.T).unflatten(0, (B, N)),
    "convolution": lambda x, w, b: F.conv1d(x.mT, w[..., None], b).mT,
    "convolution of patches": lambda x, w, b: F.conv2d(x[:, None], w[:, None, None], b, stride=(1, D))[..., 0].mT,
    "transposed convolution": lambda x, w, b: F.conv_transpose1d(x.mT, w.T[..., None], b).mT,
    "x @ W.T + b": lambda x, w, b: x @ w.T + b,
    "b + x @ W.T": lambda x, w, b: b + x @ w.T,
    "W @ x + b": lambda x, w, b: (w @ x.mT + b[:, None]).mT,
    "bmm": lambda x, w, b: torch.bmm(x, w.T.expand(B, D, 5)) + b,
    "einsum": lambda x, w, b: torch.einsum("bni,oi->bno", x, w) + b,
    "negative factor": lambda x, w, b: (x @ w.T.mul(-0.5)) * -2 + b,
    "half of twice": lambda x, w, b: (x @ (2 * w.T)).div(2) + b,
    "expanded": lambda x, w, b: torch.baddbmm(b.expand(B, 1, 5), x, w.T.expand(B, D, 5)),
    "product and sum": lambda x, w, b: (x[..., None, :] * w).sum(-1) + b,
}


@pytest.mark.part
@every_rule
@pytest.mark.parametrize("way", WAYS)
def test_one_layer_written_in_many_ways(way: str, rule: str) -> None:
    composite = LAYERS[rule][0]
    x, w, b, r = random(B, N, D), random(5, D, seed=1), random(5, seed=2), random(B, N, 5, seed=3)
    assert_equal(relevance(lambda x: WAYS[way](x, w, b), x, composite, r), relevance(lambda x: F.linear(x, w, b), x, composite, r))


@every_rule
def test_rows_without_relevance_are_left_out(rule: str) -> None:
    x, w, b, r = random(1, 40, D), random(5, D, seed=1), random(5, seed=2), torch.zeros(1, 40, 5, dtype=torch.float64)
    r[:, [3, 17]] = random(2, 5, seed=3)
    got = relevance(lambda x: F.linear(x, w, b), x, LAYERS[rule][0], r)
    assert_equal(got, LAYERS[rule][1](x[0], w, b, r[0]))
    assert not got[0, [i for i in range(40) if i not in (3, 17)]].any()


@every_rule
def test_weights_are_split_in_parts(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, r = random(3, 130), random(200, 130, seed=1), random(3, 200, seed=3)
    wanted = relevance(lambda x: F.linear(x, w), x, LAYERS[rule][0], r)
    monkeypatch.setitem(linear._AT_ONCE, "cpu", 1)

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func._schema.name.split("::")[1] in ("abs", "clamp"):
                self.size = max(self.size, out.numel())
            return out

    with Largest() as largest:
        got = relevance(lambda x: F.linear(x, w), x, LAYERS[rule][0], r)
    assert_equal(got, wanted)
    assert largest.size < w.numel()


@every_rule
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_accumulates_in_float32(rule: str, dtype: torch.dtype) -> None:
    """Of the same numbers, the relevance is that of float64, up to the rounded denominator of ε."""
    x, w, b, r = (t.to(dtype) for t in (random(3, 64), random(9, 64, seed=1), random(9, seed=2), random(3, 9, seed=3)))
    got = relevance(lambda x: F.linear(x, w, b), x, LAYERS[rule][0], r)
    wanted = relevance(lambda x: F.linear(x, w.double(), b.double()), x.double(), LAYERS[rule][0], r.double())
    assert_equal(got.double(), wanted, 0.1 if "epsilon" in rule else 2e-4)


@pytest.mark.parametrize("stride", [2, 3])
@pytest.mark.parametrize("composite", [deep_taylor(), layerwise("epsilon")], ids=lambda c: c.name)
def test_box_of_the_pixels(composite: Composite, stride: int) -> None:
    x, w, b = random(B, 3, 8, 8), random(5, 3, 3, 2, seed=1), random(5, seed=2)
    size = [(8 - k) // stride + 1 for k in (3, 2)]
    r, wanted = random(B, 5, *size, seed=3), torch.zeros_like(x)
    for i, o, h, v in np.ndindex(B, 5, *size):
        patch = (i, slice(None), slice(h * stride, h * stride + 3), slice(v * stride, v * stride + 2))
        low, high = x[i].min(), x[i].max()
        z = x[patch] * w[o] - low * w[o].clamp(min=0) - high * w[o].clamp(max=0)
        wanted[patch] += z / z.sum() * r[i, o, h, v]
    got = relevance(lambda x: F.conv2d(x, w, b, stride=stride), x, composite, r, pixels=True)
    assert_equal(got, wanted)
    assert_equal(got.sum(), r.sum())


def test_box_of_patches_that_are_cut_by_hand() -> None:
    x, w = random(B, 3, 8, 8), random(5, 3, 4, 4, seed=1)

    def by_hand(x: Tensor) -> Tensor:
        patches = x.reshape(B, 3, 2, 4, 2, 4).permute(0, 2, 4, 1, 3, 5).reshape(B, 4, -1)
        return F.linear(patches, w.flatten(1))

    wanted = relevance(lambda x: F.conv2d(x, w, stride=4).flatten(2).mT, x, deep_taylor(), pixels=True)
    assert_equal(relevance(by_hand, x, deep_taylor(), pixels=True), wanted)


def test_layers_on_values_inside_have_no_box() -> None:
    x, w, r = random(B, N, D), random(5, D, seed=1), random(B, N, 5, seed=3)
    assert_equal(relevance(lambda x: F.linear(x, w), x, deep_taylor(), r), dense(x.flatten(0, 1), w, r[0, 0] * 0, r.flatten(0, 1), by_sign))


# -- products, sums, one branch ------------------------------------------------------------------------------------------
COMPOSITES = {"normalised": deep_taylor(), "plain": layerwise()}
each = pytest.mark.parametrize("add", COMPOSITES)


def test_product_of_two_branches_is_halved() -> None:
    x, w, r = random(N, D), random(D, D, seed=1), random(N, N, seed=3)
    k = x @ w
    wanted_x, wanted_k = torch.zeros_like(x), torch.zeros_like(x)
    for i, j, d in np.ndindex(N, N, D):
        part = x[i, d] * k[j, d] / (x @ k.T)[i, j] * r[i, j] / 2
        wanted_x[i, d] += part
        wanted_k[j, d] += part
    for function in (lambda x: x @ (x @ w).T, lambda x: torch.einsum("id,jd->ij", x, x @ w)):
        got = relevance(function, x, deep_taylor(), r)
        assert_equal(got, wanted_x + dense(x, w.T, torch.zeros(D), wanted_k, by_sign))
    assert_equal((wanted_x + wanted_k).sum(), r.sum())


@pytest.mark.parametrize(
    ("function", "matrix"),
    [
        (lambda x: x.mean(0), torch.full((1, N), 1 / N)),
        (lambda x: x.sum(0), torch.ones(1, N)),
        (lambda x: F.avg_pool1d(x.T, 2).T, torch.eye(2).repeat_interleave(2, 1) / 2),
        (lambda x: x.cumsum(0), torch.ones(N, N).tril()),
        (lambda x: x.new_zeros(2, D).index_add(0, torch.tensor([0, 1, 1, 0]), x), torch.tensor([[1, 0, 0, 1], [0, 1, 1, 0]])),
    ],
)
def test_weighted_sum(function: Function, matrix: Tensor) -> None:
    x, matrix = random(N, D), matrix.double()
    r = random(len(matrix), D, seed=3)
    got = relevance(function, x, deep_taylor(), r.reshape(function(x).shape))
    assert_equal(got, x * (matrix.T @ ratio(r, matrix @ x)))
    assert_equal(got.sum(), r.sum())


def test_weighted_sum_by_another_input() -> None:
    """A constant that is added takes nothing."""
    x, matrix, bias, r = random(N, D), random(3, N, seed=1), random(D, seed=2), random(3, D, seed=3)
    for function in (lambda x, m: m @ x, lambda x, m: torch.addmm(bias, m, x)):
        tape, y = record(lambda x, m, f=function: f(x * 1, m), x, matrix)
        program = read_program(tape, [tape.calls[0].results[0]], tape.number(y))
        assert [u.kind for u in program.units] == ["weighted sum"]
        got = walk_back(program, tape, [(deep_taylor(), {program.output: r})], wanted=program.roots)[0][program.roots[0]]
        assert_equal(got, x * (matrix.T @ ratio(r, matrix @ x)))


def add_by_hand(u: Tensor, v: Tensor, r: Tensor, normalised: bool) -> tuple[Tensor, Tensor]:
    a, b = torch.zeros_like(u), torch.zeros_like(v)
    for i in range(len(u)):
        for own, value in ((a, u), (b, v)):
            own[i] = ratio(value[i] * r[i], u[i] + v[i])
        if normalised:
            s, t = a[i].sum(), b[i].sum()
            a[i] *= s.abs() / (s.abs() + t.abs()) * r[i].sum() / s
            b[i] *= t.abs() / (s.abs() + t.abs()) * r[i].sum() / t
    return a, b


SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "u + v": lambda u, v: u + v,
    "u − v": lambda u, v: u - v,
    "v − u, by rsub": lambda u, v: torch.rsub(u, v),
    "u + 3 v": lambda u, v: torch.add(u, v, alpha=3),
    "u − 3 v": lambda u, v: torch.sub(u, v, alpha=3),
}


@each
@pytest.mark.parametrize("way", SUMS)
def test_add(way: str, add: str) -> None:
    x, r = random(B, 2, D), random(B, D, seed=3)
    u, v = x.unbind(1)
    signed = {"u + v": (u, v), "u − v": (u, -v), "v − u, by rsub": (-u, v), "u + 3 v": (u, 3 * v), "u − 3 v": (u, -3 * v)}[way]
    wanted = torch.stack(add_by_hand(*signed, r, add == "normalised"), 1)
    got = relevance(lambda x: SUMS[way](*x.unbind(1)), x, COMPOSITES[add], r)
    assert_equal(got, wanted)
    assert_equal(got.sum((1, 2)), r.sum(1))


@each
def test_add_of_a_branch_that_is_broadcast(add: str) -> None:
    x, r = random(B, N, D), random(B, N, D, seed=3)
    a, b = add_by_hand(x, x[:, :1].expand_as(x), r, add == "normalised")
    a[:, 0] += b.sum(1)
    assert_equal(relevance(lambda x: x + x[:, :1], x, COMPOSITES[add], r), a)


@each
def test_positions_take_their_share_and_a_bias_takes_nothing(add: str) -> None:
    x, r = random(B, N, D), random(B, N, D, seed=3)
    for positions in (random(N, D, seed=1), random(1, N, D, seed=1), random(N, 1, seed=1)):
        wanted, _ = add_by_hand(x, positions.expand_as(x).clone(), r, add == "normalised")
        assert_equal(relevance(lambda x, p=positions: x + p, x, COMPOSITES[add], r), wanted)
        assert_equal(relevance(lambda x, p=positions: p + x, x, COMPOSITES[add], r), wanted)
    for bias in (random(D, seed=1), random(1, 1, D, seed=1), 3.0):
        assert_equal(relevance(lambda x, b=bias: x + b, x, COMPOSITES[add], r), r)
        assert_equal(relevance(lambda x, b=bias: b - x, x, COMPOSITES[add], r), r)


@each
@pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(torch.float64).min, -1e4])
def test_a_mask_takes_nothing_where_it_is_zero(add: str, lowest: float) -> None:
    x = random(B, N, N)
    mask = torch.zeros(N, N, dtype=torch.float64).masked_fill(torch.ones(N, N).triu(1).bool(), lowest)
    r = random(B, N, N, seed=3).tril()
    assert_equal(relevance(lambda x: x + mask, x, COMPOSITES[add], r), r)


def test_samples_share_alone() -> None:
    x, r = random(3, N, D), random(3, N, D, seed=3)
    whole = relevance(lambda x: x + x.flip(1) * 2, x, deep_taylor(), r)
    assert_equal(torch.cat([relevance(lambda x: x + x.flip(1) * 2, x[i : i + 1], deep_taylor(), r[i : i + 1]) for i in range(3)]), whole)


SAME: dict[str, Function] = {
    "gelu": F.gelu, "relu": torch.relu, "tanh": torch.tanh, "silu": F.silu, "square": torch.square, "softmax": lambda x: x.softmax(-1),
    "layer norm": lambda x: F.layer_norm(x, (D,), random(D, seed=1), random(D, seed=2)), "clip": lambda x: x.clamp(-1, 1),
    "scale": lambda x: x * random(D, seed=1), "negative": torch.neg, "division": lambda x: x / 3, "number − x": lambda x: 1 - x,
    "batch norm": lambda x: F.batch_norm(x, x.new_zeros(N), x.new_ones(N)), "shift": lambda x: x + 1, "leaky": F.leaky_relu,
    "group norm": lambda x: F.group_norm(x, 2), "view": lambda x: x.unflatten(-1, (2, -1)).clone().flatten(2),
}  # fmt: skip


@pytest.mark.part
@each
@pytest.mark.parametrize("name", SAME)
def test_identity(name: str, add: str) -> None:
    r = random(B, N, D, seed=3)
    assert_equal(relevance(SAME[name], random(B, N, D), COMPOSITES[add], r), r)


def test_a_gate_halves() -> None:
    x, r = random(B, N, D), random(B, N, D, seed=3)
    assert_equal(relevance(lambda x: x * x.flip(-1), x, deep_taylor(), r), (r + r.flip(-1)) / 2)
    assert_equal(relevance(lambda x: F.silu(x) * x.flip(-1), x, deep_taylor(), r), (r + r.flip(-1)) / 2)


def test_a_scale_of_a_norm_that_carries_is_a_branch() -> None:
    x, r = random(B, N, D), random(B, N, D, seed=3)
    got = relevance(lambda x: F.layer_norm(x, (D,), x[0, 0]), x, deep_taylor(), r)
    wanted = r / 2
    wanted[0, 0] += r.sum((0, 1)) / 2
    assert_equal(got, wanted)
    with pytest.raises(UnknownOperation, match="shift"):
        relevance(lambda x: F.layer_norm(x, (D,), None, x[0, 0]), x, deep_taylor(), r)


def test_one_number_that_divides_a_row_takes_nothing() -> None:
    """The weights of chosen experts are scaled to the sum 1."""
    x, r = random(B, N, D).abs(), random(B, N, D, seed=3)
    assert_equal(relevance(lambda x: x / x.prod(-1, keepdim=True).sum(-1, keepdim=True).exp(), x, deep_taylor(), r), r)


SCALES: dict[str, Function] = {
    "a root": lambda x: x * x.square().mean(-1, keepdim=True) ** 0.5,
    "a root of another": lambda x: x * (x.roll(1, 0).square().mean(-1, keepdim=True) + 1e-3).sqrt() * 2,
    "a norm that is clipped": lambda x: x * (2 / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + 1e-6)).clamp(max=1.0),
    "a root over a root": lambda x: x * x.roll(1, 0).square().mean(-1, keepdim=True).sqrt() / x.square().mean(-1, keepdim=True).clamp(min=1e-5).sqrt(),
}


@each
@pytest.mark.parametrize("name", SCALES)
def test_one_number_that_scales_a_row_takes_nothing(name: str, add: str) -> None:
    x, r = random(5, D), random(5, D, seed=3)
    assert_equal(relevance(SCALES[name], x, COMPOSITES[add], r), r)


@each
def test_where_something_is_sampled_takes_nothing(add: str) -> None:
    """R_i = v_i Σ_p W_pi R_p / y_p: bilinear weights W, whatever they were computed of."""
    x, r = random(2, 3, 4, 4), random(2, 3, 2, 5, seed=3)

    def sampled(x: Tensor) -> Tensor:
        return F.grid_sample(x * 2, x[:, :2, :2].repeat(1, 1, 1, 2)[..., :5].movedim(1, -1).tanh(), align_corners=False)

    places = x[:, :2, :2].repeat(1, 1, 1, 2)[..., :5].movedim(1, -1).tanh()
    (wanted,) = torch.autograd.functional.vjp(
        lambda v: F.grid_sample(v * 2, places, align_corners=False), x, ratio(r, sampled(x))
    )[1:]
    assert_equal(relevance(sampled, x, COMPOSITES[add], r), x * wanted)


@each
@pytest.mark.parametrize("both", [False, True])
def test_what_a_system_is_solved_by_takes_nothing(both: bool, add: str) -> None:
    x, r, fixed = random(2, 4, 3), random(2, 4, 3, seed=3), torch.eye(4, dtype=torch.float64) * 2 + random(4, 4, seed=5).tril(-1)

    def solved(x: Tensor) -> Tensor:
        matrix = fixed + (x @ x.mT).tril(-1) if both else fixed.expand(2, 4, 4)
        return torch.linalg.solve_triangular(matrix, x, upper=False)

    matrix = fixed + (x @ x.mT).tril(-1) if both else fixed.expand(2, 4, 4)
    (wanted,) = torch.autograd.functional.vjp(
        lambda v: torch.linalg.solve_triangular(matrix, v, upper=False), x, ratio(r, solved(x))
    )[1:]
    assert_equal(relevance(solved, x, COMPOSITES[add], r), x * wanted)


@pytest.mark.parametrize(
    "function",
    [lambda x: x.amax(1), lambda x: x.max(1).values, lambda x: x.topk(1, 1).values[:, 0], lambda x: x.sort(1).values[:, -1]],
)
def test_a_selection_gives_to_what_was_selected(function: Function) -> None:
    x, r = random(B, N, D), random(B, D, seed=3)
    assert_equal(relevance(function, x, deep_taylor(), r), torch.zeros_like(x).scatter(1, x.argmax(1, keepdim=True), r[:, None]))


def test_a_soft_maximum_shares_by_softmax() -> None:
    x, r = random(B, N, D), random(B, D, seed=3)
    assert_equal(relevance(lambda x: x.logsumexp(1), x, deep_taylor(), r), x.softmax(1) * r[:, None])


@each
@pytest.mark.parametrize("inverse", [False, True])
def test_complex_numbers_are_pairs(inverse: bool, add: str) -> None:
    """A rotation by complex numbers is one that is written out."""
    x, r, angle = random(B, N, D), random(B, N, D, seed=3), random(N, D // 2, seed=1)

    def rotated(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        if inverse:
            return torch.view_as_real(pairs / torch.polar(torch.ones_like(angle), -angle)).flatten(-2)
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)

    def by_hand(x: Tensor) -> Tensor:
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1).flatten(-2)

    got = relevance(rotated, x, COMPOSITES[add], r)
    assert_equal(got, relevance(by_hand, x, COMPOSITES[add], r))
    assert_equal(got.sum(), r.sum())


def test_a_complex_weighted_sum_shares_by_parts() -> None:
    x, r, w = random(B, N), random(B, N, 2, seed=3), torch.view_as_complex(random(N, N, 2, seed=1))
    tape, y = record(lambda x, w: torch.view_as_real((x * 1).to(w.dtype) @ w), x, w)
    program = read_program(tape, [tape.calls[0].results[0]], tape.number(y))
    got = walk_back(program, tape, [(layerwise(), {program.output: r})], wanted=program.roots)[0][program.roots[0]]
    z = torch.view_as_real(x[:, :, None] * w)
    assert_equal(got, (z / z.sum(1, keepdim=True) * r[:, None]).sum((2, 3)))


# -- what holds for all numbers ------------------------------------------------------------------------------------------
numbers = st.floats(-1e3, 1e3, width=32)


def matrices(rows: int, columns: int) -> st.SearchStrategy[Tensor]:
    row = st.lists(numbers, min_size=columns, max_size=columns)
    return st.lists(row, min_size=rows, max_size=rows).map(lambda v: torch.tensor(v, dtype=torch.float64))


@given(matrices(3, 4), matrices(5, 4), matrices(3, 5))
def test_layers_conserve_what_has_products(x: Tensor, w: Tensor, r: Tensor) -> None:
    z = x[:, None] * w[None]
    size, total = z.abs().sum(-1), z.sum(-1)
    for name in LAYERS:
        assert relevance(lambda x: F.linear(x, w), x, LAYERS[name][0], r).isfinite().all()
    tolerance = 1e-6 * float(1 + r.abs().sum())
    positive = z.clamp(min=0).sum(-1)
    if bool(((positive == 0) | (positive > 1e-6 * size)).all()):
        got = relevance(lambda x: F.linear(x, w), x, deep_taylor(), r)
        torch.testing.assert_close(got.sum(), r[positive > 0].sum(), rtol=0, atol=tolerance)
    got = relevance(lambda x: F.linear(x, w), x, layerwise("gamma"), r)
    if bool((total.abs() > 1e-3 * size).all()):
        torch.testing.assert_close(got.sum(), r.sum(), rtol=0, atol=tolerance)


@given(matrices(2, 4), matrices(2, 4), st.sampled_from(sorted(COMPOSITES)))
def test_sums_and_products_conserve(x: Tensor, r: Tensor, add: str) -> None:
    composite = COMPOSITES[add]
    got = relevance(lambda x: x + x.flip(-1) * 2, x, composite, r)
    assert got.isfinite().all()
    y = x + x.flip(-1) * 2
    if bool((y.abs() > 1e-3 * (1 + x.abs().max())).all()):
        parts = (x * r / y).sum(-1)
        if add == "plain" or bool((parts.abs() > 1e-3).all() and ((r.sum(-1) - parts).abs() > 1e-3).all()):
            torch.testing.assert_close(got.sum(-1), r.sum(-1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(relevance(lambda x: x * x.flip(-1), x, composite, r).sum(), r.sum())


@given(st.sampled_from([torch.float32, torch.float64]), st.floats(-1e4, 1e4), st.floats(allow_nan=False))
def test_division_is_finite(dtype: torch.dtype, a: float, b: float) -> None:
    quotient = divide(torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=dtype))
    assert quotient.isfinite()
    if 1e-3 < abs(b) < 1e3:
        torch.testing.assert_close(quotient, torch.tensor(a, dtype=dtype) / torch.tensor(b, dtype=dtype))


@pytest.mark.parametrize("name", ["deep Taylor", *LINEAR_RULES])
def test_seeds_are_walked_at_once(name: str) -> None:
    model, pixels = zoo.build("hf_vit")
    tape, program = read(model, pixels)
    seeds = random(3, *tape.shapes[program.output])

    def walk(seed: Tensor) -> Tensor:
        return walk_back(program, tape, [(LAYERS[name][0], {program.output: seed})], wanted=program.roots)[0][program.roots[0]]

    assert_equal(torch.vmap(walk)(seeds), torch.stack([walk(seed) for seed in seeds]))


# -- what is refused -----------------------------------------------------------------------------------------------------
@each
@pytest.mark.parametrize(
    ("function", "word"),
    [
        (lambda x: x.log_softmax(-1), "log-probabilities"),
        (lambda x: x + x.norm(dim=-1, keepdim=True), "statistic"),
        (lambda x: (x + x.flip(-1)).pow(0.3), "power"),
        (lambda x: x / (1 + x.square().flip(-1)), "quotient"),
        (lambda x: 1 / (x + x.flip(-1)), "power"),
        (lambda x: x.prod(-1), "prod"),
    ],
)
def test_what_has_no_rule_is_refused_with_a_way_out(function: Function, word: str, add: str) -> None:
    with pytest.raises(UnknownOperation, match=rf"(?s)({word}).*gradient method"):
        relevance(function, random(B, N, D), COMPOSITES[add])


def test_every_kind_has_a_rule_or_hands_on_its_adjoint() -> None:
    by_position = {"linear": {"layer", "weighted sum", "product"}, "mean": {"weighted sum"}, "add": {"add", "shift"}}
    by_position["mul"] = {"scale", "gate", "activated gate", "quotient"}
    kinds = {"other", "power"}.union(*(by_position.get(kind, {kind}) for kind in KINDS.values()))
    assert kinds - set(deep_taylor().rules) == {"view", "selection", "silent", "logsumexp"}


def test_composites_of_other_settings_have_other_names() -> None:
    made = [LAYERS[name][0] for name in LAYERS] + [layerwise("epsilon"), layerwise(normalise_add=True)]
    assert len({c.name for c in made}) == len(made)
    assert {c.carrier for c in made} == {"relevance"}


# -- whole models ---------------------------------------------------------------------------------------------------------
def read(model: Any, inputs: Any, entry: tuple[str, int] | None = None) -> tuple[Tape, Program]:
    """The pass from the pixels, or from the result of a call: the first of a name, or one behind it."""
    tape, output = record(model, inputs) if isinstance(inputs, Tensor) else record(model, **inputs)
    root = tape.number(inputs) if isinstance(inputs, Tensor) else -1
    if entry is not None:
        first = next(c for c in tape.calls if c.name == entry[0] and tape.floating(c.results[0]) and tape.shapes[c.results[0]][-1] > 5)
        root = tape.calls[first.number + entry[1]].results[0]
    return tape, read_program(tape, [root], tape.number(output if isinstance(output, Tensor) else output.logits))


# what enters the first block
ENTRIES: dict[str, tuple[str, int]] = {
    "bert": ("native_layer_norm", 0), "distilbert": ("native_layer_norm", 0), "electra": ("addmm", 1), "encoder_mean": ("add", 0),
    "encoder_first": ("add", 0), "gpt2": ("add", 0), "llama": ("embedding", 0), "modernbert_cls": ("native_layer_norm", 0),
}  # fmt: skip
IMAGES = ("hf_vit", "hf_deit_teacher", "hf_dinov2", "timm_vit", "timm_vit_mean", "torchvision_vit")
# it rotates queries and keys in float32
TOLERANCE = {"modernbert_cls": 1e-5}


@pytest.mark.part
@pytest.mark.parametrize("rule", ["shared", *LINEAR_RULES])
@pytest.mark.parametrize("name", [*IMAGES, *ENTRIES])
def test_the_method_is_the_walk(name: str, rule: str) -> None:
    model, inputs = zoo.build(name)
    tape, program = read(model, inputs, ENTRIES.get(name))
    seed = torch.zeros_like(tape[program.output])
    seed[[0, 1], [1, 3]] = 1
    composite = deep_taylor() if rule == "shared" else layerwise(rule)  # type: ignore[arg-type]
    got = walk_back(program, tape, [(composite, {program.output: seed})], wanted=program.roots)[0][program.roots[0]]
    wanted = whyformer.explain(model, inputs, "lrp", target=[1, 3], rule=rule).scores
    assert_equal(got.sum(1 if name in IMAGES else -1), wanted, TOLERANCE.get(name, 1e-8))


# -- outputs of the published code ------------------------------------------------------------------------------------------
def config(path: Path) -> dict[str, Any]:
    skipped = ("transformers_version", "architectures", "model_type", "torch_dtype", "dtype", "return_dict")
    return {k: v for k, v in json.loads(path.read_text()).items() if k not in skipped}


def load(path: Path) -> Tensor:
    return torch.from_numpy(np.load(path))


def built(model: Any, weights: Path) -> Any:
    from safetensors.torch import load_file

    missing = model.double().eval().load_state_dict(load_file(weights), strict=False)
    assert not [key for key in missing.missing_keys if "position_ids" not in key]
    return model


@pytest.fixture(scope="module")
def vit(shared: Path) -> tuple[Tape, Program]:
    from transformers import ViTConfig, ViTForImageClassification

    folder = shared / "golden" / "vit_tiny_32"
    model = built(ViTForImageClassification(ViTConfig(**config(folder / "config_hf_vit.json"))), folder / "state_dict_hf_vit_tf5.23.safetensors")
    return read(model, load(folder / "inputs.npy").double())


@pytest.fixture(scope="module")
def bert(shared: Path) -> tuple[Tape, Program]:
    from transformers import BertConfig, BertForSequenceClassification

    folder = shared / "golden" / "bert_tiny"
    model = built(BertForSequenceClassification(BertConfig(**config(folder / "config.json"))), folder / "state_dict_hf.safetensors")
    return read(model, {n: load(folder / f"{n}.npy") for n in ("input_ids", "attention_mask")}, ("native_layer_norm", 0))


def golden_seed(folder: Path, tape: Tape, program: Program, target: int) -> Tensor:
    targets = next(p for p in (folder / "targets.npy", folder / "stabilizer_1e-15" / "targets.npy") if p.exists())
    seed = torch.zeros_like(tape[program.output])
    seed[range(len(seed)), load(targets)[:, target]] = 1
    return seed


def transformer_attribution(tape: Tape, program: Program, seed: Tensor, start: int, normalise: bool) -> Tensor:
    """First row of the product of I + mean_h (∂f/∂A ⊙ R_A)⁺ over the blocks from ``start`` on."""
    maps = [u.exit for u in program.units if u.kind == "softmax" and len(tape.shapes[u.exit]) == 4]
    product: list[Tensor] = []  # from the last block on

    def observe(gradient: Tensor, relevance: Tensor) -> None:
        found = (gradient * relevance).clamp(min=0).mean(1)
        found = torch.eye(found.shape[-1], dtype=found.dtype) + found
        product.append(found / found.sum(-1, keepdim=True) if normalise else found)

    runs = [(composite, {program.output: seed}) for composite in (GRADIENT, deep_taylor())]
    walk_back(program, tape, runs, at=dict.fromkeys(maps[start:], observe))
    row = product[0][:, :1]
    for found in product[1:]:
        row = row @ found
    return row[:, 0]


@pytest.mark.parametrize("target", [0, 1])
@pytest.mark.parametrize("start", [0, 1])
def test_transformer_attribution_of_a_vit(shared: Path, vit: tuple[Tape, Program], start: int, target: int) -> None:
    folder = shared / "golden" / "vit_tiny_32"
    got = transformer_attribution(*vit, golden_seed(folder, *vit, target), start, False)[:, 1:]
    assert_equal(got, load(folder / "stabilizer_1e-15" / f"TA_start{start}.npy")[:, target], 1e-10)


@pytest.mark.parametrize("target", [0, 1])
@pytest.mark.parametrize("start", [0, 1, 2])
def test_transformer_attribution_of_a_bert(shared: Path, bert: tuple[Tape, Program], start: int, target: int) -> None:
    """Without [CLS], which the published code overwrites, and padding, which it does not mask."""
    folder = shared / "golden" / "bert_tiny"
    keep = load(folder / "attention_mask.npy").bool()
    keep[:, 0] = False
    got = transformer_attribution(*bert, golden_seed(folder, *bert, target), start, True)
    wanted = load(folder / "stabilizer_1e-15" / f"TA_start{start}.npy")[:, target].reshape(keep.shape)
    assert_equal(got[keep], wanted[keep], 1e-10)


@pytest.mark.parametrize("target", [0, 1])
@pytest.mark.parametrize(("file", "composite"), [("fullLRP_orig", layerwise()), ("fullLRP_ours", deep_taylor())])
@pytest.mark.parametrize("family", ["vit_tiny_32", "bert_tiny"])
def test_full_lrp(shared: Path, request: pytest.FixtureRequest, family: str, file: str, composite: Composite, target: int) -> None:
    folder = shared / "golden" / family
    tape, program = request.getfixturevalue(family.split("_")[0])
    (root,) = program.roots
    seed = golden_seed(folder, tape, program, target)
    got = walk_back(program, tape, [(composite, {program.output: seed})], wanted=[root])[0][root]
    wanted = load(folder / "stabilizer_1e-15" / f"{file}.npy")[:, target]
    if family == "vit_tiny_32":
        assert_equal(got.sum(1), wanted, 1e-8)
    else:
        keep = load(folder / "attention_mask.npy").bool()
        keep[:, 0] = False
        assert_equal(got.sum(-1)[keep], wanted.reshape(keep.shape)[keep], 1e-8)

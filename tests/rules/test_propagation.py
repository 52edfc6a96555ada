"""Relevance rules against dense float64 references and against published code."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
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


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def relevance(function: Function, x: Tensor, composite: Composite, seed: Tensor | None = None, *, pixels: bool = False) -> Tensor:
    """Relevance of x, which is the model input if ``pixels`` is set, otherwise an inner value. Seeds of both signs are not separated."""
    tape, y = record(lambda x: function(x if pixels else x * 1), x)
    root = tape.number(x) if pixels else tape.calls[0].results[0]
    program = read_program(tape, [root], tape.number(y))
    seed = random_tensor(*y.shape, seed=9).to(y.dtype) if seed is None else seed
    runs = [(replace(composite, by_sign=False), {program.output: seed})]
    return walk_back(program, tape, runs, observed=[root])[0][root]


def assert_equal(result: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    assert result.isfinite().all()
    error = (result - expected.reshape(result.shape)).abs().max() / expected.abs().max().clamp(min=1e-300)
    assert error <= tolerance, f"differs by {float(error):.1e} of the maximum"


# -- references: x [M, I], w [O, I], R [M, O]; each product z_oj = w_oj x_j is computed separately -----------------------
def ratio(top: Tensor, bottom: Tensor) -> Tensor:
    return torch.where(bottom == 0, 0, top / torch.where(bottom == 0, 1, bottom))


def dense_reference(x: Tensor, w: Tensor, b: Tensor, r: Tensor, share: Callable[[list[float], float], list[float]]) -> Tensor:
    """share: (z_oj for all j, bias) -> fraction of R_o for each j."""
    result = torch.zeros_like(x)
    for m in range(len(x)):
        for o in range(len(w)):
            z = [float(w[o, j] * x[m, j]) for j in range(x.shape[1])]
            result[m] += torch.tensor(share(z, float(b[o])), dtype=x.dtype) * r[m, o]
    return result


def fractions(z: list[float], total: float) -> list[float]:
    return [0.0 if total == 0 else v / total for v in z]


def by_sign(z: list[float], bias: float, alpha: float = 1.0) -> list[float]:
    up, down = [max(v, 0.0) for v in z], [min(v, 0.0) for v in z]
    return [alpha * u - (alpha - 1) * d for u, d in zip(fractions(up, sum(up)), fractions(down, sum(down)), strict=True)]


def by_gamma(z: list[float], bias: float, gamma: float) -> list[float]:
    sign = -1 if sum(z) < 0 else 1
    z = [v + gamma * v * (v * sign > 0) for v in z]
    return fractions(z, sum(z))


def by_epsilon(z: list[float], bias: float, epsilon: float) -> list[float]:
    y = sum(z) + bias
    return fractions(z, y - epsilon if y < 0 else y + epsilon)


def separate(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    z = x[:, None] * w[None]
    parts = (z * ((x[:, None] > 0) & (w > 0)), z * ((x[:, None] < 0) & (w < 0)))
    return sum(((ratio(p, p.sum(-1, keepdim=True)) * r[..., None]).sum(1) for p in parts), torch.zeros_like(x))


LAYERS: dict[str, tuple[Composite, Callable[..., Tensor]]] = {
    "deep Taylor": (deep_taylor(), lambda *a: dense_reference(*a, by_sign)),
    "deep Taylor, α 2": (deep_taylor(2.0), lambda *a: dense_reference(*a, lambda z, b: by_sign(z, b, 2.0))),
    "alpha_beta": (layerwise("alpha_beta"), lambda *a: dense_reference(*a, by_sign)),
    "alpha_beta, α 1.5": (layerwise("alpha_beta", alpha=1.5), lambda *a: dense_reference(*a, lambda z, b: by_sign(z, b, 1.5))),
    "separate": (layerwise("separate"), separate),
    "epsilon": (layerwise("epsilon", epsilon=1e-2), lambda *a: dense_reference(*a, lambda z, b: by_epsilon(z, b, 1e-2))),
    "epsilon 0": (layerwise("epsilon", epsilon=0.0), lambda *a: dense_reference(*a, lambda z, b: by_epsilon(z, b, 0.0))),
    "gamma": (layerwise("gamma"), lambda *a: dense_reference(*a, lambda z, b: by_gamma(z, b, 0.25))),
    "gamma 3": (layerwise("gamma", gamma=3.0), lambda *a: dense_reference(*a, lambda z, b: by_gamma(z, b, 3.0))),
}
every_rule = pytest.mark.parametrize("rule", LAYERS)


# -- linear layers -----------------------------------------------------------------------------------------------------
@pytest.mark.part(times=2)
@every_rule
@pytest.mark.parametrize(("shape", "units"), [((1, 1), 1), ((1, 4), 3), ((5, 3), 7), ((2, 6, 8), 5), ((2, 3, 4, 5), 6)])
def test_linear_layer_equals_reference(rule: str, shape: tuple[int, ...], units: int) -> None:
    composite, reference = LAYERS[rule]
    x, w, b, r = random_tensor(*shape), random_tensor(units, shape[-1], seed=1), random_tensor(units, seed=2), random_tensor(*shape[:-1], units, seed=3)
    expected = reference(x.flatten(0, -2), w, b, r.flatten(0, -2))
    assert_equal(relevance(lambda x: F.linear(x, w, b), x, composite, r), expected)


@every_rule
def test_linear_layer_with_zeros_equals_reference(rule: str) -> None:
    """Zero rows, columns and weights, and outputs with products of one sign, lose relevance without NaN."""
    x, w, b, r = random_tensor(5, D), random_tensor(7, D, seed=1), random_tensor(7, seed=2), random_tensor(5, 7, seed=3)
    x[0], x[:, 1], w[0], w[1], x[1], b[0] = 0, 0, 0, w[1].abs(), -x[1].abs(), 0
    composite, reference = LAYERS[rule]
    assert_equal(relevance(lambda x: F.linear(x, w, b), x, composite, r), reference(x, w, b, r))


VARIANTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
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
@pytest.mark.parametrize("variant", VARIANTS)
def test_equivalent_linear_layers_have_same_relevance(variant: str, rule: str) -> None:
    composite = LAYERS[rule][0]
    x, w, b, r = random_tensor(B, N, D), random_tensor(5, D, seed=1), random_tensor(5, seed=2), random_tensor(B, N, 5, seed=3)
    assert_equal(relevance(lambda x: VARIANTS[variant](x, w, b), x, composite, r), relevance(lambda x: F.linear(x, w, b), x, composite, r))


@every_rule
def test_rows_without_relevance_stay_zero(rule: str) -> None:
    x, w, b, r = random_tensor(1, 40, D), random_tensor(5, D, seed=1), random_tensor(5, seed=2), torch.zeros(1, 40, 5, dtype=torch.float64)
    r[:, [3, 17]] = random_tensor(2, 5, seed=3)
    result = relevance(lambda x: F.linear(x, w, b), x, LAYERS[rule][0], r)
    assert_equal(result, LAYERS[rule][1](x[0], w, b, r[0]))
    assert not result[0, [i for i in range(40) if i not in (3, 17)]].any()


@every_rule
def test_large_weights_are_processed_in_parts(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, r = random_tensor(3, 130), random_tensor(200, 130, seed=1), random_tensor(3, 200, seed=3)
    expected = relevance(lambda x: F.linear(x, w), x, LAYERS[rule][0], r)
    monkeypatch.setitem(linear._AT_ONCE, "cpu", 1)

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func._schema.name.split("::")[1] in ("abs", "clamp"):
                self.size = max(self.size, out.numel())
            return out

    with Largest() as largest:
        result = relevance(lambda x: F.linear(x, w), x, LAYERS[rule][0], r)
    assert_equal(result, expected)
    assert largest.size < w.numel()


@every_rule
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_accumulates_in_float32(rule: str, dtype: torch.dtype) -> None:
    """Equals float64 relevance of the same numbers, up to the rounded denominator of ε."""
    x, w, b, r = (t.to(dtype) for t in (random_tensor(3, 64), random_tensor(9, 64, seed=1), random_tensor(9, seed=2), random_tensor(3, 9, seed=3)))
    result = relevance(lambda x: F.linear(x, w, b), x, LAYERS[rule][0], r)
    expected = relevance(lambda x: F.linear(x, w.double(), b.double()), x.double(), LAYERS[rule][0], r.double())
    assert_equal(result.double(), expected, 0.1 if "epsilon" in rule else 2e-4)


@pytest.mark.parametrize("stride", [2, 3])
@pytest.mark.parametrize("composite", [deep_taylor(), layerwise("epsilon")], ids=lambda c: c.name)
def test_box_rule_for_pixels_equals_reference(composite: Composite, stride: int) -> None:
    x, w, b = random_tensor(B, 3, 8, 8), random_tensor(5, 3, 3, 2, seed=1), random_tensor(5, seed=2)
    size = [(8 - k) // stride + 1 for k in (3, 2)]
    r, expected = random_tensor(B, 5, *size, seed=3), torch.zeros_like(x)
    for i, o, h, v in np.ndindex(B, 5, *size):
        patch = (i, slice(None), slice(h * stride, h * stride + 3), slice(v * stride, v * stride + 2))
        low, high = x[i].min(), x[i].max()
        z = x[patch] * w[o] - low * w[o].clamp(min=0) - high * w[o].clamp(max=0)
        expected[patch] += z / z.sum() * r[i, o, h, v]
    result = relevance(lambda x: F.conv2d(x, w, b, stride=stride), x, composite, r, pixels=True)
    assert_equal(result, expected)
    assert_equal(result.sum(), r.sum())


def test_box_rule_for_linear_patches_equals_convolution() -> None:
    x, w = random_tensor(B, 3, 8, 8), random_tensor(5, 3, 4, 4, seed=1)

    def linear_patches(x: Tensor) -> Tensor:
        patches = x.reshape(B, 3, 2, 4, 2, 4).permute(0, 2, 4, 1, 3, 5).reshape(B, 4, -1)
        return F.linear(patches, w.flatten(1))

    expected = relevance(lambda x: F.conv2d(x, w, stride=4).flatten(2).mT, x, deep_taylor(), pixels=True)
    assert_equal(relevance(linear_patches, x, deep_taylor(), pixels=True), expected)


def test_inner_layer_does_not_use_box_rule() -> None:
    x, w, r = random_tensor(B, N, D), random_tensor(5, D, seed=1), random_tensor(B, N, 5, seed=3)
    assert_equal(relevance(lambda x: F.linear(x, w), x, deep_taylor(), r), dense_reference(x.flatten(0, 1), w, r[0, 0] * 0, r.flatten(0, 1), by_sign))


# -- products, sums, one branch ------------------------------------------------------------------------------------------
COMPOSITES = {"normalised": deep_taylor(), "plain": layerwise()}
each = pytest.mark.parametrize("add", COMPOSITES)


def test_product_of_two_branches_halves_relevance() -> None:
    x, w, r = random_tensor(N, D), random_tensor(D, D, seed=1), random_tensor(N, N, seed=3)
    k = x @ w
    expected_x, expected_k = torch.zeros_like(x), torch.zeros_like(x)
    for i, j, d in np.ndindex(N, N, D):
        part = x[i, d] * k[j, d] / (x @ k.T)[i, j] * r[i, j] / 2
        expected_x[i, d] += part
        expected_k[j, d] += part
    for function in (lambda x: x @ (x @ w).T, lambda x: torch.einsum("id,jd->ij", x, x @ w)):
        result = relevance(function, x, deep_taylor(), r)
        assert_equal(result, expected_x + dense_reference(x, w.T, torch.zeros(D), expected_k, by_sign))
    assert_equal((expected_x + expected_k).sum(), r.sum())


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
def test_weighted_sum_equals_reference(function: Function, matrix: Tensor) -> None:
    x, matrix = random_tensor(N, D), matrix.double()
    r = random_tensor(len(matrix), D, seed=3)
    result = relevance(function, x, deep_taylor(), r.reshape(function(x).shape))
    assert_equal(result, x * (matrix.T @ ratio(r, matrix @ x)))
    assert_equal(result.sum(), r.sum())


def test_weighted_sum_with_input_as_weights() -> None:
    """An added constant receives no relevance."""
    x, matrix, bias, r = random_tensor(N, D), random_tensor(3, N, seed=1), random_tensor(D, seed=2), random_tensor(3, D, seed=3)
    for function in (lambda x, m: m @ x, lambda x, m: torch.addmm(bias, m, x)):
        tape, y = record(lambda x, m, f=function: f(x * 1, m), x, matrix)
        program = read_program(tape, [tape.calls[0].results[0]], tape.number(y))
        assert [u.kind for u in program.units] == ["weighted sum"]
        result = walk_back(program, tape, [(deep_taylor(), {program.output: r})], observed=program.roots)[0][program.roots[0]]
        assert_equal(result, x * (matrix.T @ ratio(r, matrix @ x)))


def add_reference(u: Tensor, v: Tensor, r: Tensor, normalised: bool) -> tuple[Tensor, Tensor]:
    a, b = torch.zeros_like(u), torch.zeros_like(v)
    for i in range(len(u)):
        for out, value in ((a, u), (b, v)):
            out[i] = ratio(value[i] * r[i], u[i] + v[i])
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
@pytest.mark.parametrize("variant", SUMS)
def test_add_equals_reference(variant: str, add: str) -> None:
    x, r = random_tensor(B, 2, D), random_tensor(B, D, seed=3)
    u, v = x.unbind(1)
    signed = {"u + v": (u, v), "u − v": (u, -v), "v − u, by rsub": (-u, v), "u + 3 v": (u, 3 * v), "u − 3 v": (u, -3 * v)}[variant]
    expected = torch.stack(add_reference(*signed, r, add == "normalised"), 1)
    result = relevance(lambda x: SUMS[variant](*x.unbind(1)), x, COMPOSITES[add], r)
    assert_equal(result, expected)
    assert_equal(result.sum((1, 2)), r.sum(1))


@each
def test_add_with_broadcast_branch_equals_reference(add: str) -> None:
    x, r = random_tensor(B, N, D), random_tensor(B, N, D, seed=3)
    a, b = add_reference(x, x[:, :1].expand_as(x), r, add == "normalised")
    a[:, 0] += b.sum(1)
    assert_equal(relevance(lambda x: x + x[:, :1], x, COMPOSITES[add], r), a)


@each
def test_positions_receive_relevance_and_biases_do_not(add: str) -> None:
    x, r = random_tensor(B, N, D), random_tensor(B, N, D, seed=3)
    for positions in (random_tensor(N, D, seed=1), random_tensor(1, N, D, seed=1), random_tensor(N, 1, seed=1)):
        expected, _ = add_reference(x, positions.expand_as(x).clone(), r, add == "normalised")
        assert_equal(relevance(lambda x, p=positions: x + p, x, COMPOSITES[add], r), expected)
        assert_equal(relevance(lambda x, p=positions: p + x, x, COMPOSITES[add], r), expected)
    for bias in (random_tensor(D, seed=1), random_tensor(1, 1, D, seed=1), 3.0):
        assert_equal(relevance(lambda x, b=bias: x + b, x, COMPOSITES[add], r), r)
        assert_equal(relevance(lambda x, b=bias: b - x, x, COMPOSITES[add], r), r)


@each
@pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(torch.float64).min, -1e4])
def test_zero_entries_of_mask_receive_no_relevance(add: str, lowest: float) -> None:
    x = random_tensor(B, N, N)
    mask = torch.zeros(N, N, dtype=torch.float64).masked_fill(torch.ones(N, N).triu(1).bool(), lowest)
    r = random_tensor(B, N, N, seed=3).tril()
    assert_equal(relevance(lambda x: x + mask, x, COMPOSITES[add], r), r)


def test_relevance_of_samples_is_independent() -> None:
    x, r = random_tensor(3, N, D), random_tensor(3, N, D, seed=3)
    batch = relevance(lambda x: x + x.flip(1) * 2, x, deep_taylor(), r)
    assert_equal(torch.cat([relevance(lambda x: x + x.flip(1) * 2, x[i : i + 1], deep_taylor(), r[i : i + 1]) for i in range(3)]), batch)


IDENTITY_FUNCTIONS: dict[str, Function] = {
    "gelu": F.gelu, "relu": torch.relu, "tanh": torch.tanh, "silu": F.silu, "square": torch.square, "softmax": lambda x: x.softmax(-1),
    "layer norm": lambda x: F.layer_norm(x, (D,), random_tensor(D, seed=1), random_tensor(D, seed=2)), "clip": lambda x: x.clamp(-1, 1),
    "scale": lambda x: x * random_tensor(D, seed=1), "negative": torch.neg, "division": lambda x: x / 3, "number − x": lambda x: 1 - x,
    "batch norm": lambda x: F.batch_norm(x, x.new_zeros(N), x.new_ones(N)), "shift": lambda x: x + 1, "leaky": F.leaky_relu,
    "group norm": lambda x: F.group_norm(x, 2), "view": lambda x: x.unflatten(-1, (2, -1)).clone().flatten(2),
}  # fmt: skip


@pytest.mark.part
@each
@pytest.mark.parametrize("name", IDENTITY_FUNCTIONS)
def test_identity_rule_keeps_relevance(name: str, add: str) -> None:
    r = random_tensor(B, N, D, seed=3)
    assert_equal(relevance(IDENTITY_FUNCTIONS[name], random_tensor(B, N, D), COMPOSITES[add], r), r)


def test_gate_halves_relevance() -> None:
    x, r = random_tensor(B, N, D), random_tensor(B, N, D, seed=3)
    assert_equal(relevance(lambda x: x * x.flip(-1), x, deep_taylor(), r), (r + r.flip(-1)) / 2)
    assert_equal(relevance(lambda x: F.silu(x) * x.flip(-1), x, deep_taylor(), r), (r + r.flip(-1)) / 2)


def test_input_dependent_scale_of_norm_receives_half() -> None:
    x, r = random_tensor(B, N, D), random_tensor(B, N, D, seed=3)
    result = relevance(lambda x: F.layer_norm(x, (D,), x[0, 0]), x, deep_taylor(), r)
    expected = r / 2
    expected[0, 0] += r.sum((0, 1)) / 2
    assert_equal(result, expected)
    with pytest.raises(UnknownOperation, match="shift"):
        relevance(lambda x: F.layer_norm(x, (D,), None, x[0, 0]), x, deep_taylor(), r)


def test_divisor_of_a_row_receives_no_relevance() -> None:
    """As in the normalisation of router weights."""
    x, r = random_tensor(B, N, D).abs(), random_tensor(B, N, D, seed=3)
    assert_equal(relevance(lambda x: x / x.prod(-1, keepdim=True).sum(-1, keepdim=True).exp(), x, deep_taylor(), r), r)


SCALES: dict[str, Function] = {
    "a root": lambda x: x * x.square().mean(-1, keepdim=True) ** 0.5,
    "a root of another": lambda x: x * (x.roll(1, 0).square().mean(-1, keepdim=True) + 1e-3).sqrt() * 2,
    "a norm that is clipped": lambda x: x * (2 / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + 1e-6)).clamp(max=1.0),
    "a root over a root": lambda x: x * x.roll(1, 0).square().mean(-1, keepdim=True).sqrt() / x.square().mean(-1, keepdim=True).clamp(min=1e-5).sqrt(),
}


@each
@pytest.mark.parametrize("name", SCALES)
def test_factor_of_a_row_receives_no_relevance(name: str, add: str) -> None:
    x, r = random_tensor(5, D), random_tensor(5, D, seed=3)
    assert_equal(relevance(SCALES[name], x, COMPOSITES[add], r), r)


@each
def test_positions_of_grid_sample_receive_no_relevance(add: str) -> None:
    """R_i = v_i Σ_p W_pi R_p / y_p for bilinear weights W, also if these depend on the input."""
    x, r = random_tensor(2, 3, 4, 4), random_tensor(2, 3, 2, 5, seed=3)

    def sampled(x: Tensor) -> Tensor:
        return F.grid_sample(x * 2, x[:, :2, :2].repeat(1, 1, 1, 2)[..., :5].movedim(1, -1).tanh(), align_corners=False)

    positions = x[:, :2, :2].repeat(1, 1, 1, 2)[..., :5].movedim(1, -1).tanh()
    (expected,) = torch.autograd.functional.vjp(
        lambda v: F.grid_sample(v * 2, positions, align_corners=False), x, ratio(r, sampled(x))
    )[1:]
    assert_equal(relevance(sampled, x, COMPOSITES[add], r), x * expected)


@each
@pytest.mark.parametrize("matrix_depends_on_x", [False, True])
def test_matrix_of_linear_system_receives_no_relevance(matrix_depends_on_x: bool, add: str) -> None:
    x, r, fixed = random_tensor(2, 4, 3), random_tensor(2, 4, 3, seed=3), torch.eye(4, dtype=torch.float64) * 2 + random_tensor(4, 4, seed=5).tril(-1)

    def solved(x: Tensor) -> Tensor:
        matrix = fixed + (x @ x.mT).tril(-1) if matrix_depends_on_x else fixed.expand(2, 4, 4)
        return torch.linalg.solve_triangular(matrix, x, upper=False)

    matrix = fixed + (x @ x.mT).tril(-1) if matrix_depends_on_x else fixed.expand(2, 4, 4)
    (expected,) = torch.autograd.functional.vjp(
        lambda v: torch.linalg.solve_triangular(matrix, v, upper=False), x, ratio(r, solved(x))
    )[1:]
    assert_equal(relevance(solved, x, COMPOSITES[add], r), x * expected)


@pytest.mark.parametrize(
    "function",
    [lambda x: x.amax(1), lambda x: x.max(1).values, lambda x: x.topk(1, 1).values[:, 0], lambda x: x.sort(1).values[:, -1]],
)
def test_selection_gives_relevance_to_selected_values(function: Function) -> None:
    x, r = random_tensor(B, N, D), random_tensor(B, D, seed=3)
    assert_equal(relevance(function, x, deep_taylor(), r), torch.zeros_like(x).scatter(1, x.argmax(1, keepdim=True), r[:, None]))


def test_logsumexp_distributes_relevance_by_softmax() -> None:
    x, r = random_tensor(B, N, D), random_tensor(B, D, seed=3)
    assert_equal(relevance(lambda x: x.logsumexp(1), x, deep_taylor(), r), x.softmax(1) * r[:, None])


@each
@pytest.mark.parametrize("inverse", [False, True])
def test_complex_rotation_equals_rotation_of_pairs(inverse: bool, add: str) -> None:
    """A rotation by complex numbers equals a rotation of pairs."""
    x, r, angle = random_tensor(B, N, D), random_tensor(B, N, D, seed=3), random_tensor(N, D // 2, seed=1)

    def rotated(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        if inverse:
            return torch.view_as_real(pairs / torch.polar(torch.ones_like(angle), -angle)).flatten(-2)
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)

    def rotated_pairs(x: Tensor) -> Tensor:
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1).flatten(-2)

    result = relevance(rotated, x, COMPOSITES[add], r)
    assert_equal(result, relevance(rotated_pairs, x, COMPOSITES[add], r))
    assert_equal(result.sum(), r.sum())


def test_complex_weighted_sum_distributes_by_real_and_imaginary_parts() -> None:
    x, r, w = random_tensor(B, N), random_tensor(B, N, 2, seed=3), torch.view_as_complex(random_tensor(N, N, 2, seed=1))
    tape, y = record(lambda x, w: torch.view_as_real((x * 1).to(w.dtype) @ w), x, w)
    program = read_program(tape, [tape.calls[0].results[0]], tape.number(y))
    result = walk_back(program, tape, [(layerwise(), {program.output: r})], observed=program.roots)[0][program.roots[0]]
    z = torch.view_as_real(x[:, :, None] * w)
    assert_equal(result, (z / z.sum(1, keepdim=True) * r[:, None]).sum((2, 3)))


# -- properties ----------------------------------------------------------------------------------------------------------
numbers = st.floats(-1e3, 1e3, width=32)


def matrices(rows: int, columns: int) -> st.SearchStrategy[Tensor]:
    row = st.lists(numbers, min_size=columns, max_size=columns)
    return st.lists(row, min_size=rows, max_size=rows).map(lambda v: torch.tensor(v, dtype=torch.float64))


@given(matrices(3, 4), matrices(5, 4), matrices(3, 5))
def test_layers_conserve_relevance(x: Tensor, w: Tensor, r: Tensor) -> None:
    z = x[:, None] * w[None]
    size, total = z.abs().sum(-1), z.sum(-1)
    for name in LAYERS:
        assert relevance(lambda x: F.linear(x, w), x, LAYERS[name][0], r).isfinite().all()
    tolerance = 1e-6 * float(1 + r.abs().sum())
    positive = z.clamp(min=0).sum(-1)
    if bool(((positive == 0) | (positive > 1e-6 * size)).all()):
        result = relevance(lambda x: F.linear(x, w), x, deep_taylor(), r)
        torch.testing.assert_close(result.sum(), r[positive > 0].sum(), rtol=0, atol=tolerance)
    result = relevance(lambda x: F.linear(x, w), x, layerwise("gamma"), r)
    if bool((total.abs() > 1e-3 * size).all()):
        torch.testing.assert_close(result.sum(), r.sum(), rtol=0, atol=tolerance)


@given(matrices(2, 4), matrices(2, 4), st.sampled_from(sorted(COMPOSITES)))
def test_sums_and_products_conserve_relevance(x: Tensor, r: Tensor, add: str) -> None:
    composite = COMPOSITES[add]
    result = relevance(lambda x: x + x.flip(-1) * 2, x, composite, r)
    assert result.isfinite().all()
    y = x + x.flip(-1) * 2
    if bool((y.abs() > 1e-3 * (1 + x.abs().max())).all()):
        parts = (x * r / y).sum(-1)
        if add == "plain" or bool((parts.abs() > 1e-3).all() and ((r.sum(-1) - parts).abs() > 1e-3).all()):
            torch.testing.assert_close(result.sum(-1), r.sum(-1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(relevance(lambda x: x * x.flip(-1), x, composite, r).sum(), r.sum())


@given(st.sampled_from([torch.float32, torch.float64]), st.floats(-1e4, 1e4), st.floats(allow_nan=False))
def test_division_is_finite(dtype: torch.dtype, a: float, b: float) -> None:
    quotient = divide(torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=dtype))
    assert quotient.isfinite()
    if 1e-3 < abs(b) < 1e3:
        torch.testing.assert_close(quotient, torch.tensor(a, dtype=dtype) / torch.tensor(b, dtype=dtype))


@pytest.mark.parametrize("name", ["deep Taylor", *LINEAR_RULES])
def test_vmap_over_seeds_equals_single_seeds(name: str) -> None:
    model, pixels = zoo.build("hf_vit")
    tape, program = read_model(model, pixels)
    seeds = random_tensor(3, *tape.shapes[program.output])

    def walk(seed: Tensor) -> Tensor:
        return walk_back(program, tape, [(LAYERS[name][0], {program.output: seed})], observed=program.roots)[0][program.roots[0]]

    assert_equal(torch.vmap(walk)(seeds), torch.stack([walk(seed) for seed in seeds]))


# -- errors --------------------------------------------------------------------------------------------------------------
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
def test_operation_without_rule_raises_with_remedy(function: Function, word: str, add: str) -> None:
    with pytest.raises(UnknownOperation, match=rf"(?s)({word}).*gradient method"):
        relevance(function, random_tensor(B, N, D), COMPOSITES[add])


def test_every_kind_has_a_rule_or_uses_its_adjoint() -> None:
    by_position = {"linear": {"layer", "weighted sum", "product"}, "mean": {"weighted sum"}, "add": {"add", "shift"}}
    by_position["mul"] = {"scale", "gate", "activated gate", "quotient"}
    kinds = {"other", "power"}.union(*(by_position.get(kind, {kind}) for kind in KINDS.values()))
    assert kinds - set(deep_taylor().rules) == {"view", "selection", "silent", "logsumexp"}


def test_composites_with_different_settings_have_different_names() -> None:
    composites = [LAYERS[name][0] for name in LAYERS] + [layerwise("epsilon"), layerwise(normalise_add=True)]
    assert len({c.name for c in composites}) == len(composites)
    assert {c.propagates for c in composites} == {"relevance"}


# -- whole models ---------------------------------------------------------------------------------------------------------
def read_model(model: Any, inputs: Any, entry: tuple[str, int] | None = None) -> tuple[Tape, Program]:
    """(tape, program) from the pixels, or from a call: the first with a name, plus an offset."""
    tape, output = record(model, inputs) if isinstance(inputs, Tensor) else record(model, **inputs)
    root = tape.number(inputs) if isinstance(inputs, Tensor) else -1
    if entry is not None:
        first = next(c for c in tape.calls if c.name == entry[0] and tape.floating(c.results[0]) and tape.shapes[c.results[0]][-1] > 5)
        root = tape.calls[first.number + entry[1]].results[0]
    return tape, read_program(tape, [root], tape.number(output if isinstance(output, Tensor) else output.logits))


# call whose result is the input of the first block, and an offset
ENTRIES: dict[str, tuple[str, int]] = {
    "bert": ("native_layer_norm", 0), "distilbert": ("native_layer_norm", 0), "electra": ("addmm", 1), "encoder_mean": ("add", 0),
    "encoder_first": ("add", 0), "gpt2": ("add", 0), "llama": ("embedding", 0), "modernbert_cls": ("native_layer_norm", 0),
}  # fmt: skip
IMAGES = ("hf_vit", "hf_deit_teacher", "hf_dinov2", "timm_vit", "timm_vit_mean", "torchvision_vit")
# ModernBERT rotates queries and keys in float32
TOLERANCE = {"modernbert_cls": 1e-5}


@pytest.mark.part
@pytest.mark.parametrize("rule", ["shared", *LINEAR_RULES])
@pytest.mark.parametrize("name", [*IMAGES, *ENTRIES])
def test_lrp_method_equals_walk(name: str, rule: str) -> None:
    model, inputs = zoo.build(name)
    tape, program = read_model(model, inputs, ENTRIES.get(name))
    seed = torch.zeros_like(tape[program.output])
    seed[[0, 1], [1, 3]] = 1
    composite = deep_taylor() if rule == "shared" else layerwise(rule)  # type: ignore[arg-type]
    result = walk_back(program, tape, [(composite, {program.output: seed})], observed=program.roots)[0][program.roots[0]]
    expected = whyformer.explain(model, inputs, "lrp", target=[1, 3], rule=rule).scores
    assert_equal(result.sum(1 if name in IMAGES else -1), expected, TOLERANCE.get(name, 1e-8))


# -- arrays of the published code -------------------------------------------------------------------------------------------
def config(path: Path) -> dict[str, Any]:
    skipped = ("transformers_version", "architectures", "model_type", "torch_dtype", "dtype", "return_dict")
    return {k: v for k, v in json.loads(path.read_text()).items() if k not in skipped}


def load(path: Path) -> Tensor:
    return torch.from_numpy(np.load(path))


def load_weights(model: Any, weights: Path) -> Any:
    from safetensors.torch import load_file

    missing = model.double().eval().load_state_dict(load_file(weights), strict=False)
    assert not [key for key in missing.missing_keys if "position_ids" not in key]
    return model


@pytest.fixture(scope="module")
def vit(shared: Path) -> tuple[Tape, Program]:
    from transformers import ViTConfig, ViTForImageClassification

    folder = shared / "golden" / "vit_tiny_32"
    model = load_weights(ViTForImageClassification(ViTConfig(**config(folder / "config_hf_vit.json"))), folder / "state_dict_hf_vit_tf5.23.safetensors")
    return read_model(model, load(folder / "inputs.npy").double())


@pytest.fixture(scope="module")
def bert(shared: Path) -> tuple[Tape, Program]:
    from transformers import BertConfig, BertForSequenceClassification

    folder = shared / "golden" / "bert_tiny"
    model = load_weights(BertForSequenceClassification(BertConfig(**config(folder / "config.json"))), folder / "state_dict_hf.safetensors")
    return read_model(model, {n: load(folder / f"{n}.npy") for n in ("input_ids", "attention_mask")}, ("native_layer_norm", 0))


def golden_seed(folder: Path, tape: Tape, program: Program, target: int) -> Tensor:
    targets = next(p for p in (folder / "targets.npy", folder / "stabilizer_1e-15" / "targets.npy") if p.exists())
    seed = torch.zeros_like(tape[program.output])
    seed[range(len(seed)), load(targets)[:, target]] = 1
    return seed


def transformer_attribution(tape: Tape, program: Program, seed: Tensor, start: int, normalise: bool) -> Tensor:
    """First row of the product of I + mean_h (∂f/∂A ⊙ R_A)⁺ over the blocks from ``start``."""
    maps = [u.exit for u in program.units if u.kind == "softmax" and len(tape.shapes[u.exit]) == 4]
    product: list[Tensor] = []  # from the last block

    def observe(gradient: Tensor, relevance: Tensor) -> None:
        block_map = (gradient * relevance).clamp(min=0).mean(1)
        block_map = torch.eye(block_map.shape[-1], dtype=block_map.dtype) + block_map
        product.append(block_map / block_map.sum(-1, keepdim=True) if normalise else block_map)

    runs = [(composite, {program.output: seed}) for composite in (GRADIENT, deep_taylor())]
    walk_back(program, tape, runs, at=dict.fromkeys(maps[start:], observe))
    row = product[0][:, :1]
    for block_map in product[1:]:
        row = row @ block_map
    return row[:, 0]


@pytest.mark.parametrize("target", [0, 1])
@pytest.mark.parametrize("start", [0, 1])
def test_transformer_attribution_of_vit_equals_published_code(shared: Path, vit: tuple[Tape, Program], start: int, target: int) -> None:
    folder = shared / "golden" / "vit_tiny_32"
    result = transformer_attribution(*vit, golden_seed(folder, *vit, target), start, False)[:, 1:]
    assert_equal(result, load(folder / "stabilizer_1e-15" / f"TA_start{start}.npy")[:, target], 1e-10)


@pytest.mark.parametrize("target", [0, 1])
@pytest.mark.parametrize("start", [0, 1, 2])
def test_transformer_attribution_of_bert_equals_published_code(shared: Path, bert: tuple[Tape, Program], start: int, target: int) -> None:
    """Excludes [CLS], which the published code overwrites, and padding, which it does not mask."""
    folder = shared / "golden" / "bert_tiny"
    keep = load(folder / "attention_mask.npy").bool()
    keep[:, 0] = False
    result = transformer_attribution(*bert, golden_seed(folder, *bert, target), start, True)
    expected = load(folder / "stabilizer_1e-15" / f"TA_start{start}.npy")[:, target].reshape(keep.shape)
    assert_equal(result[keep], expected[keep], 1e-10)


@pytest.mark.parametrize("target", [0, 1])
@pytest.mark.parametrize(("file", "composite"), [("fullLRP_orig", layerwise()), ("fullLRP_ours", deep_taylor())])
@pytest.mark.parametrize("family", ["vit_tiny_32", "bert_tiny"])
def test_full_lrp_equals_published_code(shared: Path, request: pytest.FixtureRequest, family: str, file: str, composite: Composite, target: int) -> None:
    folder = shared / "golden" / family
    tape, program = request.getfixturevalue(family.split("_")[0])
    (root,) = program.roots
    seed = golden_seed(folder, tape, program, target)
    result = walk_back(program, tape, [(composite, {program.output: seed})], observed=[root])[0][root]
    expected = load(folder / "stabilizer_1e-15" / f"{file}.npy")[:, target]
    if family == "vit_tiny_32":
        assert_equal(result.sum(1), expected, 1e-8)
    else:
        keep = load(folder / "attention_mask.npy").bool()
        keep[:, 0] = False
        assert_equal(result.sum(-1)[keep], expected.reshape(keep.shape)[keep], 1e-8)

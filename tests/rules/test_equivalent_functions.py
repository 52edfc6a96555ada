"""Equivalent implementations have the same relevance: norms, routers, attention sinks, rotations, scatters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leading_axis import walk_back
from walked import walked
from whyformer.errors import UnknownOperation
from whyformer.rules.multipliers import COMPOSITES as MULTIPLIERS
from whyformer.rules.multipliers import WITH_SECANTS
from whyformer.rules.propagation import deep_taylor, layerwise
from whyformer.tape.program import read_program
from whyformer.tape.recording import record
from whyformer.tape.walking import GRADIENT, Step

B, N, D, E = 2, 4, 6, 3
COMPOSITES = {
    "gradient": GRADIENT,
    "AH+LN": MULTIPLIERS["ah_ln"],
    "LN, secant": WITH_SECANTS["ln"],
    "deep Taylor": deep_taylor(),
    "epsilon": layerwise("epsilon"),
    "separate": layerwise("separate"),
}


def random_tensor(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class FunctionBetweenLayers(nn.Module):
    """A linear layer, a function and a linear layer."""

    def __init__(self, function: Callable[[FunctionBetweenLayers, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first, self.last = nn.Parameter(random_tensor(D, D, seed=1)), nn.Parameter(random_tensor(3, D, seed=2))
        self.router, self.experts = nn.Parameter(random_tensor(E, D, seed=3)), nn.Parameter(random_tensor(E, D, D, seed=4))
        self.sinks = nn.Parameter(random_tensor(1, seed=5))
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.function(self, F.linear(x, self.first)), self.last).flatten(1)


def propagate(function: Callable[[FunctionBetweenLayers, Tensor], Tensor], composite: str) -> tuple[Tensor, Tensor]:
    return walked(FunctionBetweenLayers(function), random_tensor(B, N, D, seed=6), COMPOSITES[composite])


# -- experts ---------------------------------------------------------------------------------------------------------
def routed(m: FunctionBetweenLayers, x: Tensor, *, in_place: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens [T, D], weights [T, 2], chosen experts [T, 2])"""
    tokens = x.flatten(0, 1)
    weights, experts = F.linear(tokens, m.router).softmax(-1).topk(2)
    if in_place:
        weights /= weights.sum(-1, keepdim=True)
    else:
        weights = weights / weights.sum(-1, keepdim=True)
    return tokens, weights, experts


def experts_by_loop(m: FunctionBetweenLayers, x: Tensor) -> Tensor:
    tokens, weights, experts = routed(m, x, in_place=True)
    mixed = torch.zeros_like(tokens)
    for expert in range(E):
        rows, which = (experts == expert).nonzero(as_tuple=True)
        mixed.index_add_(0, rows, F.linear(tokens[rows], m.experts[expert]) * weights[rows, which, None])
    return mixed.view_as(x)


def experts_all(m: FunctionBetweenLayers, x: Tensor) -> Tensor:
    tokens, weights, experts = routed(m, x, in_place=False)
    every = torch.stack([F.linear(tokens, m.experts[e]) for e in range(E)], 1)
    taken = every.gather(1, experts[..., None].expand(-1, -1, D))
    return (taken * weights[..., None]).sum(1).view_as(x)


# -- rotations ---------------------------------------------------------------------------------------------------------
ANGLES = random_tensor(N, D // 2, seed=8)


def rotated_as_complex(m: FunctionBetweenLayers, x: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(ANGLES), ANGLES)).flatten(-2)


def rotated_as_pairs(m: FunctionBetweenLayers, x: Tensor) -> Tensor:
    a, b = x[..., ::2], x[..., 1::2]
    cos, sin = ANGLES.cos(), ANGLES.sin()
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


# -- sinks -------------------------------------------------------------------------------------------------------------
def sinks(m: FunctionBetweenLayers, x: Tensor, shift: Callable[[Tensor], Tensor]) -> Tensor:
    scores = torch.cat([x @ x.mT, m.sinks.expand(B, N, 1)], -1)
    return shift(scores).softmax(-1)[..., :-1] @ x


def square(x: Tensor) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True) + 1e-6


EQUIVALENT: dict[str, list[Callable[[FunctionBetweenLayers, Tensor], Tensor]]] = {
    "RMSNorm": [
        lambda m, x: F.rms_norm(x, (D,), None, 1e-6),
        lambda m, x: x * torch.rsqrt(square(x)),
        lambda m, x: x / torch.sqrt(square(x)),
        lambda m, x: square(x).pow(-0.5) * x,
        lambda m, x: x * (1 / square(x).sqrt()),
    ],
    "unit length": [
        lambda m, x: F.normalize(x, dim=-1),
        lambda m, x: x / x.norm(dim=-1, keepdim=True),
        lambda m, x: x / x.pow(2).sum(-1, keepdim=True).pow(0.5),
        lambda m, x: x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).expand_as(x),
        lambda m, x: x / x.norm(dim=-1, keepdim=True).clamp_min(1e-6),
        lambda m, x: x.div(x.detach().norm(dim=-1, keepdim=True) + 0 * x.norm(dim=-1, keepdim=True)),
    ],
    "experts": [experts_by_loop, experts_all],
    "rotation": [rotated_as_complex, rotated_as_pairs],
    "sinks": [lambda m, x: sinks(m, x, lambda s: s), lambda m, x: sinks(m, x, lambda s: s - s.max(-1, keepdim=True).values)],
    "sum at places": [
        lambda m, x: x.new_zeros(B, 2, D).index_add(1, torch.tensor([0, 1, 1, 0]), x).repeat(1, 2, 1),
        lambda m, x: torch.stack([x[:, [0, 3]].sum(1), x[:, [1, 2]].sum(1)], 1).repeat(1, 2, 1),
        lambda m, x: x.new_zeros(B, 2, D).scatter_add_(1, torch.tensor([0, 1, 1, 0])[:, None].expand(B, N, D), x).repeat(1, 2, 1),
    ],
    "rows put back": [
        lambda m, x: x.flip(1),
        lambda m, x: torch.zeros_like(x).index_copy(1, torch.tensor([3, 2, 1, 0]), x),
        lambda m, x: torch.zeros_like(x).masked_scatter(torch.ones_like(x, dtype=torch.bool), x.flip(1)),
        lambda m, x: torch.zeros_like(x).copy_(x.flip(1)),
    ],
    "largest": [
        lambda m, x: x.amax(1, keepdim=True).expand_as(x),
        lambda m, x: x.max(1, keepdim=True).values.expand_as(x),
        lambda m, x: x.sort(1).values[:, -1:].expand_as(x),
        lambda m, x: x.topk(1, 1).values.expand_as(x),
        lambda m, x: x.gather(1, x.argmax(1, keepdim=True)).expand_as(x),
        lambda m, x: F.max_pool1d(x.mT, N).mT.expand_as(x),
        lambda m, x: F.adaptive_max_pool1d(x.mT, 1).mT.expand_as(x),
        lambda m, x: F.max_pool2d(x.mT[..., None], (N, 1))[..., 0].mT.expand_as(x),
    ],
    "square": [lambda m, x: x.square(), lambda m, x: x**2, lambda m, x: torch.pow(x, 2.0)],
    "products added": [lambda m, x: torch.baddbmm(x, x @ x.mT, x, beta=0.5), lambda m, x: x.baddbmm(batch1=x @ x.mT, batch2=x, beta=0.5)],
}


@pytest.mark.part
@pytest.mark.parametrize("composite", COMPOSITES)
@pytest.mark.parametrize("name", EQUIVALENT)
def test_equivalent_functions_have_same_relevance(name: str, composite: str) -> None:
    # for the plain gradient, a constant divisor differs from one that depends on x
    variants = [w for i, w in enumerate(EQUIVALENT[name]) if (name, i, composite) != ("unit length", 5, "gradient")]
    logits, expected = propagate(variants[0], composite)
    assert expected.abs().max() > 0
    for variant in variants[1:]:
        value, result = propagate(variant, composite)
        assert torch.allclose(value, logits, rtol=1e-9, atol=1e-9)
        assert torch.allclose(result, expected, rtol=1e-7, atol=1e-9 * float(expected.abs().max()))


def test_expert_and_its_weight_receive_half_each() -> None:
    """y = w · e has two branches with R/2 each; the half of w passes quotient, choice and softmax unchanged."""
    for composite in ("deep Taylor", "epsilon"):
        records: list[tuple[Tensor, list[Tensor]]] = []

        def on_unit(run: int, step: Step, flows: dict[int, Tensor], parts: list[tuple[int, Tensor]], gates: list[Any] = records) -> None:
            if step.unit.kind == "gate":
                gates.append((flows[step.unit.exit], [part for _, part in parts]))

        tape, value = record(FunctionBetweenLayers(experts_by_loop), random_tensor(B, N, D, seed=6))
        program = read_program(tape, tape.inputs, tape.number(value))
        seed = {program.output: random_tensor(*value.shape, seed=7)}
        walk_back(program, tape, [(replace(COMPOSITES[composite], by_sign=False), seed)], observed=program.roots, on_unit=on_unit)
        assert len(records) == E
        for gate_relevance, parts in records:
            assert torch.allclose(parts[0].sum(), gate_relevance.sum() / 2)
            assert torch.allclose(parts[1].sum(), gate_relevance.sum() / 2)


def test_rules_use_values_before_in_place_changes() -> None:
    """A rule uses the value of a tensor before later in-place changes."""

    def in_place(m: FunctionBetweenLayers, x: Tensor) -> Tensor:
        y = x * 1
        z = F.linear(y, m.first) + y.sum(-1, keepdim=True)
        y[:, 1:].mul_(3)
        y.view(-1)[::2] += 1
        return z + y

    def out_of_place(m: FunctionBetweenLayers, x: Tensor) -> Tensor:
        z = F.linear(x, m.first) + x.sum(-1, keepdim=True)
        y = torch.cat([x[:, :1], x[:, 1:] * 3], 1)
        return z + (y + torch.tensor([1.0, 0.0] * (D // 2), dtype=y.dtype))

    for composite in COMPOSITES:
        if composite != "deep Taylor":  # the changed part is a separate branch, so shares differ
            assert torch.allclose(propagate(in_place, composite)[1], propagate(out_of_place, composite)[1], rtol=1e-7)


def test_in_place_change_with_torch_functions_disabled_is_recorded() -> None:
    def hidden(m: FunctionBetweenLayers, x: Tensor) -> Tensor:
        y = x * 1
        z = F.linear(y, m.first)
        with torch._C.DisableTorchFunction():
            y.detach().mul_(2)
        return z + y

    for composite in COMPOSITES:
        expected = propagate(lambda m, x: F.linear(x * 1, m.first) + 2 * (x * 1), composite)
        assert all(torch.allclose(*pair) for pair in zip(propagate(hidden, composite), expected, strict=True))


def test_quotient_of_two_branches_is_refused() -> None:
    with pytest.raises(UnknownOperation, match="quotient"):
        propagate(lambda m, x: x / (1 + x.square().flip(-1)), "deep Taylor")


def test_relevance_of_statistic_is_refused() -> None:
    """A statistic is constant as a divisor, but has no rule as a value."""
    with pytest.raises(UnknownOperation, match="norm'"):
        propagate(lambda m, x: x + x.norm(dim=-1, keepdim=True), "deep Taylor")

"""Sums implemented as reductions of stacked values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from leading_axis import walk_back
from whyformer.rules.propagation import deep_taylor, layerwise
from whyformer.tape.program import read_program
from whyformer.tape.recording import record
from whyformer.tape.walking import GRADIENT

VARIANTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda x, y: torch.stack([x, y]).sum(0),
    "sum of the last": lambda x, y: torch.stack([x, y], -1).sum(-1),
    "mean": lambda x, y: torch.stack([x, y], 1).mean(1) * 2,
    "cumsum": lambda x, y: torch.stack([x, y]).cumsum(0)[-1],
    "constant": lambda x, y: torch.stack([x + y, torch.zeros_like(x)]).sum(0),
}
NOT_SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "the first of a cumsum": lambda x, y: torch.stack([x, y]).cumsum(0)[0],
    "three": lambda x, y: torch.stack([x, y, x]).sum(0),
}


class ResidualModel(nn.Module):
    def __init__(self, variant: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.variant, self.branch, self.head = variant, nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.variant(x, self.branch(x).tanh()))


def kinds_and_relevance(variant: Callable[[Tensor, Tensor], Tensor]) -> tuple[list[str], list[Tensor]]:
    """(kinds of the units, relevance of the input for three composites)"""
    torch.manual_seed(0)
    model, x = ResidualModel(variant).double().requires_grad_(False), torch.randn(5, 4, dtype=torch.float64)
    tape, output = record(model, x)
    program = read_program(tape, [tape.number(x)], tape.number(output))
    runs = [(c, {program.output: torch.ones_like(output)}) for c in (GRADIENT, deep_taylor(), layerwise())]
    return [u.kind for u in program.units], [f[tape.number(x)] for f in walk_back(program, tape, runs, observed=[tape.number(x)])]


@pytest.mark.parametrize("variant", VARIANTS)
def test_sum_of_stack_is_an_add_unit(variant: str) -> None:
    kinds, results = kinds_and_relevance(VARIANTS[variant])
    assert "add" in kinds
    assert "weighted sum" not in kinds
    for actual, expected in zip(results, kinds_and_relevance(torch.add)[1], strict=True):
        assert torch.allclose(actual, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("variant", NOT_SUMS)
def test_other_reductions_are_not_add_units(variant: str) -> None:
    kinds, (gradient, *_) = kinds_and_relevance(NOT_SUMS[variant])
    assert "add" not in kinds
    torch.manual_seed(0)
    model, x = ResidualModel(NOT_SUMS[variant]).double(), torch.randn(5, 4, dtype=torch.float64).requires_grad_()
    assert torch.allclose(gradient, torch.autograd.grad(model(x).sum(), x)[0])

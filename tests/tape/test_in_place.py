"""Models with in-place operations have the relevance of equivalent out-of-place models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from walked import walked
from whyformer.rules.multipliers import COMPOSITES as MULTIPLIERS
from whyformer.rules.multipliers import WITH_SECANTS
from whyformer.rules.propagation import deep_taylor, layerwise
from whyformer.tape.recording import record
from whyformer.tape.walking import GRADIENT

WIDTH, TOKENS = 6, 4
COMPOSITES = {
    "gradient": GRADIENT,
    "AH+LN": MULTIPLIERS["ah_ln"],
    "AH+LN, secant": WITH_SECANTS["ah_ln"],
    "deep Taylor": deep_taylor(),
    "epsilon": layerwise("epsilon"),
    "separate": layerwise("separate"),
}


class InPlaceTestModel(nn.Module):
    """Two linear layers and a norm, combined by the function ``case``."""

    def __init__(self, case: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)
        self.case = case
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.case(self, x)).flatten(1)


def replaced(x: Tensor, part: Any, value: Tensor | float) -> Tensor:
    """Copy of x with one part replaced."""
    copy = x.clone()
    copy[part] = value
    return copy


def _shifted_norm(m: InPlaceTestModel, x: Tensor) -> Tensor:
    y = m.norm(m.first(x))
    y += 1
    return y


def _scaled_norm_part(m: InPlaceTestModel, x: Tensor) -> Tensor:
    y = m.norm(m.first(x))
    y[..., :2] = 0.5
    y.mul_(2)
    return y


def _linear_changed_through_a_view(m: InPlaceTestModel, x: Tensor) -> Tensor:
    y = m.first(x)
    y.view(-1).mul_(2)
    y.transpose(1, 2)[:, :2].add_(1)
    return m.norm(y)


def _linear_read_then_changed(m: InPlaceTestModel, x: Tensor) -> Tensor:
    y = m.first(x)
    z = y + 0.5 * x
    y.mul_(3)
    y.mul_(2)
    return m.norm(torch.cat([z, y], 1))[:, :TOKENS]


def _activation_shifted(m: InPlaceTestModel, x: Tensor) -> Tensor:
    y = F.gelu(m.first(x))
    y += 1
    return y


def _fresh_buffer(m: InPlaceTestModel, x: Tensor) -> Tensor:
    y = m.first(x)
    buffer = torch.zeros_like(y)
    buffer[..., :3] = y[..., 3:]
    buffer[..., 3:] = y[..., :3]
    buffer *= 2
    return m.norm(buffer.view(len(x), -1).view_as(buffer))


def _view_of_a_fresh_buffer(m: InPlaceTestModel, x: Tensor) -> Tensor:
    y = m.first(x)
    buffer = y.new_zeros(y.shape)
    left, right = buffer[..., :3], buffer[..., 3:]
    left.copy_(y[..., 3:])
    right += y[..., :3]
    left.mul_(2)
    return m.norm(buffer)


def _two_halves(m: InPlaceTestModel, x: Tensor) -> Tensor:
    y = m.first(x)
    buffer = torch.empty(y.shape, dtype=y.dtype)
    for part in buffer.unbind(1):
        part.zero_()
    halves = torch.zeros(2, *y.shape, dtype=y.dtype)
    first = halves[0]
    first.add_(y)
    halves[1].copy_(first)
    return m.norm(halves.sum(0) + buffer)


def _residual_in_place(m: InPlaceTestModel, x: Tensor) -> Tensor:
    y = m.first(x)
    z = F.gelu(y)
    z += m.norm(y)
    return z


# name -> (in place, out of place); each maps (model, input) to the input of the last layer
CASES: dict[str, tuple[Callable[[InPlaceTestModel, Tensor], Tensor], Callable[[InPlaceTestModel, Tensor], Tensor]]] = {
    "norm, then +=": (_shifted_norm, lambda m, x: m.norm(m.first(x)) + 1),
    "norm, then a part": (_scaled_norm_part, lambda m, x: replaced(m.norm(m.first(x)), (..., slice(2)), 0.5) * 2),
    "linear, through views": (
        _linear_changed_through_a_view,
        lambda m, x: m.norm(torch.cat([m.first(x)[..., :2] * 2 + 1, m.first(x)[..., 2:] * 2], -1)),
    ),
    "linear, read then changed": (
        _linear_read_then_changed,
        lambda m, x: m.norm(torch.cat([m.first(x) + 0.5 * x, m.first(x) * 3 * 2], 1))[:, :TOKENS],
    ),
    "activation, then +=": (_activation_shifted, lambda m, x: F.gelu(m.first(x)) + 1),
    "fresh buffer": (_fresh_buffer, lambda m, x: m.norm(m.first(x).roll(3, -1) * 2)),
    "view of a fresh buffer": (
        _view_of_a_fresh_buffer,
        lambda m, x: m.norm(torch.cat([m.first(x)[..., 3:] * 2, m.first(x)[..., :3]], -1)),
    ),
    "two halves": (_two_halves, lambda m, x: m.norm(torch.stack([m.first(x), m.first(x)]).sum(0))),
    "residual": (_residual_in_place, lambda m, x: F.gelu(m.first(x)) + m.norm(m.first(x))),
}


def flows(case: Callable[..., Tensor], composite: str) -> tuple[Tensor, Tensor]:
    x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return walked(InPlaceTestModel(case), x, COMPOSITES[composite])


@pytest.mark.part
@pytest.mark.parametrize("composite", COMPOSITES)
@pytest.mark.parametrize("case", CASES)
def test_in_place_equals_out_of_place(case: str, composite: str) -> None:
    in_place, out_of_place = CASES[case]
    logits, result = flows(in_place, composite)
    expected_logits, expected = flows(out_of_place, composite)
    assert torch.allclose(logits, expected_logits)
    assert torch.allclose(result, expected, rtol=1e-8, atol=1e-8 * float(expected.abs().max()))
    assert result.abs().max() > 0


@pytest.mark.parametrize("exponent", [-0.5, torch.tensor(-0.5, dtype=torch.float64)])
def test_replayed_in_place_power_uses_new_operand(exponent: float | Tensor) -> None:
    x, operand = torch.rand(2, 3, 4, dtype=torch.float64), torch.rand(4, 4, dtype=torch.float64)
    tape, _ = record(lambda x: x.exp().pow_(exponent), x)
    call = tape.calls[-1]
    (result,) = call([operand, *(tape[o] for o in call.operands[1:])])
    torch.testing.assert_close(result, operand.pow(exponent))

"""Values that torch does not see are found."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whyformer
from whyformer.errors import ModelError
from whyformer.tape.checks import altered, unset
from whyformer.tape.recording import record
from zoo import ZOO


def doubled_by_address(x: Tensor) -> Tensor:
    """As a kernel of Triton does: memory from ``empty``, filled through addresses."""
    out = torch.empty(x.shape, dtype=x.dtype)
    x = x.contiguous()
    source = (ctypes.c_float * x.numel()).from_address(x.data_ptr())
    target = (ctypes.c_float * x.numel()).from_address(out.data_ptr())
    for i in range(x.numel()):
        target[i] = 2 * source[i]
    return out


class Layers(nn.Module):
    """Two layers with something in between."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.first, self.second, self.between = nn.Linear(4, 4), nn.Linear(4, 3), between

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x))).mean(1)


def through_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy() * 2)


def as_list(x: Tensor) -> Tensor:
    return torch.tensor(x.tolist())


@pytest.mark.parametrize("between", [doubled_by_address, through_numpy, as_list])
def test_values_from_nowhere_are_refused_by_name(between: Any) -> None:
    with pytest.raises(ModelError, match="outside of torch"):
        whyformer.record(Layers(between).eval(), torch.randn(2, 3, 4))


def test_constants_are_no_values_from_nowhere() -> None:
    scale = torch.rand(4)  # no buffer, but the same in every pass
    whyformer.record(Layers(lambda x: x * scale).eval(), torch.randn(2, 3, 4))
    whyformer.record(Layers(lambda x: x + torch.empty(4).fill_(2) + torch.zeros(4)).eval(), torch.randn(2, 3, 4))


def test_constants_of_a_pass_that_takes_another_way() -> None:
    """As a loop over the experts that some token chose."""

    def between(x: Tensor) -> Tensor:
        for _ in range(1 + int(x.abs().sum() * 1000) % 5):
            x = x * torch.tensor(1.5)
        return x + torch.tensor(0.5)

    for seed in range(8):
        whyformer.record(Layers(between).eval(), torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("name", ZOO)
def test_healthy_models_pass_all_checks(name: str) -> None:
    model, inputs = ZOO[name]()
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else ((inputs,), {})
    tape, _ = record(model, *args, **kwargs)
    assert not unset(tape)
    assert not altered(tape)


def test_a_model_that_was_trained_since_the_pass() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    tape, _ = record(model, x)
    assert not altered(tape)
    with torch.no_grad():
        model.weight.add_(1)
    assert altered(tape) == [tape.number(model.weight)]


def test_memory_that_is_filled_row_by_row_is_set() -> None:
    """As experts put their tokens back in order."""

    def reordered(x: Tensor) -> Tensor:
        order = torch.tensor([2, 0, 3, 1])
        out = torch.empty_like(x)
        out[order] = x
        return out * 2

    def half(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out[torch.tensor([0, 2])] = x[:2]
        return out * 2

    assert unset(record(reordered, torch.randn(4, 3))[0]) == []
    assert unset(record(half, torch.randn(4, 3))[0]) != []

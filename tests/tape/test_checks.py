"""Detection of values computed outside torch and of changed parameters."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whyformer
from whyformer.errors import ModelError
from whyformer.tape.checks import reads_of_unset
from whyformer.tape.recording import record
from zoo import ZOO


def doubled_by_address(x: Tensor) -> Tensor:
    """Like a Triton kernel: fills memory from ``empty`` through its address."""
    out = torch.empty(x.shape, dtype=x.dtype)
    x = x.contiguous()
    source = (ctypes.c_float * x.numel()).from_address(x.data_ptr())
    target = (ctypes.c_float * x.numel()).from_address(out.data_ptr())
    for i in range(x.numel()):
        target[i] = 2 * source[i]
    return out


class LayersWithFunction(nn.Module):
    """Two layers with a function between them."""

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
def test_values_computed_outside_torch_are_refused(between: Any) -> None:
    with pytest.raises(ModelError, match="outside of torch"):
        whyformer.record(LayersWithFunction(between).eval(), torch.randn(2, 3, 4))


def test_constants_are_allowed() -> None:
    scale = torch.rand(4)  # not a buffer, but equal in every pass
    whyformer.record(LayersWithFunction(lambda x: x * scale).eval(), torch.randn(2, 3, 4))
    whyformer.record(LayersWithFunction(lambda x: x + torch.empty(4).fill_(2) + torch.zeros(4)).eval(), torch.randn(2, 3, 4))


def test_constants_in_data_dependent_control_flow_are_allowed() -> None:
    """For example a loop over the experts that tokens are routed to."""

    def between(x: Tensor) -> Tensor:
        for _ in range(1 + int(x.abs().sum() * 1000) % 5):
            x = x * torch.tensor(1.5)
        return x + torch.tensor(0.5)

    for seed in range(8):
        whyformer.record(LayersWithFunction(between).eval(), torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("name", ZOO)
def test_healthy_models_pass_all_checks(name: str) -> None:
    model, inputs = ZOO[name]()
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else ((inputs,), {})
    tape, _ = record(model, *args, **kwargs)
    assert not reads_of_unset(tape)


def _indexed(out: Tensor, order: Tensor, x: Tensor) -> None:
    out[order] = x


@pytest.mark.parametrize(
    "write",
    [
        _indexed,
        lambda out, order, x: out.index_copy_(0, order, x),
        lambda out, order, x: out.scatter_(0, order[:, None].expand(-1, 3), x),
    ],
    ids=["index_put", "index_copy", "scatter"],
)
def test_memory_filled_by_index_is_set(write: Callable[[Tensor, Tensor, Tensor], object]) -> None:
    """As experts write their tokens back in the original order, and as Reformer undoes the sorting of its buckets."""

    def filled(x: Tensor, order: Tensor) -> Tensor:
        out = torch.empty_like(x)
        write(out, order, x[: len(order)])
        return out * 2

    x = torch.randn(4, 3)
    assert reads_of_unset(record(filled, x, torch.tensor([2, 0, 3, 1]))[0]) == []
    assert reads_of_unset(record(filled, x, torch.tensor([0, 2]))[0]) != []
    assert reads_of_unset(record(filled, x, torch.tensor([0, 2, 2, 0]))[0]) != []

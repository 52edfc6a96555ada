"""A pass as it is written down: the calls, the values, what carries and what is a weight."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whyformer.program.calls import inside
from whyformer.program.dominators import START, chain, dominators
from whyformer.program.record import Program, Recorder, some_rows


class Written(nn.Module):
    def __init__(self, function: Callable[[Written, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.arange(9.0).reshape(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def read(function: Callable[[Written, Tensor], Tensor], x: Tensor | None = None) -> Program:
    model, x = Written(function), torch.randn(2, 4, 3) if x is None else x
    recorder = Recorder(model)
    recorder.begin(0, x, carries=x.is_floating_point())
    with inside(recorder), recorder:
        output = model(x)
    return recorder.finish((output,))


def test_calls_stand_in_order_with_what_they_read() -> None:
    program = read(lambda m, x: F.linear(x, m.weight).relu() + 1)
    assert [c.name for c in program.calls] == ["linear", "relu", "add"]
    first, second, third = program.calls
    assert second.operands == first.results
    assert third.operands == second.results
    assert program.outputs == list(third.results)
    assert all(program.values[c.results[0]].carries for c in program.calls)


def test_what_is_made_of_weights_alone() -> None:
    program = read(lambda m, x: x @ (2 * m.weight.detach()).T)
    made = {c.name: program.values[c.results[0]] for c in program.calls}
    assert made["mul"].weight
    assert not made["mul"].carries
    assert made["matmul"].carries
    assert not made["matmul"].weight


def test_a_detached_branch_carries_nothing() -> None:
    def function(m: Written, x: Tensor) -> Tensor:
        with torch.no_grad():
            size = x.abs().amax()
        return x.detach() * 2 + x / size

    program = read(function)
    carried = [c.name for c in program.calls if program.values[c.results[0]].carries]
    assert carried == ["div", "add"]


def test_what_is_written_through_a_view_changes_the_whole() -> None:
    def function(m: Written, x: Tensor) -> Tensor:
        whole = torch.zeros(2, 4, 3)
        whole[:, 1].copy_(x[:, 0])
        return whole * 2

    program = read(function)
    last = program.calls[-1]
    assert last.name == "mul"
    assert program.values[last.operands[0]].carries


def test_values_are_kept_as_they_were() -> None:
    x = torch.randn(2, 4, 3)
    program = read(lambda m, x: (x * 1).mul_(0) + x, x)
    first = program.values[program.calls[0].results[0]]
    assert torch.equal(first.rows[-1], x)


def test_ids_begin_to_carry_where_they_are_looked_up() -> None:
    program = read(lambda m, x: F.embedding(x, m.weight) + m.weight[0], torch.tensor([[0, 2, 1]]))
    assert [program.values[c.results[0]].carries for c in program.calls if c.name in ("embedding", "add")] == [
        True,
        True,
    ]


def test_of_a_large_value_a_few_rows_along_each_axis() -> None:
    x = torch.randn(3, 40, 50)
    rows = some_rows(x)
    assert {axis: t.shape[axis] for axis, t in rows.items()} == {0: 3, 1: 40, 2: 50}
    assert sum(t.numel() for t in rows.values()) < x.numel() / 4


def test_dominators() -> None:
    """x → a → (b, c) → d: all paths to d run through a, none of b and c."""
    program = read(lambda m, x: (a := x * 2).relu() + a.tanh())
    (x,) = program.inputs.values()
    a, b, c, d = (call.results[0] for call in program.calls)
    assert dominators(program) == {x: START, a: x, b: a, c: a, d: a}
    assert chain(program, d) == [x, a, d]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_pass_is_the_models_own(dtype: torch.dtype) -> None:
    x = torch.randn(2, 4, 3, dtype=dtype)
    model = Written(lambda m, x: (x @ m.weight.to(x.dtype)).softmax(-1)).eval()
    recorder = Recorder(model)
    recorder.begin(0, x, carries=True)
    with inside(recorder), recorder:
        found = model(x)
    assert torch.equal(found, model(x))
    assert not found.requires_grad

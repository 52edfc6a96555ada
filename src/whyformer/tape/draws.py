"""Random values in the place of those from outside a region, and calls that are repeated on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from whyformer.tape.calls import Call
from whyformer.tape.values import Tape

__all__ = ["Draws", "repeat", "wide"]

_FEW = 6


@dataclass(eq=False)
class Draws:
    """Random float64 values in the place of values from outside a region: weights, masks, whatever the model was given.
    What calls compute from nothing, such as a causal mask, is a constant of the program and stays.

    Attributes:
        tape: the pass.
        fixed: for each value, whether it is computed from nothing.
        repeats: number of a value -> the calls that only repeat another one, if it is made so.
        short: axes of which few elements are drawn, counted from the last.
    """

    tape: Tape
    fixed: Sequence[bool]
    repeats: Callable[[int], list[Call]]
    short: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.values: dict[int, Tensor] = {}
        self.random = torch.Generator().manual_seed(0)

    def shape(self, n: int) -> tuple[int, ...]:
        """The shape of value ``n`` with short axes."""
        shape = self.tape.shapes[n]
        return tuple(min(size, _FEW) if i - len(shape) in self.short else size for i, size in enumerate(shape))

    def __getitem__(self, n: int) -> Tensor:
        if n not in self.values:
            self.values[n] = self.draw(n)
        return self.values[n]

    def draw(self, n: int) -> Tensor:
        tape, shape = self.tape, self.shape(n)
        if self.fixed[n]:
            return wide(tape[n][tuple(map(slice, shape))])
        views = self.repeats(n)
        if views:
            t = self[views[0].operands[0]]
            for call in views:
                t = t.expand(shape) if self.short else repeat(call, tape, [t])[0]
            return t
        if tape.dtypes[n] == torch.bool:
            return torch.rand(shape, generator=self.random) < 0.5
        if not tape.floating(n):  # a mask, or a number
            if tape.shapes[n].numel() == 1:
                return tape[n].cpu()
            return (torch.rand(shape, generator=self.random) < 0.75).to(tape.dtypes[n])
        if math.prod(shape) == 1:  # a number, such as what masked scores are filled with: of its size, but another
            return wide(tape[n]) * self.uniform((), 0.5)
        noise = self.normal(shape)
        return noise + noise.sign()

    def normal(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(shape, generator=self.random, dtype=torch.float64)

    def uniform(self, shape: Sequence[int], low: float) -> Tensor:
        return low + torch.rand(shape, generator=self.random, dtype=torch.float64)


def repeat(call: Call, tape: Tape, operands: list[Tensor]) -> list[Tensor]:
    """Repeat a call in float64, casts between floating types left out."""
    if call.name == "_to_copy" and tape.floating(call.results[0]):
        return [operands[0].double()]
    if call.name in ("_softmax", "_log_softmax"):  # the third argument asks for float32 of half precision
        return [call.operator(operands[0], call.args[1], False)]
    dtype = call.kwargs.get("dtype")
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        call = replace(call, kwargs={**call.kwargs, "dtype": torch.float64})
    return [wide(t) for t in call(operands)]


def wide(t: Tensor) -> Tensor:
    return t.double().cpu() if t.is_floating_point() else t.cpu()

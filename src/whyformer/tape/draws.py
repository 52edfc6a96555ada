"""Random substitutes for the values that a region reads, and repetition of calls on them."""

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
    """Random float64 substitutes for values from outside a region, such as weights and masks. Values that depend on no
    leaf, such as a causal mask, are constants of the program and are not replaced.

    Attributes:
        tape: the pass.
        fixed: for each value, whether it depends on no leaf.
        repeats: maps a value to the views that expand a smaller value to it; empty if there are none.
        short: (negative) axes of which few elements are drawn.
    """

    tape: Tape
    fixed: Sequence[bool]
    repeats: Callable[[int], list[Call]]
    short: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.values: dict[int, Tensor] = {}
        self.random = torch.Generator().manual_seed(0)

    def shape(self, n: int) -> tuple[int, ...]:
        """Return the shape of the substitute for value ``n``."""
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
        if not tape.floating(n):  # a mask of integers, or a scalar
            if tape.shapes[n].numel() == 1:
                return tape[n].cpu()
            return (torch.rand(shape, generator=self.random) < 0.75).to(tape.dtypes[n])
        if math.prod(shape) == 1:  # a scalar, such as the fill value of masked scores: keep its order of magnitude
            return wide(tape[n]) * self.uniform((), 0.5)
        noise = self.normal(shape)
        return noise + noise.sign()

    def normal(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(shape, generator=self.random, dtype=torch.float64)

    def uniform(self, shape: Sequence[int], low: float) -> Tensor:
        return low + torch.rand(shape, generator=self.random, dtype=torch.float64)


def repeat(call: Call, tape: Tape, operands: list[Tensor]) -> list[Tensor]:
    """Repeat a call in float64, without casts to other floating-point dtypes."""
    if call.name == "_to_copy" and tape.floating(call.results[0]):
        return [operands[0].double()]
    if call.name in ("_softmax", "_log_softmax"):  # the third argument requests float32 results for half precision
        return [call.operator(operands[0], call.args[1], False)]
    dtype = call.kwargs.get("dtype")
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        call = replace(call, kwargs={**call.kwargs, "dtype": torch.float64})
    return [wide(t) for t in call(operands)]


def wide(t: Tensor) -> Tensor:
    """Return a tensor on the CPU, in float64 if it is floating-point."""
    return t.double().cpu() if t.is_floating_point() else t.cpu()

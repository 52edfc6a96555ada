"""Backward walks over functions of ``[B, ...]`` whose inputs have no known rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from whyformer.tape import walking
from whyformer.tape.program import Program
from whyformer.tape.values import Tape


@dataclass(frozen=True)
class LeadingAxis:
    """Samples along the first axis of every value, whose size is B or a multiple of B, ``[B · rest, ...]``."""

    batch: int

    def sums(self, value: int, flow: Tensor) -> Tensor:
        return flow.reshape(self.batch, -1).sum(-1)

    def spread(self, value: int, numbers: Tensor, flow: Tensor) -> Tensor:
        return numbers.repeat_interleave(flow.shape[0] // self.batch).reshape(-1, *(1,) * (flow.dim() - 1))

    def ranges(self, value: int, tensor: Tensor) -> tuple[Tensor, Tensor]:
        count = self.batch if len(tensor) % self.batch == 0 else len(tensor)
        low, high = tensor.reshape(count, -1).aminmax(dim=1)
        each = LeadingAxis(count)
        return each.spread(value, low, tensor).expand_as(tensor), each.spread(value, high, tensor).expand_as(tensor)

    def is_shared(self, value: int, shape: Sequence[int]) -> bool:
        return len(shape) < 2 or shape[-2] == 1


def walk_back(program: Program, tape: Tape, runs: Any, **options: Any) -> Any:
    """Walk back from an output whose first axis is the sample axis."""
    samples: Any = LeadingAxis(tape.shapes[program.output][0] if tape.shapes[program.output] else 1)
    return walking.walk_back(program, tape, runs, samples=samples, **options)

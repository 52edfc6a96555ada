"""Sums over the samples of a batch, for rules that normalise relevance within each sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Samples(Protocol):
    """Which elements of a value belong to which sample."""

    def sums(self, value: int, flow: Tensor) -> Tensor:
        """Return ``[B]``, the sums of a flow at a value over each sample."""

    def spread(self, value: int, numbers: Tensor, flow: Tensor) -> Tensor:
        """Return one number for each sample, in a shape that broadcasts to that of a flow at a value."""

    def ranges(self, value: int, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smallest and the largest element of each sample of a value, in its shape."""

    def is_shared(self, value: int, shape: Sequence[int]) -> bool:
        """Return True if a constant of that shape, added to a value, is known to be the same for all of its rows."""


@dataclass(frozen=True)
class LeadingAxis:
    """Samples along the first axis of every value, whose size is B or a multiple of it, ``[B · rest, ...]``."""

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

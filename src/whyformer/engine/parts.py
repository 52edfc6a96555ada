"""The shares of one tensor, and how a bias is shared out among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Maker = Callable[[int], Tensor]


@dataclass(eq=False)
class Parts:
    """The shares of one tensor, computed when they are asked for, a few tokens j at a time.

    Attributes:
        make: number of a chunk -> ``[j, *shape]`` shares without the bias.
        chunks: the rows j of each chunk.
        real: ``[B, N]`` which rows j are no padding.
        bias: what belongs to no share yet, or None; shared out by |⟨x_i←j, b⟩| (``absdot``), equally where that is zero
            for all j.
        late: the bias is one of attention, which is shared out behind the residual sum.
        alone: every row is still one token's alone.
        kept: chunks computed, None where they are too large to keep.
        shown: of a view, the shares of what it shows, in which the bias was shared out; None elsewhere.
    """

    make: Maker
    chunks: Sequence[slice]
    real: Tensor
    bias: Callable[[], Tensor] | None = None
    late: bool = False
    alone: bool = False
    kept: dict[int, Tensor] | None = None
    shown: Maker | None = None
    _weights: Tensor | None = None

    def at(self, chunk: int) -> Tensor:
        """``[j, *shape]`` the shares of one chunk of rows j."""
        if self.shown is not None:
            return self.shown(chunk)
        bias = self.remainder()
        if bias is None:
            return self.raw(chunk)
        if self._weights is None:
            sizes = torch.cat([(self.raw(c) * bias).sum(-1).abs() for c in range(len(self.chunks))])
            total = sizes.sum(0)
            self._weights = torch.where(total > 0, sizes / torch.where(total > 0, total, 1), self._equal(sizes))
        return self.raw(chunk) + self._weights[self.chunks[chunk], ..., None] * bias

    def raw(self, chunk: int) -> Tensor:
        """The same without the bias."""
        if self.kept is None:
            return self.make(chunk)
        if chunk not in self.kept:
            self.kept[chunk] = self.make(chunk)
        return self.kept[chunk]

    def remainder(self) -> Tensor | None:
        """The bias, or None where it is zero."""
        if self.bias is None:
            return None
        value = self.bias()
        self.bias = (lambda: value) if bool(value.any()) else None
        return None if self.bias is None else value

    def settle(self) -> None:
        """Compute all shares now, and let go of what they were made from."""
        self.kept = {chunk: self.at(chunk) for chunk in range(len(self.chunks))}
        self.make, self.bias, self._weights, self.shown = self.kept.__getitem__, None, None, None

    def _equal(self, sizes: Tensor) -> Tensor:
        """The same weight for every row j that is no padding."""
        known = sizes.dim() > 1 and sizes.shape[1] == len(self.real)
        rows = self.real.T.to(sizes) if known else torch.ones_like(sizes[:, :1] if sizes.dim() > 1 else sizes)
        rows = rows / rows.sum(0)
        return rows.reshape(*rows.shape, *[1] * (sizes.dim() - rows.dim()))


class Lost(Exception):  # noqa: N818 - told as a refusal by the method
    """An operation through which a share cannot be followed."""


@contextmanager
def unlabelled() -> Iterator[None]:
    """What autograd saves are aliases without shares, which would otherwise live as long as the graph."""

    def alias(tensor: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return tensor.data  # what detach gives knows the tensor that it is a view of

    with torch.autograd.graph.saved_tensors_hooks(alias, lambda saved: saved):
        yield


def parts_of(value: Any) -> Any:
    """The :class:`Parts` of a tensor, or None."""
    return getattr(value, "_whyformer_parts", None)

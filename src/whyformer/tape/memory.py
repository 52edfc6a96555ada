"""Memory of tensors: which views lie where, and what they hold after a write through another view."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Geometry", "elements", "geometry", "memory", "overlay", "restride"]

Geometry = tuple[torch.Size, tuple[int, ...], int]


def memory(t: Tensor) -> int:
    """Identity of the memory a tensor lies in; sparse and old nested tensors have memory of several tensors."""
    return t.untyped_storage()._cdata if t.layout is torch.strided and not t.is_nested else -id(t)


def geometry(t: Tensor) -> Geometry:
    return t.size(), t.stride(), int(t.storage_offset())


def elements(t: Tensor) -> int:
    return t.untyped_storage().nbytes() // t.element_size()


# no closures that name themselves and none over tensors: they would keep operands alive until the garbage collector
# runs
def overlay(own: Geometry, writes: list[Geometry], size: int) -> Callable[..., Tensor]:
    """(view before, what was written, in order) -> view now, where all of them lie in one storage of ``size``
    elements."""

    def written_over(old: Tensor, *new: Tensor) -> Tensor:
        room = old.new_zeros(size)
        room.as_strided(*own).copy_(old)
        for place, written in zip(writes, new, strict=True):
            room.as_strided(*place).copy_(written.to(old.dtype))
        return room.as_strided(*own).clone()

    return written_over


def restride(source: Tensor) -> Callable[..., Tensor]:
    """``as_strided`` on operands that may lie otherwise in memory than the recorded one."""
    own, size_of_memory = geometry(source), elements(source)

    def as_strided(t: Tensor, size: Any, stride: Any, storage_offset: Any = None) -> Tensor:
        room = t.new_zeros(size_of_memory)
        room.as_strided(*own).copy_(t)
        return room.as_strided(size, stride, own[2] if storage_offset is None else storage_offset)

    return as_strided

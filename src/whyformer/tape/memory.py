"""Memory of tensors: the positions of views, and their content after a write through another view."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Geometry", "geometry", "memory", "overlay", "restride", "storage_size"]

Geometry = tuple[torch.Size, tuple[int, ...], int]


def memory(t: Tensor) -> int:
    """Return an identifier of the storage of a tensor; a unique one for sparse and nested tensors, which have several
    storages."""
    return t.untyped_storage()._cdata if t.layout is torch.strided and not t.is_nested else -id(t)


def geometry(t: Tensor) -> Geometry:
    """Return the shape, the strides and the offset of a tensor in its storage."""
    return t.size(), t.stride(), int(t.storage_offset())


def storage_size(t: Tensor) -> int:
    """Return the number of elements of the storage of a tensor."""
    return t.untyped_storage().nbytes() // t.element_size()


# the closures below must not refer to tensors or to themselves, which would keep operands alive until the garbage
# collector runs
def overlay(view: Geometry, writes: list[Geometry], size: int) -> Callable[..., Tensor]:
    """Return a function that computes the content of a view after writes into its storage through other tensors.

    Args:
        view: geometry of the view.
        writes: geometries of the written tensors, in order.
        size: number of elements of the storage.

    Returns:
        A function of the old content of the view and the written tensors, in order.
    """

    def written_over(old: Tensor, *new: Tensor) -> Tensor:
        storage = old.new_zeros(size)
        storage.as_strided(*view).copy_(old)
        for place, source in zip(writes, new, strict=True):
            storage.as_strided(*place).copy_(source.to(old.dtype))
        return storage.as_strided(*view).clone()

    return written_over


def restride(source: Tensor) -> Callable[..., Tensor]:
    """Return ``as_strided`` for operands whose memory layout may differ from that of the recorded operand."""
    view, size_of_storage = geometry(source), storage_size(source)

    def as_strided(t: Tensor, size: Any, stride: Any, storage_offset: Any = None) -> Tensor:
        storage = t.new_zeros(size_of_storage)
        storage.as_strided(*view).copy_(t)
        return storage.as_strided(size, stride, view[2] if storage_offset is None else storage_offset)

    return as_strided

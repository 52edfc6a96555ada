"""Calls that rearrange elements, applied to row numbers (:mod:`whyformer.tape.labelling`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from whyformer.tape.calls import Call
from whyformer.tape.rows import Label, constant_along, slim, thin
from whyformer.tape.tables import name_set
from whyformer.tape.values import Tape

__all__ = ["along_features", "holds_rows", "is_crossed", "padded", "pools", "rearranged", "window"]

_FLOATS = name_set("im2col reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d")  # no integer kernel
_PLACED: dict[str, Callable[..., Tensor]] = {"index_add": torch.index_copy, "scatter_add": torch.scatter}


def along_features(call: Call, labels: list[Label]) -> bool:
    """Return True if ``cat`` or ``stack`` joins features, not rows."""
    axis = call.argument("dim", 0)
    return all(k[0].dim() > 0 and k[0].shape[axis] > 1 and constant_along(k[0], axis) for k in labels if k)


def rearranged(call: Call, numbers: list[Tensor]) -> list[Tensor]:
    """Repeat a call that rearranges elements on row numbers."""
    if call.name in _PLACED:  # assumes that rows are added to zeros
        return [_PLACED[call.name](numbers[0], call.argument("dim", 0), *numbers[1:])]
    if call.name == "constant_pad_nd":
        return [torch.nn.functional.pad(numbers[0], call.args[1], value=0)]
    if call.name == "scatter" and len(numbers) == 2:  # scatters a constant, which has no row
        return [numbers[0].scatter(call.argument("dim", 0), numbers[1], 0)]
    if call.name in _FLOATS:
        return [t.long() for t in call([t.double() for t in numbers])]
    return call(numbers)


def padded(label: Tensor, before: Tensor) -> Tensor:
    """Return the label of a padded value, from its label in which padding is no row, and the label of the operand:
    padding along an axis of features belongs to the rows beside it."""
    axes = [a for a, n in enumerate(before.shape) if 1 < n != label.shape[a] and constant_along(before, a)]
    return label.amax(axes, keepdim=True).expand(label.shape) if axes else label


def window(tape: Tape, call: Call) -> tuple[Any, ...]:
    """Return what determines the positions of the windows of a convolution or a pool, besides its operand: the stride
    and the centre of the first window along each axis; the call itself if unknown."""
    weight = call.operand("weight")
    if weight is None or call.argument("transposed", False):
        return (call.number,)
    kernel = tape.shapes[weight][2:]
    arguments = (call.argument(name) for name in ("stride", "dilation", "padding"))
    stride, dilation, padding = (tuple(n) if len(n) > 1 else (*n,) * len(kernel) for n in arguments)
    return (*stride, *(d * (k - 1) / 2 - p for d, k, p in zip(dilation, kernel, padding, strict=True)))


def holds_rows(label: Tensor) -> bool:
    """Return False for a label that consists only of padding."""
    return bool(thin(label).any())


def pools(label: Tensor, axis: int) -> bool:
    """Return True if each index along an axis is another row, with features along another axis. A product with a
    constant matrix along this axis then creates a row for each of its outputs. If rows lie along the axis together with
    their features, it creates one row."""
    axes = [a - label.dim() for a in range(label.dim()) if a - label.dim() != axis]
    features = any(label.shape[a] > 1 and constant_along(label, a) for a in axes)
    numbers = slim(label).movedim(axis, -1)
    return features and bool((numbers.sort(-1).values.diff(dim=-1) != 0).all())


def is_crossed(a: Tensor, b: Tensor) -> bool:
    """Return True if each of two labels changes along an axis along which the other is constant, as in a map."""
    moves = [(not constant_along(a, axis), not constant_along(b, axis)) for axis in range(a.dim())]
    return (True, False) in moves and (False, True) in moves

"""Row numbers (:mod:`whyformer.tape.labelling`) of calls that rearrange or multiply elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from whyformer.tape.calls import Call
from whyformer.tape.rows import Label, constant_along, equal, first_places, slim, thin
from whyformer.tape.tables import name_set
from whyformer.tape.values import Tape

__all__ = [
    "along_features",
    "complex_view",
    "first_with_equal_rows",
    "holds_rows",
    "is_crossed",
    "padded",
    "pools",
    "preserved_rows",
    "rearranged",
    "sorted_features",
    "window",
]

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


def sorted_features(call: Call, label: Label, shape: torch.Size) -> Label:
    """Return the label of a sort: sorted features of a row belong to the same row; () for sorted rows."""
    axis = call.argument("dim", -1)
    of_features = all(constant_along(t, axis) for t in label)
    return tuple(t.narrow(axis, 0, 1).expand(shape) for t in label) if of_features else ()


def complex_view(call: Call, label: Label, shape: torch.Size) -> Label:
    """Return the label of a call between real and complex values."""
    if call.name == "view_as_complex":
        return tuple(t.select(-1, 0) for t in label)
    return tuple((t.unsqueeze(-1) if call.name == "view_as_real" else t).expand(shape) for t in label)


def padded(label: Tensor, before: Tensor) -> Tensor:
    """Return the label of a padded value, from its label in which padding is no row, and the label of the operand:
    padding along an axis of features belongs to the rows beside it."""
    axes = [a for a, n in enumerate(before.shape) if 1 < n != label.shape[a] and constant_along(before, a)]
    return label.amax(axes, keepdim=True).expand(label.shape) if axes else label


def first_with_equal_rows(label: Tensor, axis: int) -> Tensor:
    """Return, with size 1 along an axis, for each position along the other axes the number of the first position with
    the same rows along this axis; its own number if it has no rows."""
    lines = label.movedim(axis, -1)
    flat = lines.reshape(-1, lines.shape[-1])
    sets, inverse = flat.unique(dim=0, return_inverse=True)
    place = torch.where(flat.any(1), first_places(inverse, len(sets))[inverse], torch.arange(len(flat)))
    return place.view(lines.shape[:-1]).unsqueeze(axis)


def window(tape: Tape, call: Call) -> tuple[Any, ...]:
    """Return a key that is equal for convolutions or pools whose windows have equal positions on equal operands: the
    stride and the centre of the first window along each axis; the number of the call if unknown."""
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


def preserved_rows(a: Label, b: Label, shape: torch.Size) -> Label:
    """Return the rows that a product a @ b has from its factors: those of labels that do not change along the summed
    axis. () if it sums over all of them."""
    preserved = list[Tensor]()
    for numbers, axis, label, other in [*((t, -1, a, b) for t in a), *((t, max(-2, -t.dim()), b, a) for t in b)]:
        if not constant_along(numbers, axis) or (len(label) == 2 and _is_only_key(numbers, axis, other, shape)):
            continue  # it is summed
        row = _without(numbers, axis, shape)
        if not any(equal(row, t) for t in preserved):
            preserved.append(row)
    if len(preserved) == 2 and a and b:  # the product of a row with a matrix of its sample belongs to the row
        moving = [t for t, axis in zip(preserved, (-2, -1), strict=True) if _may_hold_rows(t, axis)]
        preserved = moving or preserved
    return tuple(preserved)


def _without(label: Tensor, axis: int, shape: torch.Size) -> Tensor:
    """Return a label at the first index along the summed axis of a product, in the shape of the product."""
    first = label.narrow(axis, 0, 1)
    return (first if label.dim() <= len(shape) else first.squeeze(axis)).expand(shape)


def _is_only_key(label: Tensor, axis: int, other: Label, shape: torch.Size) -> bool:
    """Return True if a label of a map A is that of its only key, because V in the product A V has the same row."""
    row, keys = _without(label, axis, shape), (_without(t, -3 - axis, shape) for t in other)
    return label.shape[axis] == 1 and any(equal(row, key) for key in keys)


def _may_hold_rows(label: Tensor, axis: int) -> bool:
    """Return True if an axis of a product may hold rows, and not the features of a single row."""
    return label.dim() < -axis or label.shape[axis] == 1 or not constant_along(label, axis)

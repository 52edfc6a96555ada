"""The row of an input to which each element of a value belongs.

    rows = find_rows(tape, [Source("input_ids", tape.number(ids))])    # labelling.py
    rows.labels[n]     # the row number of each element of value n

A row is a token, a patch or a pixel. Every row has a number, and the calls of the tape are applied to these numbers
instead of the values: views rearrange them, elementwise calls and products over features keep them, products over rows
drop them. An attention map then has two labels: the rows of its queries and the rows of its keys. The axes of samples,
heads, queries and keys of a value are derived from the labels and never guessed from its shape.

A value whose rows are unknown has no label. Labels have stride 0 along axes of features and are on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from whyformer.errors import ModelError

__all__ = [
    "Label",
    "RowFamily",
    "RowSamples",
    "Rows",
    "Source",
    "constant_along",
    "equal",
    "first_places",
    "no_rows",
    "occurrences",
    "positions",
    "slim",
    "thin",
]

Result = TypeVar("Result")
Label = tuple[Tensor, ...]
"""Row numbers in the shape of a value: one tensor, or two for a map (rows of queries and of keys, in either order)."""


# -- labels ----------------------------------------------------------------------------------------------------------
def constant_along(label: Tensor, axis: int) -> bool:
    """Return True if row numbers do not change along an axis."""
    if label.shape[axis] < 2 or label.stride(axis) == 0:
        return True
    label = thin(label)
    return bool((label == label.narrow(axis, 0, 1)).all())


def thin(label: Tensor, axes: Iterable[int] = ()) -> Tensor:
    """Return row numbers with size 1 along axes of stride 0, and along ``axes``."""
    for axis in range(label.dim()):
        if label.shape[axis] > 1 and (label.stride(axis) == 0 or axis in axes):
            label = label.narrow(axis, 0, 1)
    return label


def slim(label: Tensor) -> Tensor:
    """Return row numbers with size 1 along all axes along which they do not change."""
    label = thin(label)
    return thin(label, [a for a in range(label.dim()) if constant_along(label, a)])


def equal(a: Tensor, b: Tensor) -> bool:
    """Return True if two labels of the same shape are equal."""
    if (a.data_ptr(), a.stride()) == (b.data_ptr(), b.stride()):
        return True
    for axis in range(a.dim()):
        if a.stride(axis) == b.stride(axis) == 0:
            a, b = a.narrow(axis, 0, 1), b.narrow(axis, 0, 1)
    return torch.equal(a, b)


def first_places(numbers: Tensor, count: int) -> Tensor:
    """Return ``[count]``, the position of the first occurrence of each of the numbers 0 to count − 1."""
    places = torch.arange(len(numbers))
    return torch.full((count,), len(numbers)).scatter_reduce_(0, numbers, places, "amin")


def positions(rows: Tensor, count: int) -> Tensor:
    """Return ``[R]``, the position of each of ``count`` rows in ``[B, N]``; N for absent rows."""
    n = rows.shape[1]
    return torch.full((count,), n).scatter_(0, rows.flatten(), torch.arange(n).expand(len(rows), -1).flatten())


def occurrences(numbers: Tensor) -> Tensor:
    """Return how often each number has occurred before: 7 7 5 7 -> 0 1 0 2."""
    order = numbers.argsort(stable=True)
    before = torch.arange(len(numbers)) - torch.searchsorted(numbers[order], numbers[order])
    return torch.empty_like(numbers).scatter_(0, order, before)


def no_rows(shape: Sequence[int]) -> Tensor:
    """Return a label without rows: number 0 for each element of a shape."""
    return torch.zeros((), dtype=torch.long).expand(shape)


def _sums(flow: Tensor, groups: Tensor, count: int) -> Tensor:
    """Return ``[count]``, the sums of a flow over the elements of each group. ``groups`` has the number of the group of
    each element, with size 1 along axes along which it does not change."""
    axes = [a for a, n in enumerate(groups.shape) if n == 1 != flow.shape[a]]
    flow = flow.sum(axes, keepdim=True) if axes else flow
    return flow.new_zeros(count).index_add_(0, groups.flatten().to(flow.device), flow.flatten())


# -- sources, families, rows -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Source:
    """An input whose rows are followed.

    Attributes:
        name: name of the input.
        value: its number on the tape.
        features: the axis of the features of a row; None if each element is a row, as for token ids.
        samples: the sample of each entry along the first axis, if it holds packed rows or heads of several samples; the
            sample of each entry along the first two axes, if several texts of a sample count as samples; None if the
            first axis is the batch axis.
        is_map: True if the source is not an input but the map ``[B, H, N, N]`` or ``[B·H, N, N]`` of an attention among
            N learned vectors.
    """

    name: str
    value: int
    features: int | None = None
    samples: tuple[int, ...] | None = None
    is_map: bool = False


@dataclass(frozen=True, eq=False)
class RowFamily:
    """Rows that begin in the same value.

    Attributes:
        source: name of the input from which they are computed; "" for constants such as a class token. If the same ids
            are looked up a second time in another order (shifted by one, for a decoder), the name gets a prime.
        value: number of the value in which they begin.
        numbers: ``[B, M]``, the rows of each sample; ``[M]`` if the samples have different numbers of rows.
        grid: shape of the grid that the M rows of a sample form.
        elements: for rows that are looked up by ids, ``[B, M]``, the element of the input that each row represents; −1
            for ids that the model inserted, such as a start token. None for other rows.
    """

    source: str
    value: int
    numbers: Tensor
    grid: tuple[int, ...]
    elements: Tensor | None = None


@dataclass(eq=False)
class Rows:
    """The rows of a pass, numbered from 1. Number 0 is no row, such as padding that the model adds.

    Attributes:
        labels: maps a value to the row number of each of its elements.
        sample: ``[R]``, sample of each row.
        families: all families, in the order of execution; the first is a placeholder for row 0.
        family: ``[R]``, index of the family of each row.
        joined: maps a family to another one with which a call such as ``cat`` joins it in one value.
        blended: values whose elements depend on several rows of a family; the label holds one of these.
        indices: integer and boolean values on which the positions of rows depend.
        repeats: maps an input to the values in which the same ids are looked up again, in other tables.
    """

    labels: dict[int, Label] = field(default_factory=dict)
    sample: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.long))
    families: list[RowFamily] = field(default_factory=lambda: [RowFamily("", -1, torch.zeros(1, 0).long(), ())])
    family: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.long))
    joined: dict[int, int] = field(default_factory=dict)
    blended: set[int] = field(default_factory=set)
    indices: dict[int, Tensor] = field(default_factory=dict)
    repeats: dict[str, list[int]] = field(default_factory=dict)
    _results: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.sample)

    def once(self, key: Any, compute: Callable[[], Result]) -> Result:
        """Return a result that is derived from these rows and computed at its first use."""
        if key not in self._results:
            self._results[key] = compute()
        result: Result = self._results[key]
        return result

    @property
    def roots(self) -> dict[str, int]:
        """Maps an input to the value in which its rows begin: the input itself, or the embeddings of its ids."""
        values: dict[str, int] = {}
        for family in self.families[1:]:
            if family.source:
                values.setdefault(family.source, family.value)
        return values

    def linked(self, family: int) -> int:
        """Return a number that is equal for families whose rows are joined in some value."""
        while family in self.joined:
            family = self.joined[family]
        return family

    def source_of(self, label: Tensor) -> str:
        """Return the name of the input from which the rows of a label are computed, that of the latest rows if there
        are several; "" if all are constants."""
        names = [self.families[f].source for f in self.family[self.distinct(label)].unique().tolist()]
        return next(filter(None, reversed(names)), "")

    def distinct(self, label: Tensor) -> Tensor:
        """Return the row numbers of a label in ascending order, without 0."""

        def distinct() -> tuple[Tensor, Tensor]:
            numbers = thin(label).unique()
            return numbers[numbers > 0], label  # keeps the label alive, so that its address stays unique

        return self.once((label.data_ptr(), label.shape, label.stride()), distinct)[0]

    def of(self, value: int) -> Tensor:
        """Return the row number of each element of a value that is not a map.

        Raises:
            ModelError: the rows of the value are unknown.
        """
        label = self.labels.get(value, ())
        if len(label) != 1:
            raise ModelError(f"the rows of value {value} are unknown")
        return label[0]

    def sums(self, value: int, flow: Tensor) -> Tensor:
        """Return ``[R]``, the sums of a flow at a value over the features of each row."""
        return _sums(flow, slim(self.of(value)), len(self))

    def features(self, value: int, tensor: Tensor, numbers: Tensor) -> Tensor:
        """Return ``[B, N, ...]``, the features of some rows; zeros for rows that the value does not hold.

        Args:
            value: number of a value that is not a map.
            tensor: a tensor of its shape, such as a flow.
            numbers: ``[B, N]`` row numbers.

        Raises:
            ModelError: the rows of the value are unknown.
        """
        flat, place, _ = self._places(value, tensor, numbers)
        if torch.equal(place.flatten(), torch.arange(len(flat))):
            return flat.unflatten(0, place.shape)
        places = place.to(flat.device)
        features = flat[places.clamp(max=len(flat) - 1)]
        return features.masked_fill((places == len(flat)).view(*places.shape, *(1,) * (flat.dim() - 1)), 0)

    def with_features(self, value: int, tensor: Tensor, numbers: Tensor, features: Tensor) -> Tensor:
        """Return a copy of ``tensor`` in which the features of some rows are replaced by ``features``, in the layout of
        :meth:`features`."""
        flat, place, axes = self._places(value, tensor, numbers)
        flat, places = flat.clone(), place.to(flat.device)
        present = places < len(flat)
        flat[places[present]] = features.to(flat)[present]
        back = sorted(range(len(axes)), key=axes.__getitem__)
        return flat.reshape([tensor.shape[a] for a in axes]).permute(back).contiguous()

    def _places(self, value: int, tensor: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor, list[int]]:
        """Return (``[M, ...]``, the tensor with an axis of its M rows first; the position of each of ``numbers`` among
        these rows, M if absent; the permutation of the axes of the tensor)."""
        label = slim(self.of(value))
        rows = [a for a, n in enumerate(label.shape) if n > 1]
        rest = [a for a in range(label.dim()) if a not in rows]
        axes, count = [*rows, *rest], label.numel()
        sizes = [tensor.shape[a] for a in rest if tensor.shape[a] > 1] or [1]
        place = torch.full((len(self),), count).scatter_(0, label.permute(axes).flatten(), torch.arange(count))
        place[0] = count
        return tensor.permute(axes).reshape(count, *sizes), place[numbers], axes


@dataclass(eq=False)
class RowSamples:
    """The samples of the elements of each value, derived from their rows."""

    rows: Rows
    _of: dict[int, Tensor] = field(default_factory=dict, repr=False)

    def of(self, value: int, tensor: Tensor) -> Tensor:
        """Return the sample of each element of a tensor in the shape of a value, with size 1 along axes along which it
        does not change."""
        if value not in self._of:
            label = self.rows.labels.get(value, ())
            if not label and int(self.rows.sample.max()) > 0:
                raise ModelError(
                    f"the samples of the elements of value {value} are unknown, so that its relevance cannot be summed "
                    "over each sample: pass one sample at a time"
                )
            single = torch.zeros([1] * tensor.dim(), dtype=torch.long)
            self._of[value] = slim(self.rows.sample[thin(label[0])]) if label else single
        return self._of[value]

    def sums(self, value: int, flow: Tensor) -> Tensor:
        """Return ``[B]``, the sums of a flow at a value over each sample."""
        return _sums(flow, self.of(value, flow), int(self.rows.sample.max()) + 1)

    def spread(self, value: int, numbers: Tensor, flow: Tensor) -> Tensor:
        """Return ``numbers``, one for each sample, in a shape that broadcasts to that of a flow at a value."""
        return numbers[self.of(value, flow).to(numbers.device)]

    def ranges(self, value: int, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smallest and the largest element of each sample of a value, in its shape."""
        samples = self.of(value, tensor).to(tensor.device)
        index, count = samples.expand(tensor.shape).flatten(), int(self.rows.sample.max()) + 1
        low, high = (
            tensor.new_zeros(count).scatter_reduce_(0, index, tensor.flatten(), reduction, include_self=False)[samples]
            for reduction in ("amin", "amax")
        )
        return low.expand_as(tensor), high.expand_as(tensor)

    def is_shared(self, value: int, shape: Sequence[int]) -> bool:
        """Return True if a constant of that shape, added to a value, is known to be the same for all its rows."""
        label = self.rows.labels.get(value, ())
        if len(shape) < 2 or shape[-2] == 1:
            size = label[0].shape if label else ()
            return len(shape) < 3 or len(size) < 3 or size[-2] != 1  # else it is a row, such as a class token
        changing = (n > 1 and not constant_along(label[0], a - len(shape)) for a, n in enumerate(shape))
        return len(label) == 1 and not any(changing)

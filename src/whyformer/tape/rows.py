"""Which row of which input each element of a value belongs to.

    rows = find_rows(tape, [Source("input_ids", tape.number(ids))])    # labelling.py
    rows.labels[n]     # of value n: row numbers in its shape

A row is a token, a patch or a pixel. Every row has a number, and the calls of the tape are applied to these numbers
instead of to the values: a view rearranges them, an elementwise call keeps them, a product over features keeps them, a
product over rows drops them. A map of attention then has two labels, the rows of its queries and those of its keys.
Where the samples, heads, queries and keys of a value lie is read off the labels and never guessed from its shape.

A value whose rows are unknown has no label. Labels are stride 0 along axes of features and lie on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from whyformer.errors import ModelError

__all__ = [
    "Family",
    "Label",
    "RowSamples",
    "Rows",
    "Source",
    "constant_along",
    "equal",
    "first_places",
    "slim",
    "thin",
    "zero",
]

Label = tuple[Tensor, ...]
"""Row numbers in the shape of a value: one tensor, or two for a map (rows of queries and of keys, in any order)."""


# -- labels ----------------------------------------------------------------------------------------------------------
def constant_along(label: Tensor, axis: int) -> bool:
    """Return True if row numbers do not change along an axis."""
    if label.shape[axis] < 2 or label.stride(axis) == 0:
        return True
    label = thin(label)
    return bool((label == label.narrow(axis, 0, 1)).all())


def thin(label: Tensor, axes: Iterable[int] = ()) -> Tensor:
    """Row numbers with size 1 along axes of stride 0, and along ``axes``."""
    for axis in range(label.dim()):
        if label.shape[axis] > 1 and (label.stride(axis) == 0 or axis in axes):
            label = label.narrow(axis, 0, 1)
    return label


def slim(label: Tensor) -> Tensor:
    """Return row numbers with size 1 along all axes along which they do not change."""
    label = thin(label)
    return thin(label, [a for a in range(label.dim()) if constant_along(label, a)])


def equal(a: Tensor, b: Tensor) -> bool:
    """Return True if two labels of one shape are the same."""
    if (a.data_ptr(), a.stride()) == (b.data_ptr(), b.stride()):
        return True
    for axis in range(a.dim()):
        if a.stride(axis) == b.stride(axis) == 0:
            a, b = a.narrow(axis, 0, 1), b.narrow(axis, 0, 1)
    return torch.equal(a, b)


def first_places(numbers: Tensor, count: int) -> Tensor:
    """Return ``[count]``, where each of the numbers 0 .. count − 1 stands first."""
    places = torch.arange(len(numbers))
    return torch.full((count,), len(numbers)).scatter_reduce_(0, numbers, places, "amin")


def zero(shape: Sequence[int]) -> Tensor:
    return torch.zeros((), dtype=torch.long).expand(shape)


# -- what is found ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Source:
    """An input whose rows are followed.

    Attributes:
        name: of the input.
        value: its number on the tape.
        features: the axis of a row's features; None if each element is a row, such as token ids.
        samples: sample of each entry along the first axis, where rows of all samples are packed or a map holds heads;
            along the first two, where each sample has several texts that count as samples; None if each entry is one.
        is_map: it is no input, but the map ``[B, H, N, N]`` or ``[B·H, N, N]`` of an attention among N learned vectors.
    """

    name: str
    value: int
    features: int | None = None
    samples: tuple[int, ...] | None = None
    is_map: bool = False


@dataclass(frozen=True, eq=False)
class Family:
    """Rows that begin in one call.

    Attributes:
        source: name of the input that they are made of; "" for rows of constants such as a class token. A second
            look-up of the same ids in another order (a decoder's, shifted by one) has the name with a prime.
        value: number of the value in which they begin.
        numbers: ``[B, M]`` the rows of each sample; ``[M]`` if the samples have different counts.
        grid: the shape of the grid that the M rows of a sample form.
        elements: of rows that are looked up by ids: ``[B, M]`` which element of the input each one stands for, −1 for
            an id that the model put there, such as a start token.
    """

    source: str
    value: int
    numbers: Tensor
    grid: tuple[int, ...]
    elements: Tensor | None = None


@dataclass(eq=False)
class Rows:
    """The rows of a pass, numbered from 1. Number 0 is no row: what a model fills in.

    Attributes:
        labels: value -> row number of each element.
        sample: ``[R]`` sample of each row.
        families: all families, in the order of execution; the first stands for row 0.
        family: ``[R]`` position of each row's family.
        beside: family -> another one whose rows stand beside its own in some value.
        blended: values whose elements are made of several rows of one family, of which the label names one.
        indices: integer and boolean values that decided which rows lie where.
        repeats: source -> values in which the same ids are looked up once more, in other tables.
    """

    labels: dict[int, Label] = field(default_factory=dict)
    sample: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.long))
    families: list[Family] = field(default_factory=lambda: [Family("", -1, torch.zeros(1, 0, dtype=torch.long), ())])
    family: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.long))
    beside: dict[int, int] = field(default_factory=dict)
    blended: set[int] = field(default_factory=set)
    indices: dict[int, Tensor] = field(default_factory=dict)
    repeats: dict[str, list[int]] = field(default_factory=dict)
    cache: dict[Any, Any] = field(default_factory=dict, repr=False)  # what was read off these rows

    def __len__(self) -> int:
        return len(self.sample)

    @property
    def begun(self) -> dict[str, int]:
        """Input -> the value in which its rows begin: itself, or what is looked up by its ids."""
        found: dict[str, int] = {}
        for family in self.families[1:]:
            if family.source:
                found.setdefault(family.source, family.value)
        return found

    def component(self, row: int) -> int:
        """Return a number that all rows share that stand side by side in some value."""
        return self.linked(int(self.family[row]))

    def linked(self, family: int) -> int:
        """Return the same number for families whose rows stand side by side in some value."""
        while family in self.beside:
            family = self.beside[family]
        return family

    def distinct(self, label: Tensor) -> Tensor:
        """Return the row numbers of a label in ascending order, without 0."""
        key = label.data_ptr(), label.shape, label.stride()
        if key not in self.cache:
            numbers = thin(label).unique()
            self.cache[key] = numbers[numbers > 0], label  # the label is kept, so that no other takes its address
        return self.cache[key][0]

    def of(self, value: int) -> Tensor:
        """Return the row number of each element of a value that is no map.

        Raises:
            ModelError: the rows of the value are unknown.
        """
        label = self.labels.get(value, ())
        if len(label) != 1:
            raise ModelError(f"the rows of value {value} are unknown")
        return label[0]

    def sums(self, value: int, flow: Tensor) -> Tensor:
        """Return ``[R]``, the sum of a flow of that value over the features of each row."""
        label = slim(self.of(value))
        axes = [a for a, n in enumerate(label.shape) if n == 1 != flow.shape[a]]
        flow = flow.sum(axes, keepdim=True) if axes else flow
        return flow.new_zeros(len(self)).index_add_(0, label.flatten().to(flow.device), flow.flatten())

    def features(self, value: int, tensor: Tensor, numbers: Tensor) -> Tensor:
        """Return ``[B, N, ...]``, the features of some rows; zeros for rows that the value does not hold.

        Args:
            value: number of a value that is no map.
            tensor: of its shape, such as a flow.
            numbers: ``[B, N]`` row numbers.

        Raises:
            ModelError: the rows of the value are unknown.
        """
        flat, place, _ = self._places(value, tensor, numbers)
        if torch.equal(place.flatten(), torch.arange(len(flat))):
            return flat.unflatten(0, place.shape)
        places = place.to(flat.device)
        found = flat[places.clamp(max=len(flat) - 1)]
        return found.masked_fill((places == len(flat)).view(*places.shape, *(1,) * (flat.dim() - 1)), 0)

    def with_features(self, value: int, tensor: Tensor, numbers: Tensor, features: Tensor) -> Tensor:
        """Return ``tensor`` with these features of some rows, laid out as :meth:`features` returns them; the others
        stay."""
        flat, place, axes = self._places(value, tensor, numbers)
        flat, places = flat.clone(), place.to(flat.device)
        there = places < len(flat)
        flat[places[there]] = features.to(flat)[there]
        back = sorted(range(len(axes)), key=axes.__getitem__)
        return flat.reshape([tensor.shape[a] for a in axes]).permute(back).contiguous()

    def _places(self, value: int, tensor: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor, list[int]]:
        """(``[M, ...]`` a tensor by row, the place of each row number among these or M, its axes in this order)."""
        flat, standing, axes = self._flat(value, tensor)
        place = torch.full((len(self),), len(flat)).scatter_(0, standing, torch.arange(len(flat)))
        place[0] = len(flat)
        return flat, place[numbers], axes

    def _flat(self, value: int, tensor: Tensor) -> tuple[Tensor, Tensor, list[int]]:
        """(``[M, ...]`` a tensor by row, ``[M]`` the numbers of these rows, its axes in this order)."""
        label = slim(self.of(value))
        rows = [a for a, n in enumerate(label.shape) if n > 1]
        rest = [a for a in range(label.dim()) if a not in rows]
        numbers = label.permute([*rows, *rest]).flatten()
        sizes = [tensor.shape[a] for a in rest if tensor.shape[a] > 1] or [1]
        return tensor.permute([*rows, *rest]).reshape(len(numbers), *sizes), numbers, [*rows, *rest]


@dataclass(eq=False)
class RowSamples:
    """The samples of each value by its rows, wherever they lie: see :class:`whyformer.tape.samples.Samples`."""

    rows: Rows
    _of: dict[int, Tensor] = field(default_factory=dict, repr=False)

    def of(self, value: int) -> Tensor:
        """Return the sample of each element, with size 1 along axes along which it does not change."""
        if value not in self._of:
            label = self.rows.labels.get(value, ())
            if not label:
                raise ModelError(f"which elements of value {value} belong to which sample is unknown")
            self._of[value] = slim(self.rows.sample[thin(label[0])])
        return self._of[value]

    def sums(self, value: int, flow: Tensor) -> Tensor:
        """Return ``[B]``, the sum of a flow of that value over each sample."""
        samples = self.of(value)
        axes = [a for a, n in enumerate(samples.shape) if n == 1 != flow.shape[a]]
        flow = flow.sum(axes, keepdim=True) if axes else flow
        found = flow.new_zeros(int(self.rows.sample.max()) + 1)
        return found.index_add_(0, samples.flatten().to(flow.device), flow.flatten())

    def spread(self, value: int, numbers: Tensor, flow: Tensor) -> Tensor:
        """Return one number for each sample in a shape that broadcasts against a flow of that value."""
        return numbers[self.of(value).to(numbers.device)]

    def ranges(self, value: int, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smallest and the largest element of each sample of that value, in its shape."""
        samples = self.of(value).to(tensor.device)
        each, count = samples.expand(tensor.shape).flatten(), int(self.rows.sample.max()) + 1
        low, high = (
            tensor.new_zeros(count).scatter_reduce_(0, each, tensor.flatten(), way, include_self=False)[samples]
            for way in ("amin", "amax")
        )
        return low.expand_as(tensor), high.expand_as(tensor)

    def is_shared(self, value: int, shape: Sequence[int]) -> bool:
        """Return True if a constant of that shape, added to that value, is known to be the same for all its rows."""
        label = self.rows.labels.get(value, ())
        if len(shape) < 2 or shape[-2] == 1:
            own = label[0].shape if label else ()
            return len(shape) < 3 or len(own) < 3 or own[-2] != 1  # else it is a row itself, as a class token
        changing = (n > 1 and not constant_along(label[0], a - len(shape)) for a, n in enumerate(shape))
        return len(label) == 1 and not any(changing)

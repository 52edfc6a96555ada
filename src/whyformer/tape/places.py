"""Where the cells of a picture lie among the rows of a stream.

    places = find_places(tape, rows, stream, "pixel_values")
    scores[:, places.rows]  # of each cell, in reading order

A cell is the part of a picture or video that one row stands for: a patch, what a stem of convolutions made of one, or
several patches that a layer merged. Rows begin in convolutions, pools and layers; which rows such a call reads is
known (:mod:`whyformer.tape.rows`), so that cells are followed from the pixels on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

import torch
from torch import Tensor

from whyformer.tape.calls import Call
from whyformer.tape.feeding import find_fed, find_step, measure_fed, resizes
from whyformer.tape.moments import frame_of, lies_like
from whyformer.tape.rows import Family, Rows
from whyformer.tape.streams import Stream
from whyformer.tape.values import Tape

__all__ = ["Box", "Elements", "Places", "box_cells", "find_elements", "find_places"]

Box = tuple[float, float, float, float]
"""(left, top, right, bottom) in pixels of an input, fractions included."""


class Axis(NamedTuple):
    """Where cells lie along an axis of an input: the first begins at ``start``, each is ``step`` long."""

    start: float
    step: float

    def compose(self, other: Axis) -> Axis:
        """Return where cells lie on the input that lie as ``other`` says among cells that lie as this one says."""
        return Axis(self.start + self.step * other.start, self.step * other.step)


@dataclass(frozen=True, eq=False)
class Cells:
    """Cells of a picture.

    Attributes:
        rows: ``[rows, columns]``, which row of a family stands for each.
        axes: where they lie along each axis of the input; None if that is unknown.
    """

    rows: Tensor
    axes: tuple[Axis, ...] | None

    @property
    def box(self) -> Box | None:
        """The box of all cells on the last two axes of the input."""
        return None if self.axes is None else _box(self.axes[-2:], self.rows.shape[-2:])


def _box(axes: Sequence[Axis], grid: Sequence[int]) -> Box:
    (top, down), (left, across) = axes
    return left, top, left + across * grid[1], top + down * grid[0]


@dataclass(frozen=True)
class Places:
    """The rows that stand for the cells of a picture.

    Attributes:
        rows: ``[P]``, the row of each cell, cells in reading order. Rows that are not among them are fed by no pixel
            (class tokens, registers, detection tokens).
        grid: (rows, columns) of the cells, or (steps of time, rows, columns) of a video's; None if they have none.
        tokens: number of rows, N.
        box: of the grid on the input's pixels: all cells are as large. It ends before the picture where the model does
            not read the rest, and reaches beyond it where the model pads. None if that is unknown.
    """

    rows: Tensor
    grid: tuple[int, ...] | None
    tokens: int
    box: Box | None = None


@dataclass(frozen=True, eq=False)
class Elements:
    """The rows that stand for the elements of an input: for tokens, vectors, or cells of a picture.

    Attributes:
        rows: ``[B, P]``, the row of each element, those of a picture in reading order; −1 for elements without a row,
            such as a placeholder in whose place a picture was put.
        grid, box: of the cells of a picture, see :class:`Places`; None for other inputs.
    """

    rows: Tensor
    grid: tuple[int, ...] | None
    box: Box | None = None


def find_elements(tape: Tape, rows: Rows, numbers: Tensor, source: str, is_picture: bool) -> Elements | None:
    """Return which of some rows stand for the elements of an input; None if none does, or that is unknown.

    Args:
        tape: a recorded pass.
        rows: of the pass.
        numbers: ``[B, N]`` row numbers.
        source: name of the input.
        is_picture: its elements are the cells of a picture, and not tokens or vectors.
    """
    key = "elements", id(numbers), source, is_picture
    if key not in rows.cache:
        rows.cache[key] = _find_elements(tape, rows, numbers, source, is_picture), numbers
    known: Elements | None = rows.cache[key][0]
    return known


def _find_elements(tape: Tape, rows: Rows, numbers: Tensor, source: str, is_picture: bool) -> Elements | None:
    inside = {int(f) for f in rows.family[numbers].unique()}
    families = [f for i, f in enumerate(rows.families) if i in inside and f.source == source]
    begun = next((f for f in rows.families if f.source == source), None)
    if begun is None or not families or begun.numbers.shape[:-1] != numbers.shape[:1]:
        return None
    place = torch.full((len(rows),), -1)
    place[numbers] = torch.arange(numbers.shape[1]).expand(numbers.shape)
    if is_picture:
        cells = _cells_of(tape, rows, families[0], source) if len(families) == 1 else None
        if cells is not None and cells.rows.dim() in (2, 3):
            own_rows = place[families[0].numbers[:, cells.rows.flatten()]]
            return Elements(own_rows, tuple(cells.rows.shape), cells.box)
    text = begun.value in tape.maker
    fed = _fed([find_fed(tape, rows, f) for f in families], begun)
    family, own = families[0], None
    if fed is None and not is_picture and not text and len(families) == 1:
        cells = _cells_of(tape, rows, family, source)
        own = family.numbers[:, cells.rows] if cells is not None and cells.rows.dim() == 1 else None
    if fed is None and own is None:
        fed = _fed([measure_fed(tape, rows, f) for f in families], begun)
    if fed is not None:
        fed = torch.where(fed > 0, place[fed], -1)
        return _laid_out(fed, begun) if is_picture else _in_order(fed, merged=not text)
    if own is None and not text and len(families) == 1 and lies_like(tape, rows, family, begun):
        own = family.numbers
    if own is None:
        return None
    if is_picture:
        return Elements(place[own], family.grid)
    return Elements(place[own[:, frame_of(begun.numbers.shape[1], own.shape[1])]], None)


def _fed(known: Sequence[Tensor | None], begun: Family) -> Tensor | None:
    """``[B, M]`` the row that each element of an input feeds, 0 for none; None if one feeds several, or none does.

    Args:
        known: for each family, ``[R]`` its row that each row of the input feeds.
        begun: rows of the elements.
    """
    fed = torch.zeros_like(begun.numbers)
    for one in known:
        if one is None or bool(((fed > 0) & (one[begun.numbers] > 0)).any()):
            return None
        fed = fed + one[begun.numbers]
    return fed if bool((fed > 0).any()) else None


def _laid_out(fed: Tensor, begun: Family) -> Elements | None:
    """The cells of the pictures of each sample, from the row ``[B, pixels]`` that each pixel feeds."""
    each = fed.shape[1] // math.prod(begun.grid)
    pixels = fed.unflatten(1, (*((each,) if each > 1 else ()), *begun.grid))
    pixels = pixels.flatten(1, -3) if pixels.dim() > 4 else pixels  # tiles of several pictures
    found = [box_cells(one, merged=each > 1, holes=True) for one in pixels]
    cells = [one for one in found if one is not None and one.shape == (found[0] if found[0] is not None else one).shape]
    if len(cells) < len(found):
        return None
    grid = tuple(cells[0].shape) if cells[0].dim() in (2, 3) else None
    lie = {_grouped(one) for one in pixels}
    axes = lie.pop() if len(lie) == 1 and grid is not None else None
    box = None if axes is None or grid is None else _box(axes[-2:], grid[-2:])
    return Elements(torch.stack([one.flatten() for one in cells]), grid, box)


def _in_order(fed: Tensor, merged: bool) -> Elements | None:
    """The rows ``[B, M]`` that tokens or vectors feed. Of vectors several may have been ``merged`` into one row, of
    tokens none."""
    alone = [one[one >= 0] for one in fed]
    there = all(one.numel() > 0 for one in alone)
    return Elements(fed, None) if there and (merged or all(len(one.unique()) == len(one) for one in alone)) else None


def find_places(tape: Tape, rows: Rows, stream: Stream, source: str) -> Places | None:
    """Return where the cells of a picture lie among the rows of a stream; None if they have no place, or another one
    in each sample.

    Args:
        tape: a recorded pass.
        rows: of the pass.
        stream: one of its streams.
        source: name of the picture.
    """
    found = find_elements(tape, rows, stream.rows, source, is_picture=True)
    if found is None or bool((found.rows < 0).any()) or not bool((found.rows == found.rows[:1]).all()):
        return None
    return Places(found.rows[0], found.grid, stream.rows.shape[1], found.box)


def _cells_of(tape: Tape, rows: Rows, family: Family, source: str) -> Cells | None:
    """Which of a family's M rows stands for each cell of a picture, the same in all samples; None if that is
    unknown."""
    if family.numbers.dim() < 2 or family.numbers.shape[1] != math.prod(family.grid):  # packed patches
        return None
    if family.value == rows.begun[source]:
        return Cells(torch.arange(family.numbers.shape[1]).view(family.grid), (Axis(0.0, 1.0),) * len(family.grid))
    call = tape.maker[family.value]
    operand = next((o for o in call.operands if len(rows.labels.get(o, ())) == 1), None)
    before = None if operand is None else _family_of(rows, rows.of(operand))
    if operand is None or before is None or before.source != source:
        return None
    if any(before.value < n < family.value for n in rows.blended):
        return None
    cells = _cells_of(tape, rows, before, source)
    if cells is None:
        return None
    found = _convolved(tape, call, rows.of(operand), family, before, cells) if resizes(call) else None
    return _merged(find_step(tape, rows, operand, family.value), family, before, cells) if found is None else found


def _family_of(rows: Rows, label: Tensor) -> Family | None:
    """The one family of all rows of a label."""
    numbers = rows.family[rows.distinct(label)].unique()
    return rows.families[int(numbers)] if len(numbers) == 1 else None


def _convolved(
    tape: Tape, call: Call, label: Tensor, family: Family, before: Family, cells: Cells
) -> Cells | None:
    """The cells of what a convolution or a pool makes of cells that lie along its axes."""
    axes = cells.rows.dim()
    if label.dim() != axes + 2 or len(family.grid) != axes:
        return None
    own, made = before.numbers[0][cells.rows], torch.arange(family.numbers.shape[1]).view(family.grid)
    for order in permutations(range(axes)):
        lines = _lines_in_order(label[0, 0], own.permute(order))
        if lines is not None:
            break
    else:
        return None
    back = sorted(range(axes), key=order.__getitem__)
    if cells.axes is None:
        return Cells(made.permute(back), None)
    windows = [_windows(tape, call, axis, len(line), family.grid[axis]) for axis, line in enumerate(lines)]
    lie = [_along(lines[axis]).compose(windows[axis]) for axis in back]
    return Cells(made.permute(back), tuple(a.compose(b) for a, b in zip(cells.axes, lie, strict=True)))


def _windows(tape: Tape, call: Call, axis: int, size: int, count: int) -> Axis:
    """Where what a convolution or a pool makes lies along an axis of its operand: about the middles of its windows."""

    def number(name: str, otherwise: int) -> int:
        known = call.argument(name)
        values = [known] if isinstance(known, int) else list(known or ())
        return int(values[min(axis, len(values) - 1)]) if values else otherwise

    weight = call.operand("weight")
    kernel = number("kernel_size", 0) if weight is None else tape.shapes[weight][axis + 2]
    if not kernel:  # an adaptive pool: equal shares
        return Axis(0.0, size / count)
    stride = number("stride", kernel)
    middle = (number("dilation", 1) * (kernel - 1) + 1) / 2 - number("padding", 0)
    if call.argument("transposed", False):  # each element feeds a window of what is made
        return Axis(0.5 - middle / stride, 1 / stride)
    return Axis(middle - stride / 2, float(stride))


def _along(lines: Tensor) -> Axis:
    """Where the lines of an operand lie along an axis of cells.

    Args:
        lines: ``[N]`` the coordinate of the cells in each line, −1 for none.
    """
    (at,) = (lines >= 0).nonzero(as_tuple=True)
    cells, places = lines[at].double() + 0.5, at.double() + 0.5
    about = places - places.mean()
    spread = float(about.square().sum())
    step = float((cells * about).sum()) / spread if spread and bool((cells.diff() != 1).any()) else 1.0
    return Axis(float(cells.mean() - step * places.mean()), step)


def _lines_in_order(seen: Tensor, own: Tensor) -> list[Tensor] | None:
    """Return for each axis ``[N]``, which line of a grid each line of an operand holds, −1 for none; None if the rows
    that an operation sees do not lie along its axes as those of the grid do. 0 is no row."""
    place = torch.full((max(int(own.max()), int(seen.max())) + 1,), -1)
    place[own.flatten()] = torch.arange(own.numel())
    there = seen > 0
    if bool((place[seen[there]] < 0).any()):
        return None
    found = []
    for axis, coordinate in enumerate(torch.unravel_index(place[seen].clamp(min=0), tuple(own.shape))):
        size = coordinate.shape[axis]
        low = coordinate.masked_fill(~there, own.shape[axis]).movedim(axis, 0).reshape(size, -1).amin(1)
        high = coordinate.masked_fill(~there, -1).movedim(axis, 0).reshape(size, -1).amax(1)
        lines = high >= 0
        if not torch.equal(low[lines], high[lines]) or bool((high[lines].diff() < 0).any()):
            return None
        found.append(high)
    return found


def _merged(into: Tensor | None, family: Family, before: Family, cells: Cells) -> Cells | None:
    """The cells of rows that are made of several others each, if these are one box of cells.

    Args:
        into: ``[R]`` the row that each row feeds; None if one feeds several.
        family, before: the rows and those that they are made of.
        cells: which of those before stands for each cell.
    """
    if into is None:
        return None
    position = torch.full((len(into),), -1)
    position[family.numbers.flatten()] = torch.arange(family.numbers.shape[1]).repeat(len(family.numbers))
    fed = position[into[before.numbers[:, cells.rows]]]
    if not bool((fed == fed[:1]).all()):
        return None
    if cells.rows.dim() == 1:
        found = box_cells(fed[:1])
        return None if found is None else Cells(found[0], None)
    found, lie = box_cells(fed[0]), _grouped(fed[0])
    if found is None:
        return None
    if cells.axes is None or lie is None:
        return Cells(found, None)
    return Cells(found, tuple(a.compose(b) for a, b in zip(cells.axes, lie, strict=True)))


def _grouped(fed: Tensor) -> tuple[Axis, ...] | None:
    """Where the cells of a lattice lie along each axis, all being as long as the longest: a part of the first or of the
    last may lie beyond; None if others are shorter.

    Args:
        fed: ``[..., H, W]``, the row that each pixel feeds, −1 for none.
    """
    found = []
    for axis in range(fed.dim()):
        lines = fed.movedim(axis, 0).flatten(1)
        begins = torch.ones(len(lines), dtype=torch.bool)
        begins[1:] = (lines[1:] != lines[:-1]).any(1)
        (starts,) = begins.nonzero(as_tuple=True)
        ends = torch.cat((starts[1:], torch.tensor([len(lines)])))
        there = (lines[starts] >= 0).any(1)
        starts, ends = starts[there], ends[there]
        if not len(starts):
            return None
        sizes = ends - starts
        step = int(sizes.max())
        if bool((sizes[1:-1] != step).any()):
            return None
        cut = len(sizes) > 1 and int(sizes[0]) < step
        found.append(Axis(float(ends[0]) - step if cut else float(starts[0]), float(step)))
    return tuple(found)


def box_cells(fed: Tensor, merged: bool = False, holes: bool = False) -> Tensor | None:
    """Return ``[..., rows, columns]``, the row of each cell, if the pixels of each row are one box of a lattice; else
    None.

    Args:
        fed: ``[..., H, W]``, the row that each pixel feeds, −1 for none.
        merged: of a picture cut into many (axis 0) several may be one row.
        holes: of such some may feed none.
    """
    cells, holes = fed, holes and fed.dim() == 3
    empty = (fed < 0).flatten(1).all(1) if holes else torch.zeros(len(fed), dtype=torch.bool)
    for axis in range(fed.dim()):
        lines = cells.movedim(axis, 0)
        begins = torch.ones(len(lines), dtype=torch.bool)
        begins[1:] = (lines[1:] != lines[:-1]).flatten(1).any(1)
        if axis == 0 and bool(empty.any()):  # tiles that were filled up keep their number
            begins |= empty
            if not bool(begins.all()):  # steps of a video, several in a cell
                return None
        cells = lines[begins].movedim(0, axis)
    for axis in range(int(bool(empty.any())), fed.dim()):  # margins that feed nothing
        lines = cells.movedim(axis, 0)
        cells = lines[(lines >= 0).flatten(1).any(1)].movedim(0, axis)
    pictures = cells if merged and cells.dim() == 3 and cells[0].numel() == 1 else cells[None]
    holes = holes and bool((cells >= 0).any())
    counted = [one[one >= 0] if holes else one for one in pictures]
    once = cells.numel() > 0 and all(len(one.unique()) == one.numel() for one in counted)
    return cells if once and (holes or bool((cells >= 0).all())) else None

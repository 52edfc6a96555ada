"""Map the cells of a picture, and the elements of other inputs, to rows of a stream.

    elements = find_elements(tape, rows, stream.rows, "pixel_values", is_picture=True)
    scores.gather(1, elements.rows)  # the score of each cell, in reading order

A cell is the part of a picture or video that one row represents: a patch, the output of a convolutional stem for a
patch, or several merged patches. Convolutions, pools and layers create new rows; the rows that they read are known
(:mod:`whyformer.tape.rows`), so cells are followed from the pixels on. A *family* is the set of rows that one value
creates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import NamedTuple

import torch
from torch import Tensor

from whyformer.tape.calls import Call
from whyformer.tape.feeding import (
    Box,
    find_fed,
    find_step,
    frame_of,
    measure_fed,
    overwrites,
    represents_shares,
    resizes,
)
from whyformer.tape.rows import RowFamily, Rows
from whyformer.tape.values import Tape

__all__ = ["Box", "Elements", "box_cells", "find_elements"]


class Axis(NamedTuple):
    """Positions of cells along an axis of an input, in pixels: the first begins at ``start``, each has length
    ``step``."""

    start: float
    step: float

    def compose(self, other: Axis) -> Axis:
        """Return the positions on the input of cells whose positions, in units of the cells of ``self``, are
        ``other``."""
        return Axis(self.start + self.step * other.start, self.step * other.step)


@dataclass(frozen=True, eq=False)
class Cells:
    """Cells of a picture.

    Attributes:
        rows: ``[rows, columns]``, index of the row of a family that represents each cell.
        axes: positions of the cells along each axis of the input; None if unknown.
    """

    rows: Tensor
    axes: tuple[Axis, ...] | None

    @property
    def box(self) -> Box | None:
        """The bounding box of all cells on the last two axes of the input."""
        return None if self.axes is None else _box(self.axes[-2:], self.rows.shape[-2:])


def _box(axes: Sequence[Axis], grid: Sequence[int]) -> Box:
    (top, down), (left, across) = axes
    return left, top, left + across * grid[1], top + down * grid[0]


@dataclass(frozen=True, eq=False)
class Elements:
    """The rows that represent the elements of an input: tokens, vectors, or cells of a picture.

    Attributes:
        rows: ``[B, P]``, or ``[1, P]`` if the same in all samples, the row of each element, cells in reading order; −1
            for elements without a row, such as a placeholder token that is replaced by a picture. Rows of no element
            (class tokens, registers, detection tokens) do not occur.
        grid: (rows, columns) of the cells, or (time steps, rows, columns) for a video; None if they form no grid.
        box: bounding box of the grid in pixels of the input, whose cells have equal size. It is smaller than the
            picture if the model ignores its margin, and larger if the model pads. None if unknown.
        even: True if each row represents an equal share of the elements, because receptive fields overlap.
    """

    rows: Tensor
    grid: tuple[int, ...] | None
    box: Box | None = None
    even: bool = False

    def within(self, real: Tensor) -> Elements:
        """Return the elements of samples of different lengths. If padding has no rows, the rows of a sample represent
        equal shares of its real elements, as they do for the sample alone.

        Args:
            real: ``[B, P]`` True at real elements.
        """
        if not self.even or real.shape[1:] != self.rows.shape[1:] or bool((self.rows >= 0).all()):
            return self
        rows = torch.full(real.shape, -1)
        for row, before, is_real in zip(rows, self.rows.expand(real.shape), real.cpu(), strict=True):
            present = before[before >= 0].unique()
            row[is_real] = present[frame_of(int(is_real.sum()), len(present))]
        return replace(self, rows=rows)


def find_elements(tape: Tape, rows: Rows, numbers: Tensor, source: str, is_picture: bool) -> Elements | None:
    """Return which rows represent the elements of an input; None if no row does, or if this is unknown.

    Args:
        tape: a recorded pass.
        rows: the rows of the pass.
        numbers: ``[B, N]``, the row numbers to choose from.
        source: name of the input.
        is_picture: True if the elements are cells of a picture, False if they are tokens or vectors.
    """
    key = "elements", numbers, source, is_picture
    return rows.once(key, lambda: _find_elements(tape, rows, numbers, source, is_picture))


def _find_elements(tape: Tape, rows: Rows, numbers: Tensor, source: str, is_picture: bool) -> Elements | None:
    """Try, in this order: cells that are followed from the pixels, rows that each element feeds step by step, moments
    that are followed from a sound, rows that each element feeds as measured over all steps, and rows that represent
    equal shares of the input."""
    root = next((f for f in rows.families if f.source == source), None)
    families = _families_inside(tape, rows, numbers, source)
    if root is None or not families or root.numbers.shape[:-1] != numbers.shape[:1]:
        return None
    place = torch.full((len(rows),), -1)  # of each row of the pass among the N rows
    place[numbers] = torch.arange(numbers.shape[1]).expand(numbers.shape)
    only, is_text = families[0] if len(families) == 1 else None, root.value in tape.maker

    if is_picture and only is not None:
        cells = _cells_of(tape, rows, only, source)
        if cells is not None and cells.rows.dim() in (2, 3):
            return Elements(place[only.numbers[:, cells.rows.flatten()]], tuple(cells.rows.shape), cells.box)
    fed = _joined_fed([find_fed(tape, rows, f) for f in families], root)
    if fed is None and only is not None and not is_picture and not is_text:
        cells = _cells_of(tape, rows, only, source)
        if cells is not None and cells.rows.dim() == 1:
            return _even_elements(place[only.numbers[:, cells.rows]], root)
    if fed is None:
        fed = _joined_fed([measure_fed(tape, rows, f) for f in families], root)
    if fed is not None:
        fed = torch.where(fed > 0, place[fed], -1)
        return _picture_elements(fed, root) if is_picture else _sequence_elements(fed, merged=not is_text)
    if only is None or (is_text and only.numbers.shape != root.numbers.shape):
        return None
    if not represents_shares(tape, rows, only, root):
        return None
    shares = place[only.numbers]
    return Elements(shares, only.grid) if is_picture else _even_elements(shares, root)


def _families_inside(tape: Tape, rows: Rows, numbers: Tensor, source: str) -> list[RowFamily]:
    """Return the families of an input that occur among row numbers ``[B, N]``; without later families that only replace
    rows of the first that were overwritten before they were read."""
    families = [rows.families[f] for f in rows.family[numbers].unique().tolist()]
    families = [f for f in families if f.source == source]
    if len(families) > 1 and all(overwrites(tape, rows, numbers, families[0], later) for later in families[1:]):
        return families[:1]
    return families


def _even_elements(shares: Tensor, root: RowFamily) -> Elements:
    """Return the elements of a sequence ``[B, M]`` of which each of N rows ``[B, N]`` represents an equal share."""
    return Elements(shares[:, frame_of(root.numbers.shape[1], shares.shape[1])], None, even=True)


def _joined_fed(maps: Sequence[Tensor | None], root: RowFamily) -> Tensor | None:
    """Return ``[B, M]``, the row that each element of an input feeds, 0 for none; None if an element feeds several
    rows, or if no element feeds any.

    Args:
        maps: for each family, ``[R]``, the row of the family that each row of the input feeds; None if unknown.
        root: the family of the elements.
    """
    fed = torch.zeros_like(root.numbers)
    for into in maps:
        if into is None or bool(((fed > 0) & (into[root.numbers] > 0)).any()):
            return None
        fed = fed + into[root.numbers]
    return fed if bool((fed > 0).any()) else None


def _picture_elements(fed: Tensor, root: RowFamily) -> Elements | None:
    """Return the cells of the pictures of each sample, from ``[B, pixels]``, the row that each pixel feeds."""
    count = fed.shape[1] // math.prod(root.grid)
    pixels = fed.unflatten(1, (*((count,) if count > 1 else ()), *root.grid))
    pixels = pixels.flatten(1, -3) if pixels.dim() > 4 else pixels  # tiles of several pictures
    grids = [box_cells(sample, merged=count > 1, holes=True) for sample in pixels]
    cells = [g for g in grids if g is not None and g.shape == (grids[0] if grids[0] is not None else g).shape]
    if len(cells) < len(grids):
        return None
    grid = tuple(cells[0].shape) if cells[0].dim() in (2, 3) else None
    layouts = {_lattice_axes(sample) for sample in pixels}
    axes = layouts.pop() if len(layouts) == 1 and grid is not None else None
    box = None if axes is None or grid is None else _box(axes[-2:], grid[-2:])
    return Elements(torch.stack([g.flatten() for g in cells]), grid, box)


def _sequence_elements(fed: Tensor, merged: bool) -> Elements | None:
    """Return the elements of a sequence, from ``[B, M]``, the row that each token or vector feeds. With ``merged``, as
    for vectors, several elements may feed the same row."""
    rows = [sample[sample >= 0] for sample in fed]
    present = all(sample.numel() > 0 for sample in rows)
    return Elements(fed, None) if present and (merged or all(len(s.unique()) == len(s) for s in rows)) else None


def _cells_of(tape: Tape, rows: Rows, family: RowFamily, source: str) -> Cells | None:
    """Return the cells of a picture, with the index of their rows among the M rows of a family, which must be the same
    in all samples; None if unknown."""
    if family.numbers.dim() < 2 or family.numbers.shape[1] != math.prod(family.grid):  # packed patches
        return None
    if family.value == rows.roots[source]:
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
    after = _convolved_cells(tape, call, rows.of(operand), family, before, cells) if resizes(call) else None
    if after is not None:
        return after
    return _merged_cells(find_step(tape, rows, operand, family.value), family, before, cells)


def _family_of(rows: Rows, label: Tensor) -> RowFamily | None:
    """Return the family to which all rows of a label belong; None if they belong to several."""
    numbers = rows.family[rows.distinct(label)].unique()
    return rows.families[int(numbers)] if len(numbers) == 1 else None


def _convolved_cells(
    tape: Tape, call: Call, label: Tensor, family: RowFamily, before: RowFamily, cells: Cells
) -> Cells | None:
    """Return the cells of the output of a convolution or a pool; None if the cells of its operand do not lie along its
    axes."""
    axes = cells.rows.dim()
    if label.dim() != axes + 2 or len(family.grid) != axes:
        return None
    before_rows, new = before.numbers[0][cells.rows], torch.arange(family.numbers.shape[1]).view(family.grid)
    for order in permutations(range(axes)):
        lines = _lines_in_order(label[0, 0], before_rows.permute(order))
        if lines is not None:
            break
    else:
        return None
    back = sorted(range(axes), key=order.__getitem__)
    if cells.axes is None:
        return Cells(new.permute(back), None)
    windows = [_window_axis(tape, call, axis, len(line), family.grid[axis]) for axis, line in enumerate(lines)]
    layout = [_axis_of_lines(lines[axis]).compose(windows[axis]) for axis in back]
    return Cells(new.permute(back), tuple(a.compose(b) for a, b in zip(cells.axes, layout, strict=True)))


def _window_axis(tape: Tape, call: Call, axis: int, size: int, count: int) -> Axis:
    """Return the positions of the outputs of a convolution or a pool along an axis of its operand. Each output is
    centred on its window."""

    def number(name: str, default: int) -> int:
        argument = call.argument(name)
        values = [argument] if isinstance(argument, int) else list(argument or ())
        return int(values[min(axis, len(values) - 1)]) if values else default

    weight = call.operand("weight")
    kernel = number("kernel_size", 0) if weight is None else tape.shapes[weight][axis + 2]
    if not kernel:  # an adaptive pool: windows of equal size
        return Axis(0.0, size / count)
    stride = number("stride", kernel)
    middle = (number("dilation", 1) * (kernel - 1) + 1) / 2 - number("padding", 0)
    if call.argument("transposed", False):  # each element feeds a window of the output
        return Axis(0.5 - middle / stride, 1 / stride)
    return Axis(middle - stride / 2, float(stride))


def _axis_of_lines(lines: Tensor) -> Axis:
    """Return the positions of the lines of an operand along an axis of cells.

    Args:
        lines: ``[N]``, the coordinate of the cells in each line, −1 for none.
    """
    (at,) = (lines >= 0).nonzero(as_tuple=True)
    cells, places = lines[at].double() + 0.5, at.double() + 0.5
    about = places - places.mean()
    spread = float(about.square().sum())
    step = float((cells * about).sum()) / spread if spread and bool((cells.diff() != 1).any()) else 1.0
    return Axis(float(cells.mean() - step * places.mean()), step)


def _lines_in_order(operand: Tensor, grid: Tensor) -> list[Tensor] | None:
    """Return, for each axis, ``[N]``: which line of a grid each line of an operand contains, −1 for none. Return None
    if the rows of the operand do not lie along its axes as those of the grid do.

    Args:
        operand, grid: row numbers; 0 is no row.
    """
    place = torch.full((max(int(grid.max()), int(operand.max())) + 1,), -1)
    place[grid.flatten()] = torch.arange(grid.numel())
    is_row = operand > 0
    if bool((place[operand[is_row]] < 0).any()):
        return None
    result = []
    for axis, coordinate in enumerate(torch.unravel_index(place[operand].clamp(min=0), tuple(grid.shape))):
        size = coordinate.shape[axis]
        low = coordinate.masked_fill(~is_row, grid.shape[axis]).movedim(axis, 0).reshape(size, -1).amin(1)
        high = coordinate.masked_fill(~is_row, -1).movedim(axis, 0).reshape(size, -1).amax(1)
        lines = high >= 0
        if not torch.equal(low[lines], high[lines]) or bool((high[lines].diff() < 0).any()):
            return None
        result.append(high)
    return result


def _merged_cells(into: Tensor | None, family: RowFamily, before: RowFamily, cells: Cells) -> Cells | None:
    """Return the cells of rows that merge several rows each; None if the merged cells do not form boxes.

    Args:
        into: ``[R]``, the row that each row feeds; None if a row feeds several.
        family: the merged rows.
        before: the rows that feed them.
        cells: the cells of the rows before.
    """
    if into is None:
        return None
    position = torch.full((len(into),), -1)
    position[family.numbers.flatten()] = torch.arange(family.numbers.shape[1]).repeat(len(family.numbers))
    fed = position[into[before.numbers[:, cells.rows]]]
    if not bool((fed == fed[:1]).all()):
        return None
    if cells.rows.dim() == 1:
        grid = box_cells(fed[:1])
        return None if grid is None else Cells(grid[0], None)
    grid, layout = box_cells(fed[0]), _lattice_axes(fed[0])
    if grid is None:
        return None
    if cells.axes is None or layout is None:
        return Cells(grid, None)
    return Cells(grid, tuple(a.compose(b) for a, b in zip(cells.axes, layout, strict=True)))


def _lattice_axes(fed: Tensor) -> tuple[Axis, ...] | None:
    """Return the positions of the cells of a lattice along each axis. All cells get the size of the largest, so the
    first or the last may extend beyond the picture. Return None if another cell is smaller.

    Args:
        fed: ``[..., H, W]``, the row that each pixel feeds, −1 for none.
    """
    axes = []
    for axis in range(fed.dim()):
        lines = fed.movedim(axis, 0).flatten(1)
        begins = torch.ones(len(lines), dtype=torch.bool)
        begins[1:] = (lines[1:] != lines[:-1]).any(1)
        (starts,) = begins.nonzero(as_tuple=True)
        ends = torch.cat((starts[1:], torch.tensor([len(lines)])))
        has_row = (lines[starts] >= 0).any(1)
        starts, ends = starts[has_row], ends[has_row]
        if not len(starts):
            return None
        sizes = ends - starts
        step = int(sizes.max())
        if bool((sizes[1:-1] != step).any()):
            return None
        cut = len(sizes) > 1 and int(sizes[0]) < step
        axes.append(Axis(float(ends[0]) - step if cut else float(starts[0]), float(step)))
    return tuple(axes)


def box_cells(fed: Tensor, merged: bool = False, holes: bool = False) -> Tensor | None:
    """Return ``[..., rows, columns]``, the row of each cell; None if the pixels that feed a row do not form one box of
    a lattice.

    Args:
        fed: ``[..., H, W]``, the row that each pixel feeds, −1 for none. With three axes, axis 0 may be tiles.
        merged: several tiles may feed the same row.
        holes: some tiles may feed no row.
    """
    cells, holes = fed, holes and fed.dim() == 3
    empty = (fed < 0).flatten(1).all(1) if holes else torch.zeros(len(fed), dtype=torch.bool)
    for axis in range(fed.dim()):
        lines = cells.movedim(axis, 0)
        begins = torch.ones(len(lines), dtype=torch.bool)
        begins[1:] = (lines[1:] != lines[:-1]).flatten(1).any(1)
        if axis == 0 and bool(empty.any()):  # padding tiles keep their index
            begins |= empty
            if not bool(begins.all()):  # a video whose cells span several time steps
                return None
        cells = lines[begins].movedim(0, axis)
    for axis in range(int(bool(empty.any())), fed.dim()):  # drop margins that feed no row
        lines = cells.movedim(axis, 0)
        cells = lines[(lines >= 0).flatten(1).any(1)].movedim(0, axis)
    pictures = cells if merged and cells.dim() == 3 and cells[0].numel() == 1 else cells[None]
    holes = holes and bool((cells >= 0).any())
    counted = [p[p >= 0] if holes else p for p in pictures]
    once = cells.numel() > 0 and all(len(p.unique()) == p.numel() for p in counted)
    return cells if once and (holes or bool((cells >= 0).all())) else None

"""Where the cells of a picture lie among the rows of a stream.

    places = find_places(tape, rows, stream, "pixel_values")
    scores[:, places.rows]  # of each cell, in reading order

A cell is the part of a picture or video that one row stands for: a patch, or what a stem of convolutions made of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from whyformer.tape.program import read_program
from whyformer.tape.rows import Family, Rows
from whyformer.tape.streams import Stream
from whyformer.tape.values import Tape
from whyformer.tape.walking import GRADIENT, walk_back

__all__ = ["Places", "box_cells", "find_places", "row_of_each"]


@dataclass(frozen=True)
class Places:
    """The rows that stand for the cells of a picture.

    Attributes:
        rows: ``[P]``, the row of each cell, cells in reading order. Rows that are not among them are fed by no pixel
            (class tokens, registers, detection tokens).
        grid: (rows, columns) of the cells, or (steps of time, rows, columns) of a video's; None if they have none.
        tokens: number of rows, N.
    """

    rows: Tensor
    grid: tuple[int, ...] | None
    tokens: int


def find_places(tape: Tape, rows: Rows, stream: Stream, source: str) -> Places | None:
    """Return where the cells of a picture lie among the rows of a stream; None if they have no place.

    Args:
        tape: a recorded pass.
        rows: of the pass.
        stream: one of its streams.
        source: name of the picture.
    """
    key = "places", id(stream.rows), source
    if key not in rows.cache:
        found = _of_convolutions(tape, rows, stream, source) or _of_patches(tape, rows, stream, source)
        if found is None:  # what was measured may be due to the values of this pass
            return None
        rows.cache[key] = found
    known: Places = rows.cache[key]
    return known


# -- read off the labels ----------------------------------------------------------------------------------------------
def _of_convolutions(tape: Tape, rows: Rows, stream: Stream, source: str) -> Places | None:
    """The places of cells that convolutions and pools make of a picture: the grid of the last of them."""
    inside = {int(f) for f in rows.family[stream.rows].unique()}
    families = [f for i, f in enumerate(rows.families) if i in inside and f.source == source]
    if len(families) != 1 or not _is_upright(tape, rows, families[0], source):
        return None
    (family,), (samples, count) = families, stream.rows.shape
    place = torch.full((len(rows),), -1)
    place[stream.rows] = torch.arange(count).expand(samples, count)
    cells = place[family.numbers]
    if bool((cells < 0).any()) or not bool((cells == cells[:1]).all()):
        return None
    return Places(cells[0], family.grid, count)


def _is_upright(tape: Tape, rows: Rows, family: Family, source: str) -> bool:
    """Return True if convolutions and pools made a family of a picture, whose axes none of them sees turned."""
    while family.value != rows.begun[source]:
        call = tape.maker[family.value]
        label = rows.labels.get(call.operands[0], ())
        before = [f for f in rows.families if f.source == source and f.value < family.value]
        if "conv" not in call.name and "pool" not in call.name:
            return False
        if len(label) != 1 or len(family.grid) not in (2, 3) or label[0].dim() != len(family.grid) + 2:
            return False
        seen = label[0][0, 0]
        made = next((f for f in before if bool((f.numbers.flatten() == seen.max()).any())), None)
        if made is None or len(made.grid) != seen.dim() or not _is_in_order(seen, made):
            return False
        family = made
    return len(family.grid) in (2, 3)


def _is_in_order(seen: Tensor, family: Family) -> bool:
    """Return True if the rows of a family stand along the axes of its grid; 0 is what was put beside them."""
    own = family.numbers[0]
    there = torch.isin(seen, own)
    if bool(((seen > 0) != there).any()):
        return False
    coordinates = torch.unravel_index((seen - own.min()).clamp(min=0), family.grid)
    for axis, coordinate in enumerate(coordinates):
        low = coordinate.masked_fill(~there, coordinate.max() + 1).movedim(axis, 0).flatten(1)
        high = coordinate.masked_fill(~there, -1).movedim(axis, 0).flatten(1)
        lines = there.movedim(axis, 0).flatten(1).any(1)
        if not torch.equal(low[lines].amin(1), high[lines].amax(1)):
            return False
        if bool((high[lines].amax(1).diff() < 0).any()):
            return False
    return True


# -- measured on the values -------------------------------------------------------------------------------------------
def _of_patches(tape: Tape, rows: Rows, stream: Stream, source: str) -> Places | None:
    """The places of cells that are cut out of a picture: which row each pixel feeds, the same in all samples."""
    picture, entry = rows.begun[source], stream.blocks[0].entry
    shape, own = tape.shapes[picture], stream.rows
    if len(shape) not in (4, 5) or shape[0] != len(own):
        return None
    like = rows.features(entry, tape[entry], own)
    program = read_program(tape, [picture], [entry])
    channels = 1 if len(shape) == 4 else 2

    def flow(seed: Tensor) -> Tensor:
        whole = seed.view_as(like[0]).expand_as(like)
        seeds = {entry: rows.with_features(entry, torch.zeros_like(tape[entry]), own, whole)}
        (found,) = walk_back(program, tape, [(GRADIENT, seeds)], wanted=[picture])
        return found[picture].movedim(channels, 0)

    fed = row_of_each(flow, like[0].flatten(1))
    tape.release()
    if fed is None or not bool((fed == fed[:1]).all()):
        return None
    cells = box_cells(fed[0])
    if cells is None:
        return None
    return Places(cells.flatten(), tuple(cells.shape), own.shape[1])


def row_of_each(flow: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor | None:
    """Return ``[...]``, the number of the row that each pixel feeds, −1 for none; None if one feeds several.

    With a fixed random direction r and g(w) = ∂/∂x Σᵢ wᵢ⟨hᵢ, r⟩: where a pixel feeds one row only, g(i)/g(1) is the
    number of that row in every channel, and g(i²)/g(1) its square.

    Args:
        flow: ``[N, D]``, what flows to the rows -> ``[C, ...]``, what flows to the pixels.
        rows: ``[N, D]``, the rows h.
    """
    half = rows.dtype in (torch.float16, torch.bfloat16)
    base, directions, tolerance = (2, 8, 0.3) if half else (256, 1, 0.1)
    drawn = torch.randn(directions, rows.shape[-1], generator=torch.Generator().manual_seed(1)).to(rows)
    numbers = torch.arange(len(rows), device=rows.device)

    def flows(weights: Tensor) -> Tensor:
        """``[directions · C, ...]``"""
        return torch.cat([flow(weights.to(rows)[:, None] * direction) for direction in drawn]).double()

    plain = flows(torch.ones_like(numbers))
    power = plain.square().sum(0)
    place = torch.zeros_like(power, dtype=torch.long)
    for scale in (base**k for k in range(len(rows).bit_length()) if base**k < len(rows)):
        # digit by digit, so that rounding cannot reach the next row
        digits = numbers // scale % base
        digit, square = (
            (flows(w) * plain).sum(0) / torch.where(power > 0, power, 1) for w in (digits, digits.square())
        )
        mixed = (digit - digit.round()).abs() > tolerance
        mixed |= (square - digit.square()).abs() > tolerance + 1e-5 * digit.square()
        if bool(mixed.any()):
            return None
        place += scale * digit.round().long()
    return place.masked_fill(power == 0, -1).cpu()


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

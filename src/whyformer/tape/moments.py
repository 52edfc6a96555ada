"""Which row each moment of a sound, or each pixel of a picture, belongs to, where its rows see overlapping parts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from whyformer.tape.feeding import weighed_flows
from whyformer.tape.rows import Family, Rows
from whyformer.tape.values import Tape

__all__ = ["frame_of", "lies_like"]

DRAWN = 8  # random flows, by which it is measured where rows lie


def frame_of(moments: int, frames: int) -> Tensor:
    """Return ``[T]``, the frame that each moment belongs to, where N frames stand for T/N moments each."""
    middles = torch.arange(moments) + 0.5
    return torch.div(middles * frames, moments, rounding_mode="floor").long().clamp(max=frames - 1)


def lies_like(tape: Tape, rows: Rows, family: Family, begun: Family) -> bool:
    """Return True if the rows of a family stand for equal shares of an input: the moments of a sound or the pixels of a
    picture, in the order of their grids.

    With random flows r to the rows i and g(w) = Jᵀ(w ⊙ r), the mean of g(i) · g(1) over that of g(1)² is the centre
    Σ_i i‖J_ip‖² / Σ_i ‖J_ip‖² of the rows that element p feeds; i is the coordinate of a row along an axis of the grid.
    The centres of the elements of each share have to lie on a line over the rows, about the middle, to within one row.
    What normalises over the whole, or adds positions by a convolution, draws all centres towards the middle (the slope
    of the line).

    Args:
        tape: a recorded pass.
        rows: of the pass.
        family: ``[B, N]`` rows that are made of the elements.
        begun: ``[B, M]`` rows of the elements.
    """
    count = len(family.numbers)
    grid = family.grid if len(begun.grid) > 1 else family.numbers.shape[1:]
    if len(grid) != len(begun.grid) or family.numbers.shape != (count, math.prod(grid)):
        return False
    if begun.numbers.shape != (count, math.prod(begun.grid)):
        return False
    places = [p.double() - (n - 1) / 2 for n, p in zip(grid, _coordinates(grid), strict=True)]
    pairs = zip(begun.grid, grid, _coordinates(begun.grid), strict=True)
    shares = [frame_of(m, n)[p].repeat(count) for m, n, p in pairs]
    power, along = _centres(tape, rows, family, begun, places)
    return all(_in_line(power, a, share, n) for a, share, n in zip(along, shares, grid, strict=True))


def _coordinates(grid: tuple[int, ...]) -> tuple[Tensor, ...]:
    """``[M]`` along each axis, the coordinates of the elements of a grid in reading order."""
    return torch.unravel_index(torch.arange(math.prod(grid)), grid)


def _centres(
    tape: Tape, rows: Rows, family: Family, begun: Family, places: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """(``[B·M]`` g(1)², g(i) · g(1) for each axis) of the elements, summed over the random flows.

    Args:
        tape, rows, family, begun: as for :func:`lies_like`.
        places: ``[N]`` the coordinates i of the rows along each axis.
    """
    ones, elements = torch.ones_like(places[0]), begun.numbers.flatten()
    found = [torch.zeros(len(elements), dtype=torch.float64) for _ in (ones, *places)]
    weights = torch.zeros(len(found), len(rows), dtype=torch.float64)
    for weight, place in zip(weights, (ones, *places), strict=True):
        weight[family.numbers] = place.expand(family.numbers.shape)
    for seed in range(1, DRAWN + 1):
        plain, *moved = weighed_flows(tape, rows, begun.value, family.value, weights, seed)
        for total, product in zip(found, (plain, *moved), strict=True):
            total += rows.sums(begun.value, product * plain).cpu()[elements]
    return found[0], found[1:]


def _in_line(power: Tensor, along: Tensor, share: Tensor, count: int) -> bool:
    """Return True if the centres of the elements of each share lie on a line over the shares."""
    total, moved = (t.new_zeros(count).index_add_(0, share, t) for t in (power, along))
    there = total > 0
    if int(there.sum()) < min(2, count):
        return False
    places = (torch.arange(count, dtype=torch.float64) - (count - 1) / 2)[there]
    centres, about = moved[there] / total[there], places - places.mean()
    spread = float(about.square().sum())
    slope = float((centres * about).sum()) / spread if spread else 1.0
    off = float((centres - centres.mean() - slope * about).square().mean().sqrt())
    return slope > 0.25 and off < slope and abs(float(centres.mean() - slope * places.mean())) < 1

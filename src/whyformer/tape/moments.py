"""Assign the moments of a sound, or the pixels of a picture, to rows whose receptive fields overlap."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from whyformer.tape.feeding import weighed_flows
from whyformer.tape.rows import Family, Rows
from whyformer.tape.values import Tape

__all__ = ["frame_of", "represents_shares"]

DRAWN = 8  # number of random flows by which the positions of rows are measured


def frame_of(moments: int, frames: int) -> Tensor:
    """Return ``[T]``, the frame to which each of T moments belongs, if N frames represent T/N moments each."""
    middles = torch.arange(moments) + 0.5
    return torch.div(middles * frames, moments, rounding_mode="floor").long().clamp(max=frames - 1)


def represents_shares(tape: Tape, rows: Rows, family: Family, root: Family) -> bool:
    """Return True if the rows of a family represent equal shares of an input, in the order of their grids: moments of a
    sound, or pixels of a picture.

    With random flows r at the rows i and g(w) = Jᵀ(w ⊙ r), the mean of g(i) · g(1) divided by that of g(1)² is the
    centre Σ_i i‖J_ip‖² / Σ_i ‖J_ip‖² of the rows that element p feeds, where i is the coordinate of a row along an axis
    of the grid. As a function of the row, the centres of the elements of its share must lie on a line through the
    middle, up to one row. The slope of the line may be smaller than 1, since norms over the whole input, and positions
    that are added by a convolution, move all centres towards the middle.

    Args:
        tape: a recorded pass.
        rows: the rows of the pass.
        family: rows that are computed from the elements, ``[B, N]``.
        root: the family of the elements, ``[B, M]``.
    """
    count = len(family.numbers)
    grid = family.grid if len(root.grid) > 1 else family.numbers.shape[1:]
    if len(grid) != len(root.grid) or family.numbers.shape != (count, math.prod(grid)):
        return False
    if root.numbers.shape != (count, math.prod(root.grid)):
        return False
    places = [p.double() - (n - 1) / 2 for n, p in zip(grid, _coordinates(grid), strict=True)]
    pairs = zip(root.grid, grid, _coordinates(root.grid), strict=True)
    shares = [frame_of(m, n)[p].repeat(count) for m, n, p in pairs]
    power, along = _centres(tape, rows, family, root, places)
    return all(_in_line(power, a, share, n) for a, share, n in zip(along, shares, grid, strict=True))


def _coordinates(grid: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return, for each axis, ``[M]``, the coordinates of the elements of a grid in reading order."""
    return torch.unravel_index(torch.arange(math.prod(grid)), grid)


def _centres(
    tape: Tape, rows: Rows, family: Family, root: Family, places: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Return g(1)² and, for each axis, g(i) · g(1), each ``[B·M]``, of the elements, summed over the random flows.

    Args:
        tape, rows, family, root: as for :func:`represents_shares`.
        places: for each axis, ``[N]``, the coordinates i of the rows.
    """
    ones, elements = torch.ones_like(places[0]), root.numbers.flatten()
    totals = [torch.zeros(len(elements), dtype=torch.float64) for _ in (ones, *places)]
    weights = torch.zeros(len(totals), len(rows), dtype=torch.float64)
    for weight, place in zip(weights, (ones, *places), strict=True):
        weight[family.numbers] = place.expand(family.numbers.shape)
    for seed in range(1, DRAWN + 1):
        plain, *moved = weighed_flows(tape, rows, root.value, family.value, weights, seed)
        for total, product in zip(totals, (plain, *moved), strict=True):
            total += rows.sums(root.value, product * plain).cpu()[elements]
    return totals[0], totals[1:]


def _in_line(power: Tensor, along: Tensor, share: Tensor, count: int) -> bool:
    """Return True if the centres of the elements of each share lie on a line over the shares."""
    total, moved = (t.new_zeros(count).index_add_(0, share, t) for t in (power, along))
    fed = total > 0
    if int(fed.sum()) < min(2, count):
        return False
    places = (torch.arange(count, dtype=torch.float64) - (count - 1) / 2)[fed]
    centres, about = moved[fed] / total[fed], places - places.mean()
    spread = float(about.square().sum())
    slope = float((centres * about).sum()) / spread if spread else 1.0
    off = float((centres - centres.mean() - slope * about).square().mean().sqrt())
    return slope > 0.25 and off < slope and abs(float(centres.mean() - slope * places.mean())) < 1

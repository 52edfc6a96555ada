"""From scores of one kind to scores of another: tokens to patches, patches to pixels, tokens to words.

The only place that resizes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def resize(maps: Tensor, size: tuple[int, int] | None) -> Tensor:
    """Bilinear resize of ``[B, h, w]`` to ``[B, height, width]`` (Chefer et al. 2021, section 3.4)."""
    if size is None or tuple(maps.shape[-2:]) == tuple(size):
        return maps
    wide = maps if maps.dtype in (torch.float32, torch.float64) else maps.float()
    return torch.nn.functional.interpolate(wide[:, None], size=tuple(size), mode="bilinear", align_corners=False)[:, 0]


def patch_grid(
    tokens: int, seen: tuple[int, ...] | None, configured: tuple[int, int] | None
) -> tuple[int, tuple[int, int]] | None:
    """(number of prefix tokens, (rows, columns)) of a sequence of tokens, or None for one without a grid.

    The grid is the output of the patch-embedding convolution seen in the run, else the configured one, else the
    largest square that leaves at most 8 prefix tokens (CLS, distillation, registers).
    """
    for grid in (seen, configured):
        if grid is not None and len(grid) == 2 and 0 <= tokens - grid[0] * grid[1] <= 16:
            return tokens - grid[0] * grid[1], (grid[0], grid[1])
    side = math.isqrt(tokens)
    return (tokens - side * side, (side, side)) if side > 1 and tokens - side * side <= 8 else None


def carry(row: Tensor, maps: list[Tensor], *, identity: bool = True, normalize_rows: bool = False) -> Tensor:
    """One row of the product Ā_L ⋯ Ā_1 without forming it: O(L·N²) instead of O(L·N³).

    Args:
        row: ``[B, N]`` the readout row r (one-hot for CLS).
        maps: Ē_b ``[B, N, N]`` of each block, first to last.
        identity: Ā = I + Ē (residual connection), else Ā = Ē.
        normalize_rows: divide each row of Ā by its sum.

    Returns:
        r · Ā_L ⋯ Ā_1, ``[B, N]``.
    """
    for one in reversed(maps):
        row = row.to(one.dtype)
        if normalize_rows:
            # rows of I + Ē sum to 1 + ΣĒ; a row that sums to 0 stays 0
            sums = one.sum(-1) + (1 if identity else 0)
            row = torch.where(sums != 0, row / torch.where(sums != 0, sums, 1), 0)
        moved = torch.bmm(row[:, None], one)[:, 0]
        row = row + moved if identity else moved
    return row

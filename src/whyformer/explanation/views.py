"""From scores of one kind to scores of another: tokens to patches, patches to pixels, tokens to words.

The only place that resizes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from whyformer.explanation.geometry import Box


def resize(maps: Tensor, size: tuple[int, int] | None, *, nearest: bool = False) -> Tensor:
    """Bilinear resize of ``[B, h, w]`` to ``[B, height, width]`` (Chefer et al. 2021, section 3.4).

    Args:
        nearest: each pixel takes the score of the cell that its centre lies in, and nothing is mixed.
    """
    if size is None or tuple(maps.shape[-2:]) == tuple(size):
        return maps
    wide = maps if maps.dtype in (torch.float32, torch.float64) else maps.float()
    if nearest:
        return torch.nn.functional.interpolate(wide[:, None], size=tuple(size), mode="nearest-exact")[:, 0]
    return torch.nn.functional.interpolate(wide[:, None], size=tuple(size), mode="bilinear", align_corners=False)[:, 0]


def place(
    map_: Tensor, box: Box, size: tuple[int, int], seen: Box | None = None, *, nearest: bool = False
) -> Tensor:
    """A map ``[..., h, w]`` laid over a box of a canvas, ``[..., height, width]``: bilinear, NaN for what was not seen.

    A canvas pixel whose centre lies at the share u of the box takes the map's value at u · h − ½ (between the centres
    of its cells, and constant beyond the outermost ones), as :func:`resize` does where the box is the canvas.

    Args:
        box: (left, top, right, bottom) in canvas pixels, fractions included; it may reach beyond the canvas.
        size: (height, width) of the canvas.
        seen: the box outside of which nothing was seen; ``box`` by default.
        nearest: each pixel takes the score of the cell that its centre lies in, and nothing is mixed.
    """
    left, top, right, bottom = box
    first, above, last, below = seen or box
    rows = _interpolation(map_.shape[-2], (top, bottom), (above, below), size[0], nearest)
    columns = _interpolation(map_.shape[-1], (left, right), (first, last), size[1], nearest)
    return rows @ map_.double().cpu() @ columns.T


def _interpolation(
    cells: int, span: tuple[float, float], seen: tuple[float, float], pixels: int, nearest: bool
) -> Tensor:
    """``[pixels, cells]`` weights of each pixel's value where the cells lie over a span; NaN for pixels not seen."""
    middles, (start, end) = torch.arange(pixels, dtype=torch.float64) + 0.5, span
    at = ((middles - start) / (end - start) * cells - 0.5).clamp(0, cells - 1)
    at = at.add(0.5).floor().clamp(max=cells - 1) if nearest else at
    below = at.floor().long().clamp(max=max(0, cells - 2))
    above = (below + 1).clamp(max=cells - 1)
    weights = torch.zeros(pixels, cells, dtype=torch.float64)
    index = torch.arange(pixels)
    weights[index, below] += 1 - (at - below)
    weights[index, above] += at - below
    return torch.where(((middles >= seen[0]) & (middles < seen[1]))[:, None], weights, torch.nan)


def gaussian_blur(pictures: Tensor, sigma: float, radius: int | None = None) -> Tensor:
    """Separable Gaussian blur of ``[B, C, H, W]``, normalised to sum 1; σ in pixels, mirrored at the edges.

    Args:
        radius: of the kernel; 3σ by default. No more than a picture's side allows.
    """
    flat = pictures.reshape(-1, 1, *pictures.shape[-2:])
    for axis in (2, 3):
        reach = min(math.ceil(3 * sigma) if radius is None else radius, flat.shape[axis] - 1)
        if sigma <= 0 or reach < 1:
            continue
        offsets = torch.arange(-reach, reach + 1, dtype=torch.float64)
        weights = torch.exp(-((offsets / sigma) ** 2) / 2)
        kernel = (weights / weights.sum()).to(flat).reshape((1, 1, -1, 1) if axis == 2 else (1, 1, 1, -1))
        pad = (0, 0, reach, reach) if axis == 2 else (reach, reach, 0, 0)
        flat = torch.nn.functional.conv2d(torch.nn.functional.pad(flat, pad, mode="reflect"), kernel)
    return flat.reshape(pictures.shape)


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

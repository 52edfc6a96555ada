"""Resize, place, blur and propagate maps. All resizing of maps happens here."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from whyformer.explanation.geometry import Box


def resize(maps: Tensor, size: tuple[int, int] | None, *, nearest: bool = False) -> Tensor:
    """Bilinear resize of ``[B, h, w]`` to ``[B, height, width]`` (Chefer et al. 2021, section 3.4).

    Args:
        size: (height, width) in pixels; None returns ``maps``.
        nearest: give each pixel the score of the cell that its centre lies in instead of interpolating.
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
    """Draw a map ``[..., h, w]`` into a box of a canvas: bilinear, NaN outside the box that the model saw.

    A canvas pixel whose centre is at the fraction u of the box's height gets the value at row u · h − ½ of the map
    (between the centres of cells; constant beyond the outermost centres), likewise for columns. If the box is the
    canvas, this is :func:`resize`.

    Args:
        box: (left, top, right, bottom) in canvas pixels, possibly fractional; it may extend beyond the canvas.
        size: (height, width) of the canvas in pixels.
        seen: the box that the model saw; ``box`` by default.
        nearest: give each pixel the score of the cell that its centre lies in instead of interpolating.

    Returns:
        ``[..., height, width]`` float64, on the CPU.
    """
    left, top, right, bottom = box
    first, above, last, below = seen or box
    rows = _interpolation(map_.shape[-2], (top, bottom), (above, below), size[0], nearest)
    columns = _interpolation(map_.shape[-1], (left, right), (first, last), size[1], nearest)
    return rows @ map_.double().cpu() @ columns.T


def _interpolation(
    cells: int, span: tuple[float, float], seen: tuple[float, float], pixels: int, nearest: bool
) -> Tensor:
    """Return the weights ``[pixels, cells]`` that interpolate cells over a span; NaN for pixels outside ``seen``."""
    centers, (start, end) = torch.arange(pixels, dtype=torch.float64) + 0.5, span
    position = ((centers - start) / (end - start) * cells - 0.5).clamp(0, cells - 1)
    position = position.add(0.5).floor().clamp(max=cells - 1) if nearest else position
    below = position.floor().long().clamp(max=max(0, cells - 2))
    above = (below + 1).clamp(max=cells - 1)
    weights = torch.zeros(pixels, cells, dtype=torch.float64)
    index = torch.arange(pixels)
    weights[index, below] += 1 - (position - below)
    weights[index, above] += position - below
    return torch.where(((centers >= seen[0]) & (centers < seen[1]))[:, None], weights, torch.nan)


def gaussian_blur(pictures: Tensor, sigma: float, radius: int | None = None) -> Tensor:
    """Blur pictures ``[B, C, H, W]`` with a separable Gaussian kernel of sum 1, reflected at the edges.

    Args:
        sigma: σ in pixels; 0 returns the pictures unchanged.
        radius: radius of the kernel in pixels; 3σ by default, at most the side of a picture less 1.
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

"""Resize, place and blur maps, sum the scores of a sound over time, and unroll videos. All resizing of maps is here."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from whyformer.errors import InputError, check_count
from whyformer.explanation.geometry import Box

if TYPE_CHECKING:
    from whyformer.explanation.result import Explanation

_MOST = 50  # time intervals
_STEPS = [digit * 10.0**power for power in range(-2, 5) for digit in (1, 2, 5)]  # their lengths in seconds
BEHIND = "[PAD]"  # name of an interval after the end of a sound


def resize(maps: Tensor, size: tuple[int, int] | None, *, nearest: bool = False) -> Tensor:
    """Bilinear resize of ``[B, h, w]`` to ``[B, height, width]`` (Chefer et al. 2021, section 3.4).

    Args:
        maps: the maps.
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
        map_: the map.
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
        pictures: the pictures.
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


# -- time ------------------------------------------------------------------------------------------------------------
def over_time(e: Explanation, step: float | None = None) -> Explanation:
    """See :meth:`Explanation.over_time`."""
    if e.rate is None:
        raise InputError("over_time() is for sounds: the rate of these scores is unknown")
    count = e.scores.shape[1]
    durations = e.features.durations or [count / e.rate] * len(e)
    longest = count / e.rate  # including silence that a processor may have appended
    if step is None:
        step = next((s for s in _STEPS if longest / s <= _MOST and s * e.rate >= 1), _STEPS[-1])
    if not (math.isfinite(step) and step * e.rate >= 1):
        raise InputError(f"a step of {step} s is shorter than the time between two scores, {1 / e.rate:.4g} s")
    # the tolerance keeps rounding from adding an interval
    intervals = max(1, math.ceil(longest / step - 1e-9))
    interval = ((torch.arange(count, dtype=torch.float64) + 0.5) / (step * e.rate)).long().clamp(max=intervals - 1)
    scores = e.scores.new_zeros(len(e), intervals).index_add_(1, interval, e.scores)
    digits = next((d for d in range(4) if abs(round(step, d) - step) < 1e-9), 4)
    names = [f"{i * step:.{digits}f} s" for i in range(intervals)]
    tokens = [
        [name if i * step < duration or row[i] else BEHIND for i, name in enumerate(names)]
        for duration, row in zip(durations, scores.tolist(), strict=True)
    ]
    return replace(e, scores=scores, parts={}).with_features(tokens=tokens, rate=1 / step)


def unrolled(e: Explanation, columns: int | None = None) -> Explanation:
    """See :meth:`Explanation.unrolled`."""
    if e.frames is None:
        raise InputError("unrolled() is for videos: these scores have no time steps")
    columns = math.ceil(math.sqrt(2 * e.frames)) if columns is None else columns
    check_count("columns", columns)
    frames = [frame for i in range(e.frames) if (frame := e.frame(i).pictures) is not None]  # all, or none
    pictures = _side_by_side(torch.stack(frames, 1), columns) if frames else None
    scores = _side_by_side(e.heatmap()[..., None], columns)[..., 0]
    picture = replace(e, scores=scores, level="pixel", parts={})
    size = (int(scores.shape[1]), int(scores.shape[2]))
    dropped = dict.fromkeys(("frames", "grid", "cells", "read", "originals", "geometry"))
    return picture.with_features(**dropped, pictures=pictures, image_size=size)


def _side_by_side(steps: Tensor, columns: int) -> Tensor:
    """Arrange ``[B, T, H, W, C]`` as ``[B, rows · H, columns · W, C]``; the rest of the last row is 0."""
    columns = min(columns, steps.shape[1])
    missing = -steps.shape[1] % columns
    filled = torch.cat((steps, steps.new_zeros(len(steps), missing, *steps.shape[2:])), 1)
    return filled.unflatten(1, (-1, columns)).permute(0, 1, 3, 2, 4, 5).flatten(3, 4).flatten(1, 2)

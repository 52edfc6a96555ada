"""Measure which part of which picture each tile or packed patch shows, by feeding the processor ramps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from whyformer.errors import FOREIGN_ERRORS
from whyformer.explanation.geometry import Geometry
from whyformer.explanation.mosaic import Mosaic, Tile
from whyformer.inputs.geometry import fitted, ramp

Group = list[Image.Image]
Process = Callable[[Group], Tensor]


def measure_mosaic(process: Process, groups: list[Group], *, packed: bool) -> Mosaic | None:
    """Measure where the tiles or packed patches of each sample lie on its pictures.

    With one picture of a prompt white and the others black, the bright tiles or patches are those of that picture.
    Ramps then show which part of it each holds.

    Args:
        process: function from the pictures of one prompt to its tiles ``[T, C, H, W]`` or packed patches ``[P, D]``.
        groups: the pictures of each prompt.
        packed: whether these are packed patches.

    Returns:
        The mosaic, in which a picture may have no geometry; None if the processor fails on test pictures.
    """
    try:
        parts = [[_parts_of(process, group, k, packed) for k in range(len(group))] for group in groups]
    except FOREIGN_ERRORS:  # a processor may fail on test pictures
        return None
    return Mosaic(groups, places=parts) if packed else Mosaic(groups, tiles=parts)


def _parts_of(process: Process, group: Group, k: int, packed: bool) -> Any:
    """Measure the tiles or packed patches of picture ``k`` of a prompt."""
    size = (group[k].height, group[k].width)
    dark = [Image.new("RGB", p.size) for p in group]

    def processed(picture: Image.Image) -> NDArray[np.float64]:
        return np.asarray(process([*dark[:k], picture, *dark[k + 1 :]]).double().cpu())

    black, white = processed(dark[k]), processed(Image.new("RGB", group[k].size, (255, 255, 255)))
    bright = np.abs(white - black).reshape(len(black), -1).max(1)
    rows = np.flatnonzero(bright > 0.25 * bright.max())
    return _patches(processed, black, white, rows, size) if packed else _tiles(processed, black, white, rows, size)


def _tiles(process_picture: Any, black: Any, white: Any, rows: Any, size: tuple[int, int]) -> list[Tile]:
    """Measure the box of each tile (see :mod:`whyformer.inputs.geometry`); None for all if one has none."""

    def process(pictures: Group) -> Tensor:
        return torch.from_numpy(process_picture(pictures[0])[rows])

    spans = np.tile(np.array([[0.0, size[0]], [0.0, size[1]]]), (len(rows), 1, 1))
    edges = fitted(process, black[rows], white[rows], [size] * len(rows), spans)
    if np.isnan(edges).any():
        return [Tile(int(place), None) for place in rows]
    boxes = [(left, top, right, bottom) for (top, bottom), (left, right) in edges.tolist()]
    return [Tile(int(place), Geometry(size, box)) for place, box in zip(rows, boxes, strict=True)]


def _patches(
    process: Any, black: Any, white: Any, patches: Any, size: tuple[int, int]
) -> tuple[Tensor, Geometry | None]:
    """Measure the grid of the packed patches of a picture; the mean of a ramp over a patch is the patch's center.
    Return the patches in a line, and None, if they form no grid."""
    unknown = torch.from_numpy(patches)[None], None
    gain = (white - black)[patches]
    power = (gain**2).sum(1)
    centers = []
    for axis in (0, 1):
        processed = process(ramp(size, axis, np.array([0.0, size[axis]])))[patches]
        centers.append(((processed - black[patches]) * gain).sum(1) / power * size[axis])
    lines = [_lines(values) for values in centers]
    if any(line is None for line in lines):
        return unknown
    (down, rows), (across, columns) = lines
    if len(rows) * len(columns) != len(patches):
        return unknown
    places = np.full((len(rows), len(columns)), -1)
    places[down, across] = patches
    if (places < 0).any():
        return unknown
    (top, bottom), (left, right) = (_ends(line, length) for line, length in zip((rows, columns), size, strict=True))
    return torch.from_numpy(places), Geometry(size, (left, top, right, bottom))


def _lines(values: NDArray[Any]) -> Any:
    """Return (line of each value, positions of the lines); None if the lines are not evenly spaced."""
    order = np.argsort(values)
    gaps = np.diff(values[order])
    begins = gaps > 0.5 * gaps.max(initial=0)
    numbers = np.empty(len(values), int)
    numbers[order] = np.concatenate([[0], np.cumsum(begins)])
    lines = np.array([values[numbers == n].mean() for n in range(numbers.max() + 1)])
    steps = np.diff(lines)
    off = steps - np.median(steps) if steps.size else np.zeros(1)
    off[-1] = max(off[-1], 0) if steps.size > 1 else off[-1]  # the last patch may be partly padding
    even = not steps.size or np.abs(off).max() < 0.25 * np.median(steps)
    return (numbers, lines) if even else None


def _ends(line: NDArray[Any], length: int) -> tuple[float, float]:
    """Return where the first cell begins and the last ends; resampling bends a ramp at the borders of the picture."""
    steps = np.diff(line)
    if len(line) > 2 and steps[-1] < 0.75 * steps[:-1].mean():  # padding after the picture
        return 0.0, float(steps[:-1].mean() * len(line))
    if len(line) < 4:
        return 0.0, float(length)
    step, start = np.polyfit(np.arange(1, len(line) - 1), line[1:-1], 1)
    first, last = start - step / 2, start + step * (len(line) - 0.5)
    return (
        (0.0, float(length)) if abs(first) < step / 4 and abs(last - length) < step / 4 else (float(first), float(last))
    )

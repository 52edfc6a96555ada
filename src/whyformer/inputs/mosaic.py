"""Which part of which picture each tile or packed patch shows, measured by feeding the processor ramps."""

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


def measure_mosaic(process: Process, groups: list[Group], shape: torch.Size) -> Mosaic | None:
    """What the processor made of the pictures of each sample; None where it cannot be told.

    One picture of a prompt is made white and the others black: what brightens shows that picture. Ramps then tell which
    part.

    Args:
        process: the pictures of one prompt -> its tiles ``[T, C, H, W]`` or packed patches ``[P, D]``.
        shape: of what the model is fed, ``[B, T, C, H, W]``, ``[B · T, C, H, W]`` or ``[B · P, D]``.
    """
    packed = len(shape) == 2
    found: list[list[Any]] = []
    try:
        for group in groups:
            own = [_of(process, group, k, packed) for k in range(len(group))]
            if any(one is None for one in own):
                return None
            found.append(own)
    except FOREIGN_ERRORS:  # a processor may fail on pictures that are not what it is made for
        return None
    return Mosaic(groups, places=found) if packed else Mosaic(groups, tiles=found)


def _of(process: Process, group: Group, k: int, packed: bool) -> Any:
    """The tiles or the packed patches of one picture of a prompt."""
    size = (group[k].height, group[k].width)
    dark = [Image.new("RGB", p.size) for p in group]

    def shown(picture: Image.Image) -> NDArray[np.float64]:
        return np.asarray(process([*dark[:k], picture, *dark[k + 1 :]]).double().cpu())

    black, white = shown(dark[k]), shown(Image.new("RGB", group[k].size, (255, 255, 255)))
    bright = np.abs(white - black).reshape(len(black), -1).max(1)
    mine = np.flatnonzero(bright > 0.25 * bright.max())
    return _patches(shown, black, white, mine, size) if packed else _tiles(shown, black, white, mine, size)


def _tiles(shown: Any, black: Any, white: Any, mine: Any, size: tuple[int, int]) -> list[Tile] | None:
    """Each tile's box, as for one picture (:mod:`whyformer.inputs.geometry`)."""

    def process(pictures: Group) -> Tensor:
        return torch.from_numpy(shown(pictures[0])[mine])

    spans = np.tile(np.array([[0.0, size[0]], [0.0, size[1]]]), (len(mine), 1, 1))
    edges = fitted(process, black[mine], white[mine], [size] * len(mine), spans)
    if edges is None:
        return None
    boxes = [(left, top, right, bottom) for (top, bottom), (left, right) in edges.tolist()]
    return [Tile(int(place), Geometry(size, box)) for place, box in zip(mine, boxes, strict=True)]


def _patches(shown: Any, black: Any, white: Any, mine: Any, size: tuple[int, int]) -> tuple[Tensor, Geometry] | None:
    """Rows of packed patches as they lie on the picture: the mean of a ramp over a patch is its middle."""
    gain = (white - black)[mine]
    power = (gain**2).sum(1)
    middles = []
    for axis in (0, 1):
        seen = shown(ramp(size, axis, np.array([0.0, size[axis]])))[mine]
        middles.append(((seen - black[mine]) * gain).sum(1) / power * size[axis])
    lines = [_lines(values) for values in middles]
    if any(one is None for one in lines):
        return None
    (down, rows), (across, columns) = lines
    if len(rows) * len(columns) != len(mine):
        return None
    places = np.full((len(rows), len(columns)), -1)
    places[down, across] = mine
    if (places < 0).any():
        return None
    (top, bottom), (left, right) = (_ends(line, length) for line, length in zip((rows, columns), size, strict=True))
    return torch.from_numpy(places), Geometry(size, (left, top, right, bottom))


def _lines(values: NDArray[Any]) -> Any:
    """(which line each value is on, the lines); None where they do not lie on even lines."""
    order = np.argsort(values)
    gaps = np.diff(values[order])
    begins = gaps > 0.5 * gaps.max(initial=0)
    numbers = np.empty(len(values), int)
    numbers[order] = np.concatenate([[0], np.cumsum(begins)])
    lines = np.array([values[numbers == n].mean() for n in range(numbers.max() + 1)])
    steps = np.diff(lines)
    off = steps - np.median(steps) if steps.size else np.zeros(1)
    off[-1] = max(off[-1], 0) if steps.size > 1 else off[-1]  # the picture may fill but a part of the last
    even = not steps.size or np.abs(off).max() < 0.25 * np.median(steps)
    return (numbers, lines) if even else None


def _ends(line: NDArray[Any], length: int) -> tuple[float, float]:
    """Where the first cell begins and the last ends; resampling bends a ramp at the borders of the picture."""
    steps = np.diff(line)
    if len(line) > 2 and steps[-1] < 0.75 * steps[:-1].mean():  # filled up behind the picture
        return 0.0, float(steps[:-1].mean() * len(line))
    if len(line) < 4:
        return 0.0, float(length)
    step, start = np.polyfit(np.arange(1, len(line) - 1), line[1:-1], 1)
    first, last = start - step / 2, start + step * (len(line) - 0.5)
    return (
        (0.0, float(length)) if abs(first) < step / 4 and abs(last - length) < step / 4 else (float(first), float(last))
    )

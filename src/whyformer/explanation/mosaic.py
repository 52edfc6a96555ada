"""Combine the scores of tiles or packed patches into one map for each original picture."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch import Tensor

from whyformer.errors import InputError
from whyformer.explanation.geometry import Box, Geometry

if TYPE_CHECKING:
    from whyformer.explanation.result import Explanation


@dataclass(frozen=True, eq=False)
class Tile:
    """A tile of a picture: its index among the tiles of the input, and its position on the picture; None if unknown."""

    place: int
    geometry: Geometry | None


@dataclass(frozen=True, eq=False)
class Mosaic:
    """How a processor split the pictures of each sample.

    Attributes:
        pictures: ``[sample][k]`` the original pictures of each prompt.
        tiles: ``[sample][k]`` the tiles of each picture, if the processor cut tiles. Tiles may overlap: a thumbnail of
            the whole picture may stand beside enlarged parts.
        places: ``[sample][k]`` (indices ``[r, c]`` of the packed patches in the order in which they lie on the picture,
            their geometry), if the processor packed patches; (indices ``[1, n]``, None) if it is unknown how they lie.
    """

    pictures: list[list[Image.Image]]
    tiles: list[list[list[Tile]]] | None = None
    places: list[list[tuple[Tensor, Geometry | None]]] | None = None

    def layout(self, sample: int) -> Hashable:
        """Return how the pictures of a sample were split; samples of equal layouts have maps of the same grids."""
        if self.places is not None:
            return tuple(rows.shape for rows, _ in self.places[sample])
        return tuple(tuple(tile.geometry for tile in tiles) for tiles in (self.tiles or [])[sample])


def on_pictures(e: Explanation, mosaic: Mosaic) -> dict[str, Explanation] | None:
    """Return an explanation for each picture of a prompt, named ``name`` or ``name[k]``.

    The scores of a tile's cells are distributed over the cells of the finest tile in proportion to the shared area,
    which preserves their sum. Pictures of different grids are brought to a common grid, with the largest number of
    rows and of columns, in the same way. A picture on which the position of its tiles or patches is unknown has no
    geometry: its tiles stand one below the other, or its patches in a line.

    Returns:
        The explanations by name; None if the samples have different numbers of pictures.
    """
    counts = {len(pictures) for pictures in mosaic.pictures}
    if len(counts) != 1:
        return None
    explanations: dict[str, Explanation] = {}
    count = counts.pop()
    for k in range(count):
        placed = [_packed(e, mosaic, i, k) if mosaic.places else _tiled(e, mosaic, i, k) for i in range(len(e))]
        maps = [p[0] for p in placed if p is not None]
        geometry = [p[1] for p in placed if p is not None]
        if len(maps) < len(placed):
            return None
        high, wide = (max(m.shape[axis] for m in maps) for axis in (0, 1))
        scores = torch.stack([spread(m, high, wide) for m in maps]).to(e.scores)
        level = "pixel" if e.level == "pixel" else "patch"
        features = replace(
            e.features, tokens=None, frames=None, pictures=None, cells=None, read=None,
            image_size=None if level == "patch" else (high, wide), grid=(high, wide) if level == "patch" else None,
            originals=[p[k] if g else None for p, g in zip(mosaic.pictures, geometry, strict=True)], geometry=geometry,
        )  # fmt: skip
        features = features if any(geometry) else replace(features, originals=None, geometry=None)
        name = (e.input or "") if count == 1 else f"{e.input}[{k}]"
        flat = scores if level == "pixel" else scores.flatten(1)
        explanations[name] = replace(e, scores=flat, level=level, features=features, input=name)
    return explanations


def on_patches(e: Explanation, mosaic: Mosaic, patches: int) -> Tensor:
    """Return the scores ``[B, patches]`` of the packed patches of one picture per sample, 0 for padding: the inverse of
    :func:`on_pictures`.

    Raises:
        InputError: the maps are on another grid.
    """
    scores = torch.zeros(len(e), patches, dtype=e.scores.dtype)
    for i, ((rows, _),) in enumerate(mosaic.places or []):
        if e.grid != rows.shape:
            raise InputError("the maps of several pictures of other shapes share one grid: pass one picture at a time")
        scores[i, rows.flatten()] = e.scores[i]
    return scores


def _packed(e: Explanation, mosaic: Mosaic, sample: int, k: int) -> tuple[Tensor, Geometry | None] | None:
    assert mosaic.places is not None
    rows, geometry = mosaic.places[sample][k]
    return (e.scores[sample][rows], geometry) if int(rows.max()) < e.scores.shape[1] else None


def _tiled(e: Explanation, mosaic: Mosaic, sample: int, k: int) -> tuple[Tensor, Geometry | None] | None:
    assert mosaic.tiles is not None
    maps = e.scores[sample] if e.level == "pixel" else e.scores[sample].reshape(-1, *(e.grid or (0, 0)))
    maps = maps[None] if maps.dim() == 2 else maps.flatten(0, -3)  # join the tiles of several pictures
    tiles = mosaic.tiles[sample][k]
    if not tiles or max(tile.place for tile in tiles) >= len(maps):
        return None
    size, cells = e.image_size or (1, 1), e.features.cells
    pieces = [
        (maps[tile.place].double(), replace(g, box=g.part(cells, size))) for tile in tiles if (g := tile.geometry)
    ]
    if len(pieces) < len(tiles):
        return torch.cat([maps[tile.place] for tile in tiles]).double(), None
    return composed(pieces)


def composed(pieces: list[tuple[Tensor, Geometry]]) -> tuple[Tensor, Geometry]:
    """Add the maps of parts of one picture into one (map ``[r, c]``, geometry); the sum of scores is preserved."""
    boxes = [geometry.box for _, geometry in pieces]
    bounds: Box = (
        min(b[0] for b in boxes), min(b[1] for b in boxes), max(b[2] for b in boxes), max(b[3] for b in boxes)
    )  # fmt: skip
    lines = []
    for axis in (1, 0):  # rows, then columns
        steps = [(b[axis + 2] - b[axis]) / m.shape[1 - axis] for (m, _), b in zip(pieces, boxes, strict=True)]
        count = max(1, round((bounds[axis + 2] - bounds[axis]) / min(steps)))
        lines.append(torch.linspace(bounds[axis], bounds[axis + 2], count + 1, dtype=torch.float64))
    down, across = lines
    total = torch.zeros(len(down) - 1, len(across) - 1, dtype=torch.float64)
    for (map_, _), (left, top, right, bottom) in zip(pieces, boxes, strict=True):
        total += _shares(map_.shape[0], top, bottom, down) @ map_ @ _shares(map_.shape[1], left, right, across).T
    return total, Geometry(pieces[0][1].size, bounds)


def spread(map_: Tensor, high: int, wide: int) -> Tensor:
    """Distribute a map over a finer grid ``[high, wide]`` of the same area; the sum of scores is preserved."""
    if map_.shape == (high, wide):
        return map_
    rows, columns = map_.shape
    down = _shares(rows, 0, rows, torch.linspace(0, rows, high + 1, dtype=torch.float64))
    across = _shares(columns, 0, columns, torch.linspace(0, columns, wide + 1, dtype=torch.float64))
    return down @ map_.double() @ across.T


def _shares(cells: int, start: float, end: float, lines: Tensor) -> Tensor:
    """Return ``[n, cells]``, the share of each cell of a map that lies between each two adjacent lines."""
    edges = torch.linspace(start, end, cells + 1, dtype=torch.float64)
    low, high = torch.maximum(edges[None, :-1], lines[:-1, None]), torch.minimum(edges[None, 1:], lines[1:, None])
    return (high - low).clamp(min=0) / (edges[1] - edges[0])

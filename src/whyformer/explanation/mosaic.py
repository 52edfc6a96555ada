"""From what a processor cut pictures into (tiles, packed patches) back to one map on each picture."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch import Tensor

from whyformer.explanation.geometry import Geometry

if TYPE_CHECKING:
    from whyformer.explanation.result import Explanation

Box = tuple[float, float, float, float]


@dataclass(frozen=True, eq=False)
class Tile:
    """A piece of a picture: which of the input's (its place along the tiles), and where it lies on the picture."""

    place: int
    geometry: Geometry


@dataclass(frozen=True, eq=False)
class Mosaic:
    """What a processor made of the pictures of each sample, measured.

    Attributes:
        pictures: ``[sample][k]`` the pictures of each prompt.
        tiles: ``[sample][k]`` the pieces of each, where it cut them into tiles; several may show the same part, as a
            small view of the whole picture beside enlarged parts does.
        places: ``[sample][k]`` (rows ``[r, c]`` of packed patches as they lie on the picture, the geometry), where it
            packed patches.
    """

    pictures: list[list[Image.Image]]
    tiles: list[list[list[Tile]]] | None = None
    places: list[list[tuple[Tensor, Geometry]]] | None = None


def on_pictures(e: Explanation, mosaic: Mosaic) -> dict[str, Explanation] | None:
    """An explanation for each picture of a prompt, called ``name`` or ``name[k]``; None where the samples have unlike
    numbers of pictures.

    The scores of a tile's cells are spread over the cells of the finest tile by the area that they share, so their sum
    is kept; so are those of pictures that have unlike grids, over one with as many rows and columns as any of them.
    """
    counts = {len(own) for own in mosaic.pictures}
    if len(counts) != 1:
        return None
    made: dict[str, Explanation] = {}
    count = counts.pop()
    for k in range(count):
        laid = [_packed(e, mosaic, i, k) if mosaic.places else _tiled(e, mosaic, i, k) for i in range(len(e))]
        maps = [one[0] for one in laid if one is not None]
        if len(maps) < len(laid):
            return None
        high, wide = (max(m.shape[axis] for m in maps) for axis in (0, 1))
        scores = torch.stack([spread(m, high, wide) for m in maps]).to(e.scores)
        level = "pixel" if e.level == "pixel" else "patch"
        features = replace(
            e.features, tokens=None, frames=None, pictures=None, cells=None, read=None,
            image_size=None if level == "patch" else (high, wide), grid=(high, wide) if level == "patch" else None,
            originals=[own[k] for own in mosaic.pictures], geometry=[one[1] for one in laid if one is not None],
        )  # fmt: skip
        name = (e.input or "") if count == 1 else f"{e.input}[{k}]"
        flat = scores if level == "pixel" else scores.flatten(1)
        made[name] = replace(e, scores=flat, level=level, features=features, input=name)
    return made


def _packed(e: Explanation, mosaic: Mosaic, sample: int, k: int) -> tuple[Tensor, Geometry] | None:
    assert mosaic.places is not None
    rows, geometry = mosaic.places[sample][k]
    return (e.scores[sample][rows], geometry) if int(rows.max()) < e.scores.shape[1] else None


def _tiled(e: Explanation, mosaic: Mosaic, sample: int, k: int) -> tuple[Tensor, Geometry] | None:
    assert mosaic.tiles is not None
    maps = e.scores[sample] if e.level == "pixel" else e.scores[sample].reshape(-1, *(e.grid or (0, 0)))
    maps = maps[None] if maps.dim() == 2 else maps.flatten(0, -3)  # tiles of several pictures
    tiles = mosaic.tiles[sample][k]
    if not tiles or max(tile.place for tile in tiles) >= len(maps):
        return None
    size, cells = e.image_size or (1, 1), e.features.cells
    own = [replace(tile.geometry, box=tile.geometry.part(cells, size)) for tile in tiles]
    return composed([(maps[tile.place].double(), geometry) for tile, geometry in zip(tiles, own, strict=True)])


def composed(pieces: list[tuple[Tensor, Geometry]]) -> tuple[Tensor, Geometry]:
    """(map ``[r, c]``, its geometry) of pieces that show parts of one picture, their sum being kept."""
    boxes = [geometry.box for _, geometry in pieces]
    whole: Box = (
        min(b[0] for b in boxes), min(b[1] for b in boxes), max(b[2] for b in boxes), max(b[3] for b in boxes)
    )  # fmt: skip
    lines = []
    for axis in (1, 0):  # rows, then columns
        steps = [(b[axis + 2] - b[axis]) / m.shape[1 - axis] for (m, _), b in zip(pieces, boxes, strict=True)]
        count = max(1, round((whole[axis + 2] - whole[axis]) / min(steps)))
        lines.append(torch.linspace(whole[axis], whole[axis + 2], count + 1, dtype=torch.float64))
    down, across = lines
    made = torch.zeros(len(down) - 1, len(across) - 1, dtype=torch.float64)
    for (map_, _), (left, top, right, bottom) in zip(pieces, boxes, strict=True):
        made += _shares(map_.shape[0], top, bottom, down) @ map_ @ _shares(map_.shape[1], left, right, across).T
    return made, Geometry(pieces[0][1].size, whole)


def spread(map_: Tensor, high: int, wide: int) -> Tensor:
    """A map on more cells of the same place, ``[high, wide]``, its sum being kept."""
    if map_.shape == (high, wide):
        return map_
    rows, columns = map_.shape
    down = _shares(rows, 0, rows, torch.linspace(0, rows, high + 1, dtype=torch.float64))
    across = _shares(columns, 0, columns, torch.linspace(0, columns, wide + 1, dtype=torch.float64))
    return down @ map_.double() @ across.T


def _shares(cells: int, start: float, end: float, lines: Tensor) -> Tensor:
    """``[n, cells]`` which share of each of a piece's cells lies between each two lines."""
    edges = torch.linspace(start, end, cells + 1, dtype=torch.float64)
    low, high = torch.maximum(edges[None, :-1], lines[:-1, None]), torch.minimum(edges[None, 1:], lines[1:, None])
    return (high - low).clamp(min=0) / (edges[1] - edges[0])

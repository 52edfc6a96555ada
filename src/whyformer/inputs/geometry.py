"""Where a processor put a picture, measured: feed it two ramps of the picture's size and fit the box they show.

Black and white pictures tell how brightness comes out of the processor, and where nothing of the picture does
(padding); a ramp from left to right and one from top to bottom then tell of each input pixel which place it shows.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from whyformer.errors import FOREIGN_ERRORS
from whyformer.explanation.geometry import Geometry
from whyformer.inputs.settings import settings_of

Process = Callable[[list[Image.Image]], Tensor]
Size = tuple[int, int]
Span = tuple[float, float]
_SQUASHED, _ENLARGED = 1.5, 16.0
_LEAST = 4  # pixels of a side on which a ramp can be seen
# rows of a ramp are rounded at 8 different levels, so that their mean is the ramp itself
_ROUNDING = np.array([0, 4, 2, 6, 1, 5, 3, 7])[:, None] / 8


_KNOWN: OrderedDict[Hashable, list[Geometry] | None] = OrderedDict()  # (settings of a processor, sizes) -> geometry
_MOST_KNOWN = 256


def measure_geometry(process: Process, sizes: Sequence[Size]) -> list[Geometry] | None:
    """The geometry of pictures of these (height, width), in one batch; None where it is no box for any of them.

    A box is where columns and rows of the input show places that grow evenly: no rotation, mirroring or warping,
    nothing random. Most edges come out to the pixel, because pictures are resized to whole pixels and cropped by
    whole ones; all are within a pixel of the original, or half a one of the input where those are larger. Where much
    is cropped, ramps over the part that is seen are fed once more, as 256 levels of brightness tell less of a large
    picture.

    It is measured once for a processor and these sizes, as long as the processor's settings stay what they are; each
    time if they cannot be told. Where random numbers are drawn, several measurements must agree.

    Args:
        process: pictures -> ``[B, C, H, W]`` of the model's input.
    """
    settings = settings_of(process)
    key = settings, tuple(sizes)
    if settings is not None:
        with suppress(KeyError):
            return _KNOWN[key]
    before = _random_state()
    found = _measured(process, sizes)
    if _random_state() != before:
        return found if found is not None and all(_measured(process, sizes) == found for _ in range(2)) else None
    if settings is not None:
        _KNOWN[key] = found
        while len(_KNOWN) > _MOST_KNOWN:
            _KNOWN.popitem(last=False)
    return found


def _random_state() -> Hashable:
    """The state of the generators from which random numbers are drawn."""
    name, keys, *rest = np.random.get_state()
    return random.getstate(), torch.get_rng_state().numpy().tobytes(), name, np.asarray(keys).tobytes(), tuple(rest)


def _measured(process: Process, sizes: Sequence[Size]) -> list[Geometry] | None:
    different = list(dict.fromkeys(sizes))
    if min(map(min, different)) < _LEAST:
        return None
    lengths = np.array(different, dtype=float)
    try:
        black, white = (
            _fed(process, [Image.new("RGB", (wide, high), (level,) * 3) for high, wide in different])
            for level in (0, 255)
        )
        if black.ndim != 4 or white.shape != black.shape or len(black) != len(different):
            return None
        found = fitted(process, black, white, different, np.stack([0 * lengths, lengths], -1))
        if found is not None and ((found[..., 1] - found[..., 0]) / lengths).min() < 0.75:
            found = fitted(process, black, white, different, found)
    except FOREIGN_ERRORS:  # a processor of the user's own may fail on pictures that are not what it is made for
        return None
    if found is None:
        return None
    edges = dict(zip(different, found.tolist(), strict=True))
    return [Geometry(s, (left, top, right, bottom)) for s in sizes for (top, bottom), (left, right) in [edges[s]]]


def told(size: Size, seen: Size, geometry: Geometry | None) -> list[str]:
    """What happened to a picture's shape that a map does not show: its sides scaled unlike, or hardly any pixels.

    Args:
        size: (height, width) of the picture; seen: of the model's input; geometry: where that lies on it, if known.
    """
    left, top, right, bottom = (0, 0, size[1], size[0]) if geometry is None else geometry.box
    down, across = seen[0] / (bottom - top), seen[1] / (right - left)
    was, now, said = f"{size[1]}×{size[0]}", f"{seen[1]}×{seen[0]}", []
    if max(down, across) > _SQUASHED * min(down, across):
        ratio = max(down, across) / min(down, across)
        said.append(
            f"the picture was squeezed: {was} pixels became {now}, so that shapes are {ratio:.1f}:1 out of true"
        )
    if min(down, across) > _ENLARGED:
        said.append(f"a picture of {was} pixels was enlarged to {now}: what the model sees of it is a few flat fields")
    return said


def _fed(process: Process, pictures: list[Image.Image]) -> NDArray[np.float64]:
    return np.asarray(process(pictures).double().cpu())


def ramp(size: Size, axis: int, span: NDArray[Any]) -> Image.Image:
    """Brightness from 0 to 255 along a span of an axis (0: from top to bottom), and the same before and behind it."""
    along, beside = size[axis], size[1 - axis]
    line = 255 * (np.arange(along) + 0.5 - span[0]) / (span[1] - span[0])
    rows = np.floor(line.clip(0, 255) + _ROUNDING).clip(max=255).astype(np.uint8)
    table = np.tile(rows, (-(-beside // len(rows)), 1))[:beside]
    return Image.fromarray(np.ascontiguousarray(table if axis == 1 else table.T)).convert("RGB")


def fitted(
    process: Process, black: NDArray[Any], white: NDArray[Any], sizes: list[Size], spans: NDArray[Any]
) -> NDArray[Any] | None:
    """``[P, 2, 2]`` for each size where the input starts and ends, (top, bottom) and (left, right), by ramps over
    these spans and an eighth more on either side."""
    margin = (spans[..., 1:] - spans[..., :1]) / 8 * [-1, 1]
    near = np.clip(spans + margin, 0, np.array(sizes, dtype=float)[..., None])
    ramps = [_fed(process, [ramp(size, axis, span[axis]) for size, span in zip(sizes, near, strict=True)])
             for axis in (0, 1)]  # fmt: skip
    if any(ramp.shape != black.shape for ramp in ramps):
        return None
    found = np.empty_like(near)
    for i, axis in np.ndindex(len(sizes), 2):
        gain = white[i] - black[i]
        power = (gain**2).sum(0)
        inside = power > 0.25 * power.max()
        # least squares over channels: which share of the way from black to white, NaN where nothing is to be seen
        share = np.where(inside, ((ramps[axis][i] - black[i]) * gain).sum(0) / np.where(inside, power, 1), np.nan)
        one = _fit(share if axis == 0 else share.T, near[i, axis], sizes[i][axis])
        if one is None:
            return None
        found[i, axis] = one
    return found


def _fit(shares: NDArray[Any], span: NDArray[Any], length: int) -> Span | None:
    """Where an input of n rows starts and ends on ``length`` pixels, from the shares ``[n, m]`` of a span it shows."""
    seen = ~np.isnan(shares).all(1)
    line = np.full(len(shares), np.nan)
    line[seen] = np.nanmean(shares[seen], 1)
    # resampling bends a ramp at the border of the picture
    even = seen & (line > 0.1) & (line < 0.9)
    chosen = even if even.sum() > 3 else seen
    if chosen.sum() < 2 or np.nanmean(np.abs(shares - line[:, None])) > 0.02:
        return None
    level = (span[1] - span[0]) / 255
    at, places = np.arange(len(line)) + 0.5, span[0] + line * 255 * level
    step, start = np.polyfit(at[chosen], places[chosen], 1)
    if not step > 0 or np.abs(places - start - step * at)[chosen].max() > 1 + step + 1.5 * level:
        return None
    fitted = (float(start), float(start + step * len(line)))
    # pictures are resized to whole pixels, and cropped and padded by whole ones, before or after
    whole = max(1, round(length / step))
    first = round(start * whole / length)
    after = (first * length / whole, (first + len(line)) * length / whole)
    before = (float(round(fitted[0])), float(round(fitted[1])))
    ends = at[seen][[0, -1]]
    off = [float(np.abs(a + (b - a) * ends / len(line) - start - step * ends).max()) for a, b in (after, before)]
    close = 0.05 * step + 0.5 * level
    return after if off[0] <= close else before if off[1] <= close else fitted

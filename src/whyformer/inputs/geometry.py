"""Where a processor put a picture, measured: feed it two ramps of the picture's size and fit the box they show.

Black and white pictures tell how brightness comes out of the processor, and where nothing of the picture does
(padding); a ramp from left to right and one from top to bottom then tell of each input pixel which place it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from whyformer.explanation.geometry import Geometry

Process = Callable[[list[Image.Image]], Tensor]
Size = tuple[int, int]
Span = tuple[float, float]
# rows of a ramp are rounded at 8 different levels, so that their mean is the ramp itself
_ROUNDING = np.array([0, 4, 2, 6, 1, 5, 3, 7])[:, None] / 8


def measure_geometry(process: Process, sizes: Sequence[Size]) -> list[Geometry] | None:
    """The geometry of pictures of these (height, width), in one batch; None where it is no box for any of them.

    A box is where columns and rows of the input show places that grow evenly: no rotation, mirroring or warping,
    nothing random. Most edges come out to the pixel, because pictures are resized to whole pixels and cropped by
    whole ones; all are within a pixel of the original, or half a one of the input where those are larger. Where much
    is cropped, ramps over the part that is seen are fed once more, as 256 levels of brightness tell less of a large
    picture.

    Args:
        process: pictures -> ``[B, C, H, W]`` of the model's input.
    """
    different = list(dict.fromkeys(sizes))
    spans: list[tuple[Span, Span]] = [((0.0, float(height)), (0.0, float(width))) for height, width in different]
    try:
        black, white = (_fed(process, [_flat(size, level) for size in different]) for level in (0, 255))
        if black.ndim != 4 or white.shape != black.shape or len(black) != len(different):
            return None
        found = _fitted(process, black, white, different, spans)
        if found is not None and _much_is_cropped(found, different):
            found = _fitted(process, black, white, different, found)
    except Exception:  # a processor of the user's own may fail on pictures that are not what it is made for
        return None
    if found is None:
        return None
    edges = dict(zip(different, found, strict=True))
    return [Geometry(s, (edges[s][1][0], edges[s][0][0], edges[s][1][1], edges[s][0][1])) for s in sizes]


def _much_is_cropped(spans: list[tuple[Span, Span]], sizes: list[Size]) -> bool:
    pairs = ((span[axis], size[axis]) for span, size in zip(spans, sizes, strict=True) for axis in (0, 1))
    return min((end - start) / length for (start, end), length in pairs) < 0.75


def _fed(process: Process, pictures: list[Image.Image]) -> NDArray[np.float64]:
    return np.asarray(process(pictures).double().cpu())


def _flat(size: Size, level: int) -> Image.Image:
    return Image.new("RGB", size[::-1], (level, level, level))


def _ramp(size: Size, axis: int, span: Span) -> Image.Image:
    """Brightness from 0 to 255 along a span of an axis (0: from top to bottom), and the same before and behind it."""
    along, beside = size[axis], size[1 - axis]
    line = 255 * (np.arange(along) + 0.5 - span[0]) / (span[1] - span[0])
    rows = np.floor(line.clip(0, 255) + _ROUNDING).clip(max=255).astype(np.uint8)
    table = np.tile(rows, (-(-beside // len(rows)), 1))[:beside]
    return Image.fromarray(np.ascontiguousarray(table if axis == 1 else table.T)).convert("RGB")


def _fitted(
    process: Process, black: NDArray[Any], white: NDArray[Any], sizes: list[Size], spans: list[tuple[Span, Span]]
) -> list[tuple[Span, Span]] | None:
    """For each size where the input starts and ends, (top, bottom) and (left, right), by ramps over these spans."""
    pairs = list(zip(sizes, spans, strict=True))
    ramps = [_fed(process, [_ramp(s, axis, _near(span[axis], s[axis])) for s, span in pairs]) for axis in (0, 1)]
    if any(ramp.shape != black.shape for ramp in ramps):
        return None
    found = []
    for i, (size, span) in enumerate(pairs):
        gain = white[i] - black[i]
        power = (gain**2).sum(0)
        inside = power > 0.25 * power.max()
        edges = []
        for axis in (0, 1):
            # least squares over channels: which share of the way from black to white, NaN where nothing is to be seen
            share = np.where(inside, ((ramps[axis][i] - black[i]) * gain).sum(0) / np.where(inside, power, 1), np.nan)
            one = _fit(share if axis == 0 else share.T, _near(span[axis], size[axis]), size[axis])
            if one is None:
                return None
            edges.append(one)
        found.append((edges[0], edges[1]))
    return found


def _near(span: Span, length: int) -> Span:
    """The span with a little more on both sides, within the picture."""
    margin = (span[1] - span[0]) / 8
    return max(0.0, span[0] - margin), min(float(length), span[1] + margin)


def _fit(shares: NDArray[Any], span: Span, length: int) -> Span | None:
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

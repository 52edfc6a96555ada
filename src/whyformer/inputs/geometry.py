"""Measure which part of a picture a processor passes to the model, by feeding it test pictures.

Black and white pictures show the range of the processor's output and where it holds padding; a left-to-right and a
top-to-bottom brightness ramp then show which place of the picture each input pixel is from. A box is fitted to these
places.
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
Places = list[Geometry | None]
_SQUASHED, _ENLARGED = 1.5, 16.0
_LEAST = 4  # the shortest side in pixels for which a ramp can be measured
# rows of a ramp are rounded with 8 different offsets, so that their mean is the unrounded ramp
_ROUNDING = np.array([0, 4, 2, 6, 1, 5, 3, 7])[:, None] / 8


_KNOWN: OrderedDict[Hashable, Places] = OrderedDict()  # (settings of a processor, sizes) -> geometry
_MOST_KNOWN = 256


def picture_features(process: Process, pictures: Sequence[Image.Image]) -> dict[str, Any]:
    """Return fields of Features: the originals and their geometry, None for a picture without a box."""
    geometry = measure_geometry(process, [(p.height, p.width) for p in pictures])
    originals = [None if g is None else p for p, g in zip(pictures, geometry, strict=True)]
    return {"originals": originals, "geometry": geometry} if any(geometry) else {}


def measure_geometry(process: Process, sizes: Sequence[Size]) -> Places:
    """Measure the geometry of pictures of these (height, width), processed in one batch.

    A picture has a box if the rows and columns of the input show evenly spaced places of it: no rotation, mirroring,
    warping or random transforms. Most edges are exact, because pictures are resized to whole pixels and cropped by
    whole pixels; all are within a pixel of the original, or half a pixel of the input where that is larger. If much is
    cropped, ramps over the visible part are measured once more, because 256 brightness levels resolve a large picture
    coarsely.

    Results are cached by the processor's settings and the sizes; without known settings nothing is cached. If the
    processor draws random numbers, several measurements must agree.

    Args:
        process: function from pictures to the model's input ``[B, C, H, W]``.
        sizes: (height, width) of each picture.

    Returns:
        The geometry of each picture; None for a picture without a box.
    """
    settings = settings_of(process)
    key = settings, tuple(sizes)
    if settings is not None:
        with suppress(KeyError):
            return _KNOWN[key]
    before = _random_state()
    measured = _measured(process, sizes)
    if _random_state() != before:
        repeats = [_measured(process, sizes) for _ in range(2)]
        return [g if g == a == b else None for g, a, b in zip(measured, *repeats, strict=True)]
    if settings is not None:
        _KNOWN[key] = measured
        while len(_KNOWN) > _MOST_KNOWN:
            _KNOWN.popitem(last=False)
    return measured


def _random_state() -> Hashable:
    """Return the state of the random number generators of Python, NumPy and torch."""
    name, keys, *rest = np.random.get_state()
    return random.getstate(), torch.get_rng_state().numpy().tobytes(), name, np.asarray(keys).tobytes(), tuple(rest)


def _measured(process: Process, sizes: Sequence[Size]) -> Places:
    unique = list(dict.fromkeys(sizes))
    lengths = np.array(unique, dtype=float)
    spans, short = np.full((len(unique), 2, 2), np.nan), lengths.min(1) < _LEAST
    if not short.all():
        with suppress(*FOREIGN_ERRORS):  # a user's processor may fail on test pictures
            spans = np.where(short[:, None, None], np.nan, _spans(process, unique, lengths))
    edges = {size: None if np.isnan(span).any() else span.tolist() for size, span in zip(unique, spans, strict=True)}
    return [None if (e := edges[s]) is None else Geometry(s, (e[1][0], e[0][0], e[1][1], e[0][1])) for s in sizes]


def _spans(process: Process, sizes: list[Size], lengths: NDArray[Any]) -> NDArray[Any]:
    """Return ``[P, 2, 2]`` (top, bottom) and (left, right) of pictures of different sizes; NaN without a box."""
    black, white = (
        _fed(process, [Image.new("RGB", (wide, high), (level,) * 3) for high, wide in sizes]) for level in (0, 255)
    )
    full = np.stack([0 * lengths, lengths], -1)
    if black.ndim != 4 or white.shape != black.shape or len(black) != len(sizes):
        return full * np.nan
    spans = fitted(process, black, white, sizes, full)
    cropped = (((spans[..., 1] - spans[..., 0]) / lengths).min(1) < 0.75)[:, None, None]
    if cropped.any():
        spans = np.where(cropped, fitted(process, black, white, sizes, np.where(cropped, spans, full)), spans)
    return spans


def distortions(size: Size, model_size: Size, geometry: Geometry | None) -> list[str]:
    """Return notes on distortions that a map does not show: sides scaled unequally, or a strongly enlarged picture.

    Args:
        size: (height, width) of the picture.
        model_size: (height, width) of the model's input.
        geometry: the part of the picture that the input shows; None if unknown.
    """
    left, top, right, bottom = (0, 0, size[1], size[0]) if geometry is None else geometry.box
    down, across = model_size[0] / (bottom - top), model_size[1] / (right - left)
    before, after, notes = f"{size[1]}×{size[0]}", f"{model_size[1]}×{model_size[0]}", []
    if max(down, across) > _SQUASHED * min(down, across):
        ratio = max(down, across) / min(down, across)
        notes.append(f"the picture was squeezed: {before} pixels became {after}, which distorts shapes {ratio:.1f}:1")
    if min(down, across) > _ENLARGED:
        notes.append(f"a picture of {before} pixels was enlarged to {after}: the model sees only a few flat areas")
    return notes


def _fed(process: Process, pictures: list[Image.Image]) -> NDArray[np.float64]:
    return np.asarray(process(pictures).double().cpu())


def ramp(size: Size, axis: int, span: NDArray[Any]) -> Image.Image:
    """Return a picture whose brightness rises from 0 to 255 along a span of an axis, and is constant outside of it.

    Args:
        size: (height, width).
        axis: 0 from top to bottom, 1 from left to right.
        span: (start, end) of the ramp in pixels.
    """
    along, across = size[axis], size[1 - axis]
    line = 255 * (np.arange(along) + 0.5 - span[0]) / (span[1] - span[0])
    rows = np.floor(line.clip(0, 255) + _ROUNDING).clip(max=255).astype(np.uint8)
    table = np.tile(rows, (-(-across // len(rows)), 1))[:across]
    return Image.fromarray(np.ascontiguousarray(table if axis == 1 else table.T)).convert("RGB")


def fitted(
    process: Process, black: NDArray[Any], white: NDArray[Any], sizes: list[Size], spans: NDArray[Any]
) -> NDArray[Any]:
    """Fit the part of each picture that the input shows, by ramps over these spans and an eighth more on either side.

    Args:
        black, white: the processed black and white pictures.
        sizes: (height, width) of each picture.
        spans: ``[P, 2, 2]`` (top, bottom) and (left, right) of the ramps.

    Returns:
        ``[P, 2, 2]`` (top, bottom) and (left, right) of each picture; NaN for a picture without a box.
    """
    margin = (spans[..., 1:] - spans[..., :1]) / 8 * [-1, 1]
    near = np.clip(spans + margin, 0, np.array(sizes, dtype=float)[..., None])
    ramps = [_fed(process, [ramp(size, axis, span[axis]) for size, span in zip(sizes, near, strict=True)])
             for axis in (0, 1)]  # fmt: skip
    edges = np.full_like(near, np.nan)
    if any(ramp.shape != black.shape for ramp in ramps):
        return edges
    for i, axis in np.ndindex(len(sizes), 2):
        gain = white[i] - black[i]
        power = (gain**2).sum(0)
        inside = power > 0.25 * power.max()
        # least squares over channels: fraction of the way from black to white, NaN at padding
        share = np.where(inside, ((ramps[axis][i] - black[i]) * gain).sum(0) / np.where(inside, power, 1), np.nan)
        span = _fit(share if axis == 0 else share.T, near[i, axis], sizes[i][axis])
        edges[i, axis] = np.nan if span is None else span
    return edges


def _fit(shares: NDArray[Any], span: NDArray[Any], length: int) -> Span | None:
    """Fit where an input of n rows starts and ends on a picture.

    Args:
        shares: ``[n, m]`` fraction of the ramp at each pixel of the input, NaN at padding.
        span: (start, end) of the ramp in pixels of the picture.
        length: length of the picture's axis in pixels.
    """
    visible = ~np.isnan(shares).all(1)
    line = np.full(len(shares), np.nan)
    line[visible] = np.nanmean(shares[visible], 1)
    # resampling bends a ramp at the border of the picture, so rows there are left out
    even = visible & (line > 0.1) & (line < 0.9)
    fit_rows = even if even.sum() > 3 else visible
    if fit_rows.sum() < 2 or np.nanmean(np.abs(shares - line[:, None])) > 0.02:
        return None
    level = (span[1] - span[0]) / 255
    at, places = np.arange(len(line)) + 0.5, span[0] + line * 255 * level
    step, start = np.polyfit(at[fit_rows], places[fit_rows], 1)
    off_line = np.abs(places - start - step * at)
    if not step > 0 or off_line[fit_rows].max() > 1 + step + 1.5 * level:
        return None
    if off_line[visible].max() > 0.2 * length:  # part of the ramp was cropped because of its brightness
        return None
    fitted = (float(start), float(start + step * len(line)))
    # pictures are resized to whole pixels, and cropped and padded by whole pixels, before or after
    pixels = max(1, round(length / step))
    first = round(start * pixels / length)
    after = (first * length / pixels, (first + len(line)) * length / pixels)
    before = (float(round(fitted[0])), float(round(fitted[1])))
    ends = at[visible][[0, -1]]
    off = [float(np.abs(a + (b - a) * ends / len(line) - start - step * ends).max()) for a, b in (after, before)]
    close = 0.05 * step + 0.5 * level
    return after if off[0] <= close else before if off[1] <= close else fitted

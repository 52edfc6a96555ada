"""A map over its picture as pixels, placed where the model read them, at the resolution of the picture."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from whyformer.errors import InputError, check_count
from whyformer.show import colours
from whyformer.show.colours import Array, array
from whyformer.show.layout import prepared_sample
from whyformer.show.look import Look

if TYPE_CHECKING:
    from whyformer.explanation.result import Explanation

_SMALLEST = 336  # smaller pictures are enlarged, so that the map over them is smooth
_LARGEST = 4096  # longest side after enlarging
_AT_ONCE = 1_000_000  # pixels painted at a time
_LIGHT, _DARK = 1.0, 0.08
_PALEST, _PICTURE = 0.95, 0.42  # the grey of white under a map, and the range of greys below it


def overlay(e: Explanation, sample: int = 0, *, longest: int | None = None, **look: Any) -> NDArray[np.uint8]:
    """Draw the map of a sample on its original picture, ``[H, W, 3]``; of a video on its frames side by side.

    The picture is pale grey, so that every colour is the map's and shows equally on dark and white pictures:
    colour = grey · (1 - a + a · map), with a = opacity · |score / limit|^0.7. A score of 0 shows the picture itself,
    whose outlines are visible under the highest score, too. ``limit`` is the largest |score|, for more than a hundred
    patches or pixels the 99th percentile. With another ``cmap``, colour = (1 - a) · grey + a · map; with
    ``fade=False``, a = opacity everywhere (as in the papers). Parts that the processor cut off have no score and are
    hatched.

    Args:
        longest: longest side in pixels; by default that of the original, and small pictures are enlarged.
        **look: options of :class:`~whyformer.show.look.Look`: opacity, cmap, fade, contours, keep, above, smooth.
    """
    style = Look.of(look)
    if longest is not None:
        check_count("longest", longest)
    e = prepared_sample(e, sample, style.smooth)
    height, width = size = drawn_size(e, longest)
    scale, unit = colours.scale_of(e), array(e.placed(0, size))  # NaN where the model read nothing
    unit = scale.unit(unit) if scale.limit else np.where(np.isnan(unit), np.nan, 0.0)
    unit = unit.astype(np.float32)
    picture = plain(e, longest)
    pixels = None if picture is None else np.asarray(picture)
    least = threshold(unit, style)
    # no contours around single pixels: they would cover the map
    lined = not (style.masked and e.level == "pixel")
    drawn = np.empty((height, width, 3), np.uint8)
    rows = max(1, _AT_ONCE // width)  # a few rows at a time, to limit memory
    for start in range(0, height, rows):
        # with a row on either side, for the slopes of contour lines
        low, high = max(0, start - 1), min(height, start + rows + 1)
        part = unit[low:high]
        if pixels is None:
            colour = colours.paint(np.nan_to_num(part), scale.signed, style.cmap)
        else:
            colour = _on_picture(pixels[low:high] / 255, part, scale, style, least, (low, min(size)))
        colour = _lines(colour, part, scale, style, least, min(size)) if lined else colour
        drawn[start : start + rows] = _bytes(colour[start - low : start - low + rows])
    return drawn


def base(e: Explanation) -> Image.Image | None:
    """Return the picture to draw on: the original if its geometry is known, else the model's input."""
    original = e.originals[0] if e.originals is not None and e.geometry is not None else None
    if original is not None:
        return original
    return None if e.pictures is None else Image.fromarray(e.pictures[0].numpy())


def plain(e: Explanation, longest: int | None = None) -> Image.Image | None:
    """Return the picture to draw on at the size of :func:`overlay`."""
    picture = base(e)
    if picture is None:
        return None
    return picture.resize(drawn_size(e, longest)[::-1], Image.Resampling.BICUBIC)


def drawable(e: Explanation) -> bool:
    """Return True if the scores form a picture."""
    return e.frames is None and (e.level == "pixel" or (e.level == "patch" and e.grid is not None))


def drawn_size(e: Explanation, longest: int | None = None) -> tuple[int, int]:
    """Return (height, width) of a drawing: of the picture, a multiple if it is small, at most ``longest`` pixels."""
    picture = base(e)
    if picture is None and not drawable(e):
        raise InputError("these scores have no grid, so they cannot be drawn as a picture; read e.scores")
    cells = e.grid or (int(e.scores.shape[1]), int(e.scores.shape[-1]))
    high, wide = (picture.height, picture.width) if picture is not None else e.image_size or cells
    times = max(1, min(math.ceil(_SMALLEST / min(high, wide)), _LARGEST // max(high, wide)))
    high, wide = high * times, wide * times
    if longest is not None and max(high, wide) > longest:
        high, wide = (max(1, round(side * longest / max(high, wide))) for side in (high, wide))
    return high, wide


def encoded(picture: Image.Image | NDArray[np.uint8], kind: str = "PNG", **options: Any) -> bytes:
    """Encode a picture, or pixels ``[H, W, 3]``, as a file; options are those of Pillow for the format."""
    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    if kind == "PNG" and not options:
        options = {"optimize": 3 * image.width * image.height < 3_000_000}
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def _bytes(colour: Array) -> NDArray[np.uint8]:
    return np.asarray(np.rint(np.clip(colour, 0, 1) * 255), dtype=np.uint8)


def _tinted(grey: Array, unit: Array, scale: colours.Scale, look: Look) -> Array:
    unit = np.nan_to_num(unit)
    a = look.opacity * (colours.alpha(unit) if look.fade else np.ones_like(unit))
    # a map that fades has the colours of its ends alone, except with another colour map without a sign
    default = look.cmap in (None, colours.default_cmap(scale.signed))
    ends = look.fade and (scale.signed or default)
    tinted = colours.paint(np.where(unit < 0, -1, 1) if ends else unit, scale.signed, look.cmap)
    colour = tinted * grey if default else tinted
    return np.asarray((1 - a[..., None]) * grey + a[..., None] * colour)


def _on_picture(
    colour: Array, unit: Array, scale: colours.Scale, look: Look, least: float, place: tuple[int, int]
) -> Array:
    """Draw rows of the map on those of the picture; ``place`` is (index of the first row, shorter side)."""
    grey = (colour @ [0.299, 0.587, 0.114])[..., None]
    if scale.limit and look.masked:  # in colour where scores are high, dark grey elsewhere
        inside = np.nan_to_num(unit, nan=-1.0) >= least
        drawn = np.where(inside[..., None], colour, 0.1 + 0.3 * grey)
    else:
        drawn = _tinted(_PALEST - _PICTURE + _PICTURE * grey, unit, scale, look)
    cut = np.isnan(unit)
    return np.where(cut[..., None], _hatched(grey, place), drawn) if cut.any() else drawn


def threshold(unit: Array, look: Look) -> float:
    """Return the smallest scaled score that a masked view shows; always above 0."""
    scored = unit[~np.isnan(unit)]
    if not look.masked or not scored.size:
        return math.inf
    if look.keep is not None:
        return max(float(np.quantile(scored, 1 - look.keep)), 1e-12)
    return max(float(scored.max()) * (look.above or 1), 1e-12)


def _hatched(grey: Array, place: tuple[int, int]) -> Array:
    """Return pale rows with diagonal lines, visible on white and on black and unlike the colours of scores."""
    first, side = place
    height, width = grey.shape[:2]
    step = max(8, side // 30)
    lines = (np.add.outer(np.arange(first, first + height), np.arange(width)) % step < max(2, step // 5))[..., None]
    pale = 0.8 + 0.17 * grey
    return np.asarray(np.repeat(np.where(lines, pale - 0.25, pale), 3, -1))


def _lines(colour: Array, unit: Array, scale: colours.Scale, look: Look, least: float, side: int) -> Array:
    """Draw contour lines, light with a dark rim, at equal shares of the largest score, or around the masked region."""
    even = [k / (look.contours + 1) for k in range(1, look.contours + 1)]
    levels = [least] if look.masked else even
    if scale.limit == 0 or not levels or not np.isfinite(levels).all():
        return colour
    filled = np.nan_to_num(unit)
    slope = np.hypot(*np.gradient(filled)) if min(filled.shape) > 1 else np.ones_like(filled)
    wide = max(1.0, side / 300)
    signs = (1, -1) if scale.signed and not look.masked else (1,)
    away = np.full(filled.shape, np.inf)  # distance in pixels to the nearest line, from value and slope
    for level in (sign * level for sign in signs for level in levels):
        distance = np.abs(filled - level) / np.maximum(slope, 1e-9)
        np.minimum(away, distance, out=away)
    away[np.isnan(unit)] = np.inf
    for tone, reach in ((_DARK, 1.8 * wide), (_LIGHT, 0.8 * wide)):
        cover = np.clip(reach + 0.5 - away, 0, 1)[..., None]
        colour = (1 - cover) * colour + cover * tone
    return colour

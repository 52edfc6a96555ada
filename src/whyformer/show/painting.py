"""One map over its picture, as pixels: exactly where the model saw it, at the picture's own resolution."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from whyformer.errors import InputError
from whyformer.show import colours
from whyformer.show.colours import array
from whyformer.show.layout import laid_out
from whyformer.show.look import Look

if TYPE_CHECKING:
    from whyformer.explanation.result import Explanation

Array = NDArray[Any]

_SMALLEST = 336  # a 112-pixel picture is enlarged before the map is laid over it, so that the map stays smooth
_LARGEST = 4096  # but a picture that is very long and narrow is not enlarged without end
_AT_ONCE = 1_000_000  # pixels painted at a time
_LIGHT, _DARK = 1.0, 0.08
_PALEST, _PICTURE = 0.95, 0.42  # the grey of white under a map, and how far below it that of black is


def overlay(e: Explanation, sample: int = 0, *, longest: int | None = None, **look: Any) -> NDArray[np.uint8]:
    """The map of one sample on its original picture, ``[H, W, 3]``; of a video on its frames side by side.

    The picture is drawn in pale grey: every colour comes from the map, which is seen equally well on dark and on white
    pictures. colour = grey · (1 - a + a · map), with a = opacity · |score / limit|^0.7: 0 is the picture itself, and
    its outlines show through the highest score. ``limit`` is the largest |score|, or of more than a hundred patches or
    pixels the 99th percentile. With another ``cmap``, colour = (1 - a) · grey + a · map. With ``fade=False``,
    a = opacity everywhere (as in the papers). What the model did not see (cut off by its processor) is hatched: it has
    no score.

    Args:
        longest: draw the longer side with at most so many pixels; by default every pixel of the original is drawn, and
            a small picture enlarged.
        **look: options of :class:`~whyformer.show.look.Look`: opacity, cmap, fade, contours, keep, above, smooth.
    """
    chosen = Look.of(look)
    e = laid_out(e, chosen.smooth)
    height, width = size = drawn_size(e, sample, longest)
    unit = unit_map(e, sample, size)
    scale = colours.scale_of(e, sample)
    shown = base(e, sample)
    pixels = None if shown is None else np.asarray(shown.resize((width, height), Image.Resampling.BICUBIC))
    least = threshold(unit, chosen)
    # around single pixels there would be nothing but lines
    lined = not (chosen.masked and e.level == "pixel")
    drawn = np.empty((height, width, 3), np.uint8)
    rows = max(1, _AT_ONCE // width)  # a large picture strip by strip, so that it takes little memory
    for start in range(0, height, rows):
        # one row more on either side, for the slopes of contour lines
        low, high = max(0, start - 1), min(height, start + rows + 1)
        part = unit[low:high]
        if pixels is None:
            made = colours.paint(np.nan_to_num(part), scale.signed, chosen.cmap)
        else:
            made = _on_picture(pixels[low:high] / 255, part, scale, chosen, least, (low, min(size)))
        made = _lines(made, part, scale, chosen, least, min(size)) if lined else made
        drawn[start : start + rows] = _bytes(made[start - low : start - low + rows])
    return drawn


def base(e: Explanation, sample: int = 0) -> Image.Image | None:
    """The picture to draw on: the original where the geometry is known, else as the model saw it."""
    if e.originals is not None and e.geometry is not None:
        return e.originals[sample]
    return None if e.pictures is None else Image.fromarray(e.pictures[sample].numpy())


def drawable(e: Explanation) -> bool:
    """Whether the scores can be laid out as a picture."""
    return e.frames is None and (e.level == "pixel" or (e.level == "patch" and e.grid is not None))


def drawn_size(e: Explanation, sample: int = 0, longest: int | None = None) -> tuple[int, int]:
    """(height, width) to draw at: the picture's own, a whole multiple of it if it is small, or less if asked for."""
    picture = base(e, sample)
    if picture is None and not drawable(e):
        raise InputError("these scores have no grid, so they cannot be drawn as a picture; read e.scores")
    cells = e.grid or (int(e.scores.shape[1]), int(e.scores.shape[-1]))
    high, wide = (picture.height, picture.width) if picture is not None else e.image_size or cells
    times = max(1, min(math.ceil(_SMALLEST / min(high, wide)), _LARGEST // max(high, wide)))
    high, wide = high * times, wide * times
    if longest is not None and max(high, wide) > longest:
        high, wide = (max(1, round(side * longest / max(high, wide))) for side in (high, wide))
    return high, wide


def unit_map(e: Explanation, sample: int, size: tuple[int, int]) -> Array:
    """The map on the picture drawn at ``size``, -1 to 1 or 0 to 1; NaN where the model saw nothing."""
    placed, scale = array(e.placed(sample, size)), colours.scale_of(e, sample)
    unit = scale.unit(placed) if scale.limit else np.where(np.isnan(placed), np.nan, 0.0)
    return unit.astype(np.float32)


def encoded(picture: Image.Image | NDArray[np.uint8], kind: str = "PNG", **options: Any) -> bytes:
    """A picture, or pixels ``[H, W, 3]``, as the bytes of a file; options are those of Pillow for this kind."""
    made = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    if kind == "PNG" and not options:
        options = {"optimize": 3 * made.width * made.height < 3_000_000}
    buffer = io.BytesIO()
    made.save(buffer, format=kind, **options)
    return buffer.getvalue()


def _bytes(colour: Array) -> NDArray[np.uint8]:
    return np.asarray(np.rint(np.clip(colour, 0, 1) * 255), dtype=np.uint8)


def _tinted(grey: Array, unit: Array, scale: colours.Scale, look: Look) -> Array:
    unit = np.nan_to_num(unit)
    a = look.opacity * (colours.alpha(unit) if look.fade else np.ones_like(unit))
    # where the map fades its colours are those of the ends, but for a colour map of the user's own, of one direction
    own = look.cmap in (None, colours.own_map(scale.signed))
    ends = look.fade and (scale.signed or own)
    tinted = colours.paint(np.where(unit < 0, -1, 1) if ends else unit, scale.signed, look.cmap)
    laid = tinted * grey if own else tinted
    return np.asarray((1 - a[..., None]) * grey + a[..., None] * laid)


def _on_picture(
    colour: Array, unit: Array, scale: colours.Scale, look: Look, least: float, place: tuple[int, int]
) -> Array:
    """Some rows of a picture under their part of the map; ``place`` is (first row, shorter side of the whole)."""
    grey = (colour @ [0.299, 0.587, 0.114])[..., None]
    if scale.limit and look.masked:  # in colour where scores are high, and dark and grey elsewhere
        inside = np.nan_to_num(unit, nan=-1.0) >= least
        made = np.where(inside[..., None], colour, 0.1 + 0.3 * grey)
    else:
        made = _tinted(_PALEST - _PICTURE + _PICTURE * grey, unit, scale, look)
    unseen = np.isnan(unit)
    return np.where(unseen[..., None], _hatched(grey, place), made) if unseen.any() else made


def threshold(unit: Array, look: Look) -> float:
    """The least score, in units of the largest, that a masked view shows; what is not above 0 is never shown."""
    seen = unit[~np.isnan(unit)]
    if not look.masked or not seen.size:
        return math.inf
    least = float(np.quantile(seen, 1 - look.keep)) if look.keep is not None else float(seen.max()) * (look.above or 1)
    return max(least, 1e-12)


def _hatched(grey: Array, place: tuple[int, int]) -> Array:
    """Bleached, with faint diagonal lines: seen on white and on black paper alike, and like no score's colour."""
    first, side = place
    height, width = grey.shape[:2]
    step = max(8, side // 30)
    lines = (np.add.outer(np.arange(first, first + height), np.arange(width)) % step < max(2, step // 5))[..., None]
    pale = 0.8 + 0.17 * grey
    return np.asarray(np.repeat(np.where(lines, pale - 0.25, pale), 3, -1))


def _lines(colour: Array, unit: Array, scale: colours.Scale, look: Look, least: float, side: int) -> Array:
    """Contour lines, light with a dark rim, around equal shares of the largest score; or around what is kept."""
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

"""Pictures of a report: small, compressed, and inside the page."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, features

from whyformer.errors import LoadError
from whyformer.inputs.pictures import MAX_PIXELS

if TYPE_CHECKING:
    from whyformer.explanation.result import Explanation

LONGEST = 384
"""Pixels of the longer side: sharp at the 240 CSS pixels at which a page shows a map."""
_STEPS = ((LONGEST, 82), (320, 78), (256, 72), (208, 66), (160, 58))
_ROOM = 3_500_000  # bytes of all pictures together, for up to 50 inputs
_TRIED = 12


@dataclass(frozen=True)
class Size:
    """How pictures are compressed: pixels of the longer side, and quality (1 to 100)."""

    longest: int = LONGEST
    quality: int = 82


def shrunk(e: Explanation, longest: int) -> Explanation:
    """The explanation with its original picture no larger than it will be drawn, so that hundreds fit into memory."""
    if e.originals is None or e.geometry is None:
        return e
    small = []
    for original in e.originals:
        made = original.convert("RGB")
        made.thumbnail((longest, longest), Image.Resampling.LANCZOS)
        small.append(made)
    places = [g.scaled((p.height, p.width)) for g, p in zip(e.geometry, small, strict=True)]
    return replace(e, originals=small, geometry=places)


def decoded(source: Any) -> Image.Image:
    """A picture out of a data URI."""
    head, comma, data = source.partition(",") if isinstance(source, str) else ("", "", "")
    if not comma or not head.startswith("data:image/") or not head.endswith(";base64"):
        raise LoadError("damaged: its picture is no data URI")
    try:
        with Image.open(io.BytesIO(base64.b64decode(data, validate=True))) as picture:
            if picture.width * picture.height > MAX_PIXELS:
                raise LoadError(f"its picture has more than {MAX_PIXELS // 10**6} megapixels")
            return picture.convert("RGB")
    except LoadError:
        raise
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise LoadError(f"damaged: its picture cannot be read: {error}") from error


def encoded(picture: Image.Image, size: Size) -> str:
    """A picture as a data URI: WebP, or JPEG where Pillow has none."""
    if max(picture.size) > size.longest:
        picture = picture.copy()
        picture.thumbnail((size.longest, size.longest), Image.Resampling.LANCZOS)
    kind = "WEBP" if features.check("webp") else "JPEG"
    return f"data:image/{kind.lower()};base64,{base64.b64encode(_compressed(picture, kind, size.quality)).decode()}"


def drawing(data: bytes) -> str | None:
    """A line drawing (a benchmark's curves) without loss, or None if it cannot be read."""
    try:
        with Image.open(io.BytesIO(data)) as picture:
            if picture.width * picture.height > MAX_PIXELS:
                return None
            plain = picture.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    plain.thumbnail((1800, 1800), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    plain.quantize(128, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def overlay(e: Explanation, size: Size) -> Image.Image:
    """The map on its picture."""
    from whyformer.show import painting

    return Image.fromarray(painting.overlay(e, longest=size.longest))


def fitting(drawn: Sequence[Callable[[Size], Image.Image]], inputs: int) -> Size:
    """The best compression at which all the pictures fit, by a trial on a few of them.

    Args:
        drawn: draws each picture. inputs: different inputs; beyond 50 a report may grow with their number.
    """
    room = _ROOM * max(1.0, inputs / 50)
    few = [drawn[i] for i in np.unique(np.linspace(0, len(drawn) - 1, _TRIED).astype(int))] if drawn else []
    for size in _sizes():
        if sum(len(encoded(draw(size), size)) for draw in few) / max(1, len(few)) * len(drawn) <= room:
            return size
    return size


def _sizes() -> Iterator[Size]:
    return (Size(longest, quality) for longest, quality in _STEPS)


def _compressed(picture: Image.Image, kind: str, quality: int) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, quality=quality, **({"method": 4} if kind == "WEBP" else {"optimize": True}))
    return buffer.getvalue()

"""Pictures of a report: small, compressed, and inside the page."""

from __future__ import annotations

import base64
import io
import math
from typing import TYPE_CHECKING, Any

from markupsafe import Markup
from PIL import Image, features

from whyformer.errors import LoadError, WhyformerError
from whyformer.inputs.pictures import open_picture
from whyformer.show import painting
from whyformer.show.html import data_uri

if TYPE_CHECKING:
    from whyformer.explanation.result import Explanation

LONGEST = 384
"""Pixels of the longer side: sharp at the 240 CSS pixels at which a page shows a map."""
THUMB = 128
"""Pixels of the longer side of a thumbnail, shown at about 90 CSS pixels."""
_ROOM = 2_100_000  # bytes of all pictures but thumbnails together, before base64, for up to 50 inputs


def shrunk(e: Explanation, longest: int) -> Explanation:
    """Return the explanation with original pictures of at most this size, so that hundreds fit into memory."""
    if e.originals is None or e.geometry is None:
        return e
    originals, geometry = list(e.originals), list(e.geometry)
    for i, (original, place) in enumerate(zip(e.originals, e.geometry, strict=True)):
        if original is not None and place is not None:
            picture = original.convert("RGB")
            picture.thumbnail((longest, longest), Image.Resampling.LANCZOS)
            originals[i], geometry[i] = picture, place.scaled((picture.height, picture.width))
    return e.with_features(originals=originals, geometry=geometry)


def decoded(source: Any) -> Image.Image:
    """Return the picture of a data URI.

    Raises:
        LoadError, ValueError: it is none.
    """
    head, _, data = str(source).partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64"):
        raise LoadError("damaged: its picture is no data URI")
    return open_picture(io.BytesIO(base64.b64decode(data, validate=True)))


def room(pictures: int, inputs: int) -> int:
    """Return the size limit of a picture in bytes; with more than 50 inputs a report may grow with their number."""
    return int(_ROOM * max(1.0, inputs / 50) / max(1, pictures))


def encoded(picture: Image.Image, most: int) -> Markup:
    """Return a picture as a data URI: WebP, or JPEG if Pillow has no WebP; reduced until it takes ``most`` bytes."""
    kind = "WEBP" if features.check("webp") else "JPEG"
    data = _compressed(picture, LONGEST, kind)
    if len(data) > most:
        data = _compressed(picture, max(LONGEST // 3, int(LONGEST * math.sqrt(most / len(data)))), kind)
    return data_uri(data, f"image/{kind.lower()}")


def drawn(e: Explanation, most: int) -> Markup:
    """Return the map on its picture, as :func:`encoded` does."""
    return encoded(Image.fromarray(painting.overlay(e, longest=LONGEST)), most)


def thumbnail(drawn: Explanation | Image.Image) -> Markup:
    """Return a picture, or a map on its picture, in the size of the contact sheet."""
    small = drawn if isinstance(drawn, Image.Image) else Image.fromarray(painting.overlay(drawn, longest=THUMB))
    return data_uri(_compressed(small.convert("RGB"), THUMB, "JPEG", 72), "image/jpeg")


def drawing(data: bytes) -> Markup | None:
    """Return the curves of a benchmark without loss, or None if they cannot be read."""
    try:
        plain = open_picture(io.BytesIO(data))
    except WhyformerError:
        return None
    plain.thumbnail((1800, 1800), Image.Resampling.LANCZOS)
    flat = plain.quantize(128, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    return data_uri(painting.encoded(flat, optimize=True))


def _compressed(picture: Image.Image, longest: int, kind: str, quality: int = 82) -> bytes:
    small = picture.copy()
    small.thumbnail((longest, longest), Image.Resampling.LANCZOS)
    return painting.encoded(small, kind, quality=quality, **({"method": 4} if kind == "WEBP" else {"optimize": True}))

"""What templates ask for: pictures as data, colours of a bar, and the mini-map of a long text."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup
from PIL import Image

from whyformer.show import colours, painting
from whyformer.show.look import Look
from whyformer.show.words import Word, right_to_left, short

if TYPE_CHECKING:
    from whyformer.explanation.result import Explanation

PIXELS = 672
"""Longest side of a picture in a page: sharp at 260 to 340 CSS pixels on any screen, and still a small file."""
_LONG, _PARTS = 120, 100  # words from which a text has a mini-map, and its parts


def data_uri(data: bytes, kind: str = "png") -> Markup:
    """The bytes of a picture as an address that holds them."""
    return Markup(f"data:image/{kind};base64,{base64.b64encode(data).decode()}")


def plain(e: Explanation) -> Markup | None:
    """The picture itself, of the size at which its maps are drawn."""
    picture = painting.base(e)
    if picture is None:
        return None
    high, wide = painting.drawn_size(e, 0, PIXELS)
    return data_uri(painting.png(np.asarray(picture.resize((wide, high), Image.Resampling.BICUBIC))))


def overlaid(e: Explanation, look: Look) -> Markup:
    """The map on its picture."""
    return data_uri(painting.png(painting.overlay(e, longest=PIXELS, **asdict(look))))


def gradient(e: Explanation, look: Look | None = None) -> str:
    """The colours of a colour bar, from left to right, as a CSS image."""
    steps = colours.ramp(colours.scale_of(e), 9, look.cmap if look else None, words=e.level == "token")
    return f"linear-gradient(to right,{','.join(map(colours.code, steps))})"


def minimap(pieces: Sequence[Word]) -> list[tuple[int, str, str]]:
    """A long text in parts, each as its strongest word: (its first word, what is said of it, colour)."""
    if len(pieces) < _LONG:
        return []
    cells = []
    bounds = np.linspace(0, len(pieces), min(_PARTS, len(pieces) // 4) + 1).astype(int).tolist()
    for begin, end in pairwise(bounds):
        top = max(pieces[begin:end], key=lambda word: abs(word.unit))
        said = f"words {begin + 1} to {end}, strongest {top.value} · {short(top.text, 40)}"
        cells.append((begin, said, colours.code(colours.ground(top.unit))))
    return cells


def way(pieces: Sequence[Word]) -> str:
    """The direction in which a text runs, as HTML names it."""
    return "rtl" if right_to_left("".join(word.text for word in pieces)) else "ltr"

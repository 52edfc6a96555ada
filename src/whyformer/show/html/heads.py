"""A page of attention heads: choose a block and heads, and point at a token to see its attention."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from whyformer.errors import InputError
from whyformer.show import words
from whyformer.show.colours import array
from whyformer.show.html import render

if TYPE_CHECKING:
    from whyformer.attention import AttentionMaps

MOST_VALUES = 8_000_000
"""Largest count of numbers in a page, of two bytes each."""


def heads(maps: AttentionMaps, sample: int = 0, title: str = "whyformer") -> str:
    """Return an HTML document with the attention of every block and head on a text; it requests nothing.

    Tokens are in two columns, with lines from queries to keys, a colour for each head, and wider lines for higher
    attention. Attention is stored in steps of 1/65535 of the largest value of the block.

    Args:
        maps: of :func:`whyformer.attention_maps`, for text.
        sample: index in the batch.

    Raises:
        InputError: the maps are of pictures, there is no such sample, or they hold more than 8 million numbers.
    """
    if maps.tokens is None:
        raise InputError("this page is for text; for pictures draw show.panels(maps.each_head())")
    if not -len(maps.tokens) <= sample < len(maps.tokens):
        raise InputError(f"there is no sample {sample}: the batch has {len(maps.tokens)}, counted from 0")
    names = maps.tokens[sample]
    count = len(names)
    total = sum(int(m.shape[1]) for m in maps.maps) * count**2
    if total > MOST_VALUES:
        raise InputError(
            f"{count} tokens in {maps.blocks} blocks are {total / 1e6:.0f} million shares, too many for a page (at "
            f"most {MOST_VALUES // 10**6} million): take a shorter text, or draw one block with show.matrix"
        )
    blocks = [_packed(array(m[sample])[:, :count, :count]) for m in maps.maps]
    first = maps.explanation(0)
    weighted = words.target_name(first[sample]) if first.method == "attention_gradient" else None
    return render("heads/page.html", title=title, names=names, blocks=blocks, weighted=weighted)


def _packed(weights: Any) -> dict[str, Any]:
    """Return ``[H, N, N]`` as 16-bit shares of the largest value, in base64."""
    largest = float(np.nanmax(weights)) or 1.0
    if not np.isfinite(weights).all():
        raise InputError("the attention maps hold NaN or infinity")
    packed = np.rint(np.clip(weights / largest, 0, 1) * 65535).astype("<u2")
    return {"heads": len(weights), "largest": largest, "shares": Markup(base64.b64encode(packed.tobytes()).decode())}

"""The heads of a model as one page: choose a block and heads, point at a token, and see where it looks."""

from __future__ import annotations

import base64
import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from whyformer.errors import InputError
from whyformer.show import words
from whyformer.show.colours import array
from whyformer.show.html import asset, render

if TYPE_CHECKING:
    from whyformer.attention import AttentionMaps

MOST_VALUES = 8_000_000
"""Numbers in one page, two bytes each."""


def heads(maps: AttentionMaps, sample: int = 0, title: str = "whyformer") -> str:
    """A whole HTML document that asks for nothing else: the attention of every block and head on one text.

    Tokens stand in two columns, lines go from the token that looks to the tokens that it looks at, one colour a head,
    the stronger the line the larger its share. Shares are kept to 1/65535 of the largest of their block.

    Args:
        maps: of :func:`whyformer.attention_maps`, for text.
        sample: which of the batch.

    Raises:
        InputError: the maps are of pictures, there is no such sample, or they hold more than 8 million numbers.
    """
    if maps.tokens is None:
        raise InputError("this page is for text; of pictures draw one map a head: show.panels(maps.each_head())")
    if not -len(maps.tokens) <= sample < len(maps.tokens):
        raise InputError(f"there is no sample {sample}: the batch has {len(maps.tokens)}, counted from 0")
    names = maps.tokens[sample]
    count = len(names)
    total = sum(int(m.shape[1]) for m in maps.maps) * count**2
    if total > MOST_VALUES:
        raise InputError(
            f"{count} tokens in {maps.blocks} blocks are {total / 1e6:.0f} million shares, too many for one page (at "
            f"most {MOST_VALUES // 10**6} million): take a shorter text, or draw one block with show.matrix"
        )
    blocks = [_packed(array(m[sample])[:, :count, :count]) for m in maps.maps]
    script, own = asset("heads/page.js"), maps.explanation(0)
    weighted = words.target_name(own[sample]) if own.method == "attention_gradient" else None
    return render(
        "heads/page.html", title=title, names=names, blocks=blocks, script=script,
        weighted=weighted, digest=Markup(base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()),
    )  # fmt: skip


def _packed(weights: Any) -> dict[str, Any]:
    """``[H, N, N]`` as bytes in base64, and what they were divided by."""
    largest = float(np.nanmax(weights)) or 1.0
    if not np.isfinite(weights).all():
        raise InputError("the attention maps hold NaN or infinity")
    packed = np.rint(np.clip(weights / largest, 0, 1) * 65535).astype("<u2")
    return {"heads": len(weights), "largest": largest, "shares": Markup(base64.b64encode(packed.tobytes()).decode())}

"""Maps of the page as HTML: pictures with a readable value for each cell, sentences with clickable words."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup
from torch import Tensor

from whyformer.apps.web.visitor_session import View, VisitorSession
from whyformer.comparing import Refusal
from whyformer.evaluation.trust import SEEDS, STEPS
from whyformer.explanation.result import Explanation
from whyformer.explanation.warnings import promises
from whyformer.show import painting
from whyformer.show.colours import array
from whyformer.show.html import PIXELS, data_uri, render
from whyformer.show.layout import sections
from whyformer.show.look import Look
from whyformer.show.words import words


def board(
    session: VisitorSession, view: View, results: Sequence[Explanation], refusals: Sequence[Refusal] = ()
) -> str:
    """Return all maps side by side: a row for each method, a column for each class. Below are the maps of the model's
    further inputs, and the methods without a map with the reasons.

    The session caches drawn pictures, so that each is drawn once.
    """
    part, *further = sections(results) if results else [None]
    original = None if part is None else _original(part.first)
    return render(
        "web/board.html", part=part, further=further, refusals=refusals, look=Look.of(view.look),
        original=original, readable=lambda e: _readable(session, e, view.look), stored=view.stored, model=view.place,
    )  # fmt: skip


def _original(e: Explanation) -> dict[str, Any] | None:
    """Return a small picture with a frame around the part that the model reads; None if it reads the whole picture."""
    picture = painting.base(e) if painting.drawable(e) else None
    if picture is None or (shares := _shares(e, e.boxes()[1])) == (0, 0, 1, 1):
        return None
    small = picture.convert("RGB")
    small.thumbnail((PIXELS // 2, PIXELS // 2), reducing_gap=2.0)
    place = ";".join(f"{k}:{100 * s:.2f}%" for k, s in zip(("left", "top", "width", "height"), shares, strict=True))
    return {"source": _uri(small), "frame": place}


def _shares(e: Explanation, box: tuple[float, float, float, float]) -> tuple[float, float, float, float]:
    """Return (left, top, width, height) of a box as shares of the picture; outside 0..1 in padding."""
    place = e.geometry[0] if e.geometry is not None else None
    high, wide = e.image_size or e.grid or e.scores.shape[-2:] if place is None else place.size
    left, top, right, bottom = box
    return left / wide, top / high, (right - left) / wide, (bottom - top) / high


def _readable(session: VisitorSession, e: Explanation, look: Mapping[str, Any]) -> dict[str, Any]:
    """Return the drawn map and the values of its cells for the page's script."""
    values = array(e.scores[0]).astype("<f4")
    rows, columns = e.grid or values.shape
    high, wide = painting.drawn_size(e, PIXELS)
    # the key is made of the scores, so that equal maps are drawn once in a session
    key = json.dumps(["drawn", hashlib.sha256(values.tobytes()).hexdigest(), e.level, e.grid, dict(look)])
    return {
        "source": session.once(key, lambda: _uri(painting.overlay(e, longest=PIXELS, **look))),
        "scores": Markup(base64.b64encode(values.tobytes()).decode()),
        "box": ",".join(f"{share:.6f}" for share in _shares(e, e.boxes()[0])),
        "aspect": f"{wide / high:.4f}",
        "rows": rows,
        "columns": columns,
    }


def _uri(picture: Any) -> Markup:
    """Return a data URI of a picture with low compression, which is fast."""
    return data_uri(painting.encoded(picture, compress_level=1))


def trusted(judged: Sequence[tuple[Explanation, Mapping[str, Any] | str]]) -> str:
    """Return the faithfulness of the maps as HTML: a chart and a sentence for each, or the reason why it is missing.

    Args:
        judged: each map with the figures of its :class:`~whyformer.evaluation.trust.Trust`, or the reason.
    """
    warnings = dict.fromkeys(line for _, trust in judged if not isinstance(trust, str) for line in trust["warnings"])
    checked = any(promises(e.diagnostics) for e, _ in judged)
    facts = {"warnings": list(warnings), "checked": checked, "steps": STEPS, "draws": len(SEEDS)}
    return render("web/trust.html", cells=judged, **facts)


def attended(e: Explanation, maps: Tensor, word: int, block: int | None) -> str:
    """Return the share of attention from one word to each word as HTML, in a block or in the mean of all blocks.

    The row of a word of several tokens is the mean of its tokens' rows; the share of a word is the sum over its tokens.
    Special tokens ([CLS], [SEP]) have a separate share, so that all shares add up to 100 %.
    """
    pieces, rest = words(e)
    if not 0 <= word < len(pieces):
        return ""
    matrix = maps.double().mean(0) if block is None else maps[block].double()
    row = matrix[list(pieces[word].places)].mean(0)
    shares = [float(row[list(piece.places)].sum()) for piece in pieces]
    best = sorted(range(len(shares)), key=lambda i: -shares[i])[:5]
    rows = [(pieces[i].text, shares[i]) for i in best]
    if len(shares) > 5:
        rows.append(("other words", max(0.0, sum(shares) - sum(shares[i] for i in best))))
    rows.append(("special tokens ([CLS], [SEP] …)", max(0.0, float(row.sum()) - sum(shares))))
    where = f"the mean of all {len(maps)} blocks" if block is None else f"block {block}"
    return render(
        "web/attended.html", pieces=pieces, rest=rest, asked=pieces[word], shares=shares, largest=max(shares) or 1.0,
        rows=rows, where=where,
    )  # fmt: skip

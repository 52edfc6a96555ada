"""Maps as parts of the page: pictures whose values can be read cell by cell, sentences whose words can be clicked."""

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
    """All maps side by side: a row a method, a column a class; below, those of the model's further inputs, and the
    methods that gave none, and why.

    Drawn pictures are remembered in the session, so that each is drawn once while others still come in.
    """
    part, *further = sections(results) if results else [None]
    original = None if part is None else _original(part.first)
    return render(
        "web/board.html", part=part, further=further, refusals=refusals, look=Look.of(dict(view.look)),
        original=original, readable=lambda e: _readable(session, e, view.look), stored=view.stored, model=view.model,
    )  # fmt: skip


def _original(e: Explanation) -> dict[str, Any] | None:
    """The picture, small, and the place of a frame around what the model saw of it; None where that is all of it."""
    shown = painting.base(e) if painting.drawable(e) else None
    if shown is None or (shares := _shares(e, e.boxes()[1])) == (0, 0, 1, 1):
        return None
    small = shown.convert("RGB")
    small.thumbnail((PIXELS // 2, PIXELS // 2), reducing_gap=2.0)
    place = ";".join(f"{k}:{100 * s:.2f}%" for k, s in zip(("left", "top", "width", "height"), shares, strict=True))
    return {"source": _uri(small), "frame": place}


def _shares(e: Explanation, box: tuple[float, float, float, float]) -> tuple[float, float, float, float]:
    """(left, top, width, height) of a box on the picture, as shares of it; beyond 0..1 where it was padded."""
    high, wide = e.geometry[0].size if e.geometry is not None else e.image_size or e.grid or e.scores.shape[-2:]
    left, top, right, bottom = box
    return left / wide, top / high, (right - left) / wide, (bottom - top) / high


def _readable(session: VisitorSession, e: Explanation, look: Mapping[str, Any]) -> dict[str, Any]:
    """The drawn map, and the values of its cells for the page's script."""
    values = array(e.scores[0]).astype("<f4")
    rows, columns = e.grid or values.shape
    high, wide = painting.drawn_size(e, 0, PIXELS)
    # the scores themselves are the key: a map drawn once is the same for whoever asks in this session
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
    """Quickly made and larger: it only goes to a browser, most often on the same machine."""
    return data_uri(painting.encoded(picture, compress_level=1))


def trusted(judged: Sequence[tuple[Explanation, Mapping[str, Any] | str]]) -> str:
    """How far the maps may be believed: a chart and a sentence for each, or why not, and the warnings.

    Args:
        judged: each map with the figures of its :class:`~whyformer.evaluation.trust.Trust`, or why there are none.
    """
    warnings = dict.fromkeys(line for _, found in judged if not isinstance(found, str) for line in found["warnings"])
    checked = any(promises(e.diagnostics) for e, _ in judged)
    facts = {"warnings": list(warnings), "checked": checked, "steps": STEPS, "draws": len(SEEDS)}
    return render("web/trust.html", cells=judged, **facts)


def attended(e: Explanation, maps: Tensor, word: int, block: int | None) -> str:
    """What one word attends to: the share of each word, in the mean of all blocks or in one of them.

    The row of a word of several tokens is the mean of its tokens' rows; the share of a word is the sum over its tokens.
    What special tokens ([CLS], [SEP]) take is told apart, so that all shares add up to 100 %.
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

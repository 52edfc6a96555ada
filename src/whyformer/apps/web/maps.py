"""Maps as parts of the page: pictures whose values can be read cell by cell, sentences whose words can be clicked."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from whyformer.apps.web.session import Session
from whyformer.explanation.result import Explanation
from whyformer.show import colours, painting
from whyformer.show.html import text
from whyformer.show.layout import Section, sections
from whyformer.show.look import Look
from whyformer.show.words import array, figure_of, heading, words

_PIXELS = 672  # longest side of a map on the page: sharp at 340 CSS pixels on any screen


def board(
    session: Session, results: Sequence[Explanation], refusals: Sequence[tuple[str, str]], look: Mapping[str, Any]
) -> str:
    """All maps side by side: a row a method, a column a class; below, the methods that gave none, and why.

    Drawn pictures are remembered in the session, so that each is drawn once while others still come in.
    """
    body = ""
    if results:
        part = sections(list(results))[0]
        body = _sentences(part) if part.first.level == "token" else _pictures(session, part, look)
    why = "".join(f"<li><b>{text(name)}</b>: {text(reason)}</li>" for name, reason in refusals)
    return body + (f'<ul class="wf-refused" role="alert">{why}</ul>' if why else "")


# -- pictures ------------------------------------------------------------------------------------------------------
def _pictures(session: Session, part: Section, look: Mapping[str, Any]) -> str:
    cells = []
    for name, row in zip(part.methods, part.cells, strict=True):
        for e in row:
            if e is not None:
                cells.append(_map(session, e, name, look))
    shape = f"--columns:{max(1, len(part.targets))}"
    grid = f'<div class="wf-grid">{"".join(cells)}</div>'
    return f'<div class="wf-board" style="{shape}">{_original(part.first)}{grid}</div>'


def _original(e: Explanation) -> str:
    """The picture, small, with a frame around what the model saw of it."""
    shown = painting.base(e)
    if shown is None:
        return ""
    small = shown.copy()
    small.thumbnail((_PIXELS // 2, _PIXELS // 2), reducing_gap=2.0)
    source = _png(np.asarray(small.convert("RGB")))
    left, top, width, height = _seen(e)
    whole = (left, top, width, height) == (0, 0, 1, 1)
    place = f"left:{100 * left:.2f}%;top:{100 * top:.2f}%;width:{100 * width:.2f}%;height:{100 * height:.2f}%"
    frame = "" if whole else f'<span class="wf-frame" style="{place}"></span>'
    note = "the picture" if whole else "the picture; the frame is what the model sees"
    return (
        f'<figure class="wf-original"><div><img alt="{note}" src="data:image/png;base64,{source}">'
        f"{frame}</div><figcaption>{note}</figcaption></figure>"
    )


def _seen(e: Explanation) -> tuple[float, float, float, float]:
    """(left, top, width, height) of the map on the picture, as shares of it; beyond 0..1 where it was padded."""
    if e.geometry is None or e.originals is None:
        return 0, 0, 1, 1
    (high, wide), (left, top, right, bottom) = e.geometry[0].size, e.geometry[0].box
    return left / wide, top / high, (right - left) / wide, (bottom - top) / high


def _map(session: Session, e: Explanation, name: str, look: Mapping[str, Any]) -> str:
    title = f"{name}: {heading(e)}"
    if e.level == "patch" and e.grid is None:
        return f'<figure><figcaption>{text(title)}</figcaption><p class="wf-note">scores without a grid</p></figure>'
    values = array(e.scores[0]).astype("<f4")
    rows, columns = e.grid if e.level == "patch" and e.grid is not None else values.shape
    # the scores themselves are the key: a map drawn once is the same for whoever asks in this session
    drawn = json.dumps(["drawn", hashlib.sha256(values.tobytes()).hexdigest(), e.level, e.grid, dict(look)])
    source = session.once(drawn, lambda: _png(painting.overlay(e, longest=_PIXELS, **look)))
    packed = base64.b64encode(values.tobytes()).decode()
    box = ",".join(f"{share:.6f}" for share in _seen(e))
    what = "pixel" if e.level == "pixel" else "patch"
    return (
        f'<figure class="wf-cell"><figcaption><b>{_broken(name)}</b> <bdi>{text(heading(e))}</bdi></figcaption>'
        f'<div class="wf-map" tabindex="0" role="application" aria-roledescription="map of scores" '
        f'aria-label="{text(title)}. Arrow keys read the score of each {what}." data-rows="{rows}" '
        f'data-columns="{columns}" data-what="{what}" data-box="{box}" data-values="{packed}">'
        f'<img alt="" draggable="false" src="data:image/png;base64,{source}">'
        '<span class="wf-cursor" hidden></span></div>'
        f'{_bar(e, Look.of(dict(look)))}<p class="wf-value" aria-live="polite">&nbsp;</p></figure>'
    )


def _png(pixels: NDArray[np.uint8]) -> str:
    """Quickly made and larger: it only goes to a browser, most often on the same machine."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG", compress_level=1)
    return base64.b64encode(buffer.getvalue()).decode()


def _broken(name: str) -> str:
    """A method's name that may wrap at its underscores."""
    return text(name).replace("_", "_<wbr>")


def _bar(e: Explanation, look: Look | None = None) -> str:
    """The colour bar with its ends, or in words what there is instead of colours."""
    scale = colours.scale_of(e)
    note = scale.note or (look.note if look else None)
    if note is not None:
        return f'<p class="wf-note">{text(note)}</p>'
    steps = np.linspace(-1 if scale.signed else 0, 1, 9)
    if e.level == "token":
        stops = ["rgb({},{},{})".format(*colours.tint(float(u), 0.85)) for u in steps]
    else:
        stops = ["rgb({:.0f},{:.0f},{:.0f})".format(*(c * 255)) for c in colours.paint(steps, scale.signed)]
    low, high = scale.ends
    ramp = f'<span style="background:linear-gradient(to right,{",".join(stops)})"></span>'
    return f'<div class="wf-bar" aria-hidden="true">{text(low)}{ramp}{text(high)}</div>'


# -- sentences -----------------------------------------------------------------------------------------------------
def _sentences(part: Section) -> str:
    blocks = []
    for column in range(len(part.targets)):
        rows = [(name, e) for name, row in zip(part.methods, part.cells, strict=True) if (e := row[column]) is not None]
        named = next((e for _, e in rows if e.diagnostics.get("class_specific") is not False), rows[0][1])
        lines = "".join(
            f'<div class="wf-line"><h4>{_broken(name)}</h4><div>{_line(e, name)}{_bar(e)}</div></div>'
            for name, e in rows
        )
        blocks.append(f"<section><h3><bdi>{text(heading(named))}</bdi></h3>{lines}</section>")
    hint = (
        '<p class="wf-note">Click a word, or press Enter on it, to see what it attends to. Arrow keys go from word to '
        "word.</p>"
    )
    return f'<div class="wf-sentences">{hint}{"".join(blocks)}<p class="wf-value" aria-live="polite">&nbsp;</p></div>'


def _line(e: Explanation, name: str) -> str:
    pieces, rest = words(e)
    scale = colours.scale_of(e)
    marked = []
    for i, piece in enumerate(pieces):
        value = figure_of(piece.score)
        parts = "" if len(piece.parts) == 1 else " = " + " + ".join(f"{t} ({figure_of(s)})" for t, s in piece.parts)
        ground = "rgb({},{},{})".format(*colours.tint(float(scale.unit(np.array(piece.score))), 0.85))
        marked.append(
            f'{text(piece.gap)}<button type="button" class="wf-word" tabindex="{0 if i == 0 else -1}" data-word="{i}" '
            f'data-value="{text(value + parts)}" style="background:{ground}" '
            f'aria-label="{text(f"{piece.text}, score {value}")}">'
            f"{text(piece.text)}</button>"
        )
    return f'<p class="wf-text" dir="auto" role="group" aria-label="{text(name)}">{"".join(marked)}{text(rest)}</p>'


def attended(e: Explanation, maps: Tensor, word: int, block: int | None) -> str:
    """What one word attends to: the share of each word, in the mean of all blocks or in one of them.

    The row of a word of several tokens is the mean of its tokens' rows; the share of a word is the sum over its tokens.
    What special tokens ([CLS], [SEP]) take is told apart, so that all shares add up to 100 %.
    """
    # words() of the token numbers instead of the scores says which tokens make up which word
    numbers = torch.arange(e.scores.shape[1], dtype=torch.float64)[None]
    pieces, rest = words(replace(e, scores=numbers))
    if not 0 <= word < len(pieces):
        return ""
    tokens = [[int(n) for _, n in p.parts] for p in pieces]
    matrix = maps.double().mean(0) if block is None else maps[block].double()
    row = matrix[tokens[word]].mean(0)
    shares = [float(row[own].sum()) for own in tokens]
    special = max(0.0, float(row.sum()) - sum(shares))
    largest = max(shares) or 1.0
    marked = "".join(
        f'{text(p.gap)}<mark style="background:rgb({",".join(map(str, colours.tint(s / largest, 0.85)))})" '
        f'title="{100 * s:.1f} %"{" class=wf-asked" if i == word else ""}>{text(p.text)}</mark>'
        for i, (p, s) in enumerate(zip(pieces, shares, strict=True))
    )
    best = sorted(range(len(shares)), key=lambda i: -shares[i])[:5]
    rows = [(f"<bdi>{text(pieces[i].text)}</bdi>", shares[i]) for i in best]
    if len(shares) > 5:
        rows.append(("other words", max(0.0, sum(shares) - sum(shares[i] for i in best))))
    rows.append(("special tokens ([CLS], [SEP] …)", special))
    listed = "".join(f"<tr><td>{name}</td><td>{100 * share:.1f} %</td></tr>" for name, share in rows)
    where = f"the mean of all {len(maps)} blocks" if block is None else f"block {block}"
    return (
        f'<div class="wf-attended"><h3>“<bdi>{text(pieces[word].text)}</bdi>” attends to</h3>'
        f'<p class="wf-note">attention in {where}, averaged over heads; this is where the word looks, for no class</p>'
        f'<p class="wf-text" dir="auto">{marked}{text(rest)}</p><table><tbody>{listed}</tbody></table></div>'
    )

"""Explanations as HTML that needs nothing else: no script, no style sheet, no request. All text is escaped."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from whyformer.show import colours
from whyformer.show.layout import Section, sections
from whyformer.show.look import Look
from whyformer.show.painting import base, drawn_size, overlay, png
from whyformer.show.words import Word, figure_of, heading, right_to_left, short, visible, words

if TYPE_CHECKING:
    from whyformer.explanation.result import Explanation

_PLAIN = Look()
_PIXELS = 672  # longest side of a picture in a page: sharp at 260 CSS pixels on any screen, and still a small file
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
# Ink and paper are both set, so that a dark notebook or browser cannot make one of them unreadable.
_CARD = (
    "font-family:system-ui,sans-serif;font-size:14px;line-height:1.5;color:#111;background:#fff;"
    "border:1px solid #d5d5d5;border-radius:6px;padding:10px 14px;margin:6px 0;max-width:60em"
)
_SMALL = "color:#555;font-size:12px"
_LONG, _PARTS = 120, 100  # words from which a text has a mini-map, and its parts
_MINIMAP = (
    "display:flex;position:sticky;top:0;height:14px;border:1px solid #d5d5d5;border-radius:3px;overflow:hidden;"
    "background:#fff;max-width:60em"
)
_TEXT = "line-height:2;margin:4px 0;white-space:pre-wrap;overflow-wrap:anywhere"
_STYLE = """
body{font-family:system-ui,sans-serif;font-size:15px;line-height:1.5;color:#111;background:#fff;max-width:72em;
margin:0 auto;padding:1em}
h1{font-size:1.5em}h2{font-size:1.15em;margin:1.6em 0 .3em}small,.s{color:#555;font-size:.82em}
.wide{overflow-x:auto}table{border-collapse:collapse}th,td{padding:4px 8px;text-align:left;vertical-align:top}
th{font-weight:600;overflow-wrap:anywhere}.grid td{min-width:150px}.grid img{width:100%;max-width:260px;display:block}
.list th{width:14em;font-weight:400;color:#555;font-size:.85em;padding-top:.7em}.list p{margin:0}
span[id]{scroll-margin-top:3em}
@media(max-width:600px){.list tr,.list th,.list td{display:block;width:auto;padding:0 4px}.list th{padding-top:10px}}
@media print{body{max-width:none}span{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""


def fragment(e: Explanation, **look: Any) -> str:
    """A card for each sample, for notebooks: the map, its scale, and the top classes; inline styles only.

    Args:
        **look: options of :class:`~whyformer.show.look.Look`, for pictures.
    """
    chosen = Look.of(look)
    return "".join(_card(sample, chosen) for sample in e)


def page(explanations: Explanation | Iterable[Explanation], title: str = "whyformer", **look: Any) -> str:
    """A whole document: for pictures a table of methods x classes, for text one line a method under each class."""
    parts, chosen = sections(explanations), Look.of(look)
    body = "".join(_pictures(p, chosen) if p.first.level != "token" else _sentences(p, i) for i, p in enumerate(parts))
    name = text(title)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{name}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1><bdi>{name}</bdi></h1>{body}</body></html>\n"
    )


def text(raw: str) -> str:
    """Escaped for HTML text and attributes, with control characters written out."""
    return html.escape(visible(raw, keep="\n\t"), quote=True)


# -- parts -------------------------------------------------------------------------------------------------------
def _card(e: Explanation, look: Look) -> str:
    head = f'<div><b><bdi>{text(heading(e))}</bdi></b> <span style="{_SMALL}">{text(e.method)}</span></div>'
    drawable = e.level != "patch" or e.grid is not None
    if e.level == "token":
        body = _highlight(e)
    elif drawable:
        style = "max-width:100%;display:block;margin:6px 0"
        body = f'<img alt="{_description(e)}" style="{style}" src="{_source(e, look)}">'
    else:
        body = f'<div style="{_SMALL}">patch scores without a grid: read them from .scores</div>'
    foot = f'<div style="{_SMALL}">{_classes(e)}</div>'
    return f'<div style="{_CARD}">{head}{body}{_scale(e, look)}{foot}</div>'


def _pictures(part: Section, look: Look) -> str:
    """Rows are methods, columns the classes; the picture itself stands before them."""
    head = "".join(f'<th scope="col"><bdi>{text(heading(e))}</bdi></th>' for e in _columns(part))
    original = ""
    plain = base(part.first)
    if plain is not None:
        size = drawn_size(part.first, 0, _PIXELS)[::-1]
        style = 'alt="the picture" style="max-width:260px;width:100%"'
        original = f'<p><img {style} src="{_data(np.asarray(plain.resize(size, Image.Resampling.BICUBIC)))}"></p>'
    rows = []
    for name, row in zip(part.methods, part.cells, strict=True):
        cells = "".join(f"<td>{_map(e, look)}</td>" if e is not None else "<td></td>" for e in row)
        rows.append(f'<tr><th scope="row">{text(name)}{_agnostic(row)}</th>{cells}</tr>')
    table = f'<table class="grid"><tr><td></td>{head}</tr>{"".join(rows)}</table>'
    return f'<section>{original}<p class="s">{_classes(part.first)}</p><div class="wide">{table}</div></section>'


def _map(e: Explanation, look: Look) -> str:
    if e.level == "patch" and e.grid is None:
        return "<small>patch scores without a grid</small>"
    return f'<img alt="{_description(e)}" src="{_source(e, look)}">{_scale(e, look)}'


def _sentences(part: Section, number: int) -> str:
    """Under each class one line a method, so that lines can be compared word by word."""
    blocks = [f'<p class="s">{_classes(part.first)}</p>']
    for column, named in enumerate(_columns(part)):
        rows = [
            f'<tr><th scope="row">{text(name)}{_agnostic(row)}</th>'
            f"<td>{_highlight(e, f't{number}-{column}-{i}')}{_scale(e)}</td></tr>"
            for i, (name, row) in enumerate(zip(part.methods, part.cells, strict=True))
            if (e := row[column]) is not None
        ]
        blocks.append(f'<h2><bdi>{text(heading(named))}</bdi></h2><table class="list">{"".join(rows)}</table>')
    return f"<section>{''.join(blocks)}</section>"


def _columns(part: Section) -> list[Explanation]:
    """For each column an explanation that names its class, which class-agnostic ones do not."""
    found = []
    for column in range(len(part.targets)):
        cells = [e for row in part.cells if (e := row[column]) is not None]
        found.append(next((e for e in cells if e.diagnostics.get("class_specific") is not False), cells[0]))
    return found


def _agnostic(row: list[Explanation | None]) -> str:
    """A remark for methods whose map is the same whatever class is asked for."""
    same = all(e.diagnostics.get("class_specific") is False for e in row if e is not None)
    return '<br><span class="s">any class</span>' if same else ""


def _highlight(e: Explanation, anchor: str | None = None) -> str:
    """Words on their colours, values on hover; a long text gets a mini-map, whose parts lead to theirs in a page."""
    pieces, rest = words(e)
    units = colours.scale_of(e).unit(np.array([piece.score for piece in pieces]))
    strip, starts = _minimap(pieces, units, anchor)
    marked = []
    for i, (piece, unit) in enumerate(zip(pieces, units, strict=True)):
        tip = piece.text if len(piece.parts) == 1 else " + ".join(f"{t} ({figure_of(s)})" for t, s in piece.parts)
        mark = f' id="{anchor}-{i}"' if anchor is not None and i in starts else ""
        marked.append(
            f'{text(piece.gap)}<span{mark} title="{figure_of(piece.score)} · {text(tip)}" '
            f'style="background:{colours.ground(unit)};border-radius:3px;padding:2px 0">{text(piece.text)}</span>'
        )
    return f'{strip}<p dir="auto" style="{_TEXT}">{"".join(marked)}{text(rest)}</p>'


def _minimap(pieces: Sequence[Word], units: NDArray[Any], anchor: str | None) -> tuple[str, set[int]]:
    """(a long text as a strip of colours, each the strongest word of its part; first words of the parts)."""
    if len(pieces) < _LONG:
        return "", set()
    cells = []
    bounds = np.linspace(0, len(pieces), min(_PARTS, len(pieces) // 4) + 1).astype(int).tolist()
    for begin, end in pairwise(bounds):
        top = begin + int(np.abs(units[begin:end]).argmax())
        strongest = f"{figure_of(pieces[top].score)} · {text(short(pieces[top].text, 40))}"
        said = f"words {begin + 1} to {end}, strongest {strongest}"
        look = f'title="{said}" style="flex:1;background:{colours.ground(units[top])}"'
        link = f' href="#{anchor}-{begin}" aria-label="{said}"'
        cells.append(f"<span {look}></span>" if anchor is None else f"<a{link} {look}></a>")
    way = "rtl" if right_to_left("".join(piece.text for piece in pieces)) else "ltr"
    name = 'role="group" aria-label="the whole text at a glance"' if anchor else 'aria-hidden="true"'
    return f'<div dir="{way}" {name} style="{_MINIMAP}">{"".join(cells)}</div>', set(bounds[:-1])


def _scale(e: Explanation, look: Look = _PLAIN) -> str:
    """The colour bar with its ends, or a note where there is nothing to draw."""
    scale = colours.scale_of(e)
    note = scale.note or (look.note if e.level != "token" else None)
    if note is not None:
        return f'<div style="{_SMALL}">{note}</div>'
    steps = np.linspace(-1 if scale.signed else 0, 1, 9)
    if e.level == "token":
        stops = [colours.ground(u) for u in steps]
    else:
        painted = np.rint(colours.paint(steps, scale.signed, look.cmap) * 255).astype(int)
        stops = [colours.code(c) for c in painted.tolist()]
    ramp = ",".join(stops)
    low, high = scale.ends
    style = f"display:inline-block;width:8em;height:.7em;margin:0 .4em;background:linear-gradient(to right,{ramp})"
    bar = f'<span style="{style}"></span>'
    return f'<div style="{_SMALL}">{low}{bar}{high}</div>'


def _classes(e: Explanation) -> str:
    best = [f"<bdi>{text(name)}</bdi> {100 * share:.1f}%" for _, name, _, share in e.top(0, 5)]
    return "The model says: " + " · ".join(best)


def _description(e: Explanation) -> str:
    return text(f"{e.method}: why {heading(e)}")


def _source(e: Explanation, look: Look) -> str:
    return _data(overlay(e, longest=_PIXELS, **asdict(look)))


def _data(pixels: NDArray[np.uint8]) -> str:
    return "data:image/png;base64," + base64.b64encode(png(pixels)).decode()

"""HTML of a generated text: a card for notebooks, and a page of its own."""

from __future__ import annotations

import hashlib
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from whyformer.show import answers, colours, grid, html, painting, paper, words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from whyformer.explanation.generation import Generation

_LEAST = 0.04  # of a scale, below which a word stays white
_LEVELS = 12
_COLOURED, _SERVED = 150, 24  # words of one choice: of the answer's, of the prompt's
_DOTS = 150
_COLUMNS = 200  # of a matrix
_MOST = 2000  # words that can be chosen
_LONGEST = 400  # pixels of a map: there is one for each word


def fragment(g: Generation) -> str:
    """A card for notebooks: black on white whatever is around it; no script.

    Each has ids of its own: a notebook may show the same answer twice.
    """
    return html.render("answer-card.html", themed=False, **_facts(g, f"g{token_hex(4)}"))


def card(g: Generation, mark: str | None = None) -> str:
    """A card for a page of ours, in the page's own colours, light or dark; with its matrix, and that of its words.

    Args:
        mark: what ids begin with, where a page may hold the same answer twice.
    """
    units = [answers.readable(g, _COLUMNS)]
    if units[0].unit == "token" and len((by_word := g.by("word")).matrix) < len(g):
        units.append(by_word)
    figures = [(one.unit, grid.claim(one), *_matrix(grid.figure(one, _COLUMNS, bare=True))) for one in units]
    return html.render("answer-full.html", themed=True, matrices=figures, **_facts(g, mark))


def page(g: Generation, title: str = "whyformer") -> str:
    """A whole document: the text, each word of which can be chosen, and the matrices."""
    return html.render("answer-page.html", title=title, body=Markup(card(g)))


def _matrix(figure: Figure) -> tuple[Markup, int]:
    """(the picture of a matrix, its width in CSS pixels)."""
    width = round(float(figure.get_size_inches()[0]) * 96)
    return html.data_uri(paper.encode(figure, "png", dpi=_DOTS)), width


def _facts(whole: Generation, mark: str | None = None) -> dict[str, Any]:
    g = answers.readable(whole, _MOST)
    digest = hashlib.sha256(repr((g.ids, g.pieces, g.method, g.matrix.double().sum().item())).encode()).hexdigest()
    return {
        "g": g, "mark": mark or f"g{digest[:8]}", "answer_style": style, "answer_title": answers.title,
        "shown": answers.shown, "reasons": answers.reasons, "others": answers.others, "answer_remarks": answers.remarks,
        "figure_of": words.figure_of, "signed": answers.signed(g), "seen": answers.seen, "pictures": _pictures(g),
        "behind": _behind, "model": _name(g.model or ""), "long": len(g.pieces) > _COLOURED,
    }  # fmt: skip


def _name(model: str) -> str:
    """Of a folder's path its last part: others may see the page."""
    return Path(model).name if Path(model).is_absolute() else model


def _pictures(g: Generation) -> list[tuple[Markup | None, list[tuple[int, Markup, str]]]]:
    """Of each picture of the prompt: the picture itself, and for each step (its token, the map, the largest score)."""
    made = []
    for name in g.seen:
        own = [g[t].part(name) for t in range(len(g))]
        if not painting.drawable(own[0]) and painting.base(own[0]) is None:
            continue
        maps = [
            (g.start + t, _compressed(painting.overlay(e, longest=_LONGEST)), colours.largest(e))
            for t, e in enumerate(own)
        ]
        plain = painting.base(own[0])
        size = painting.drawn_size(own[0], 0, _LONGEST)[::-1]
        made.append((None if plain is None else _compressed(np.asarray(plain.convert("RGB").resize(size))), maps))
    return made


def _compressed(pixels: Any) -> Markup:
    return html.data_uri(painting.encoded(pixels, "JPEG", quality=85), "jpeg")


def style(g: Generation, mark: str, themed: bool) -> Markup:
    """The rules that colour the words for each choice, and show its map: numbers and colours alone."""
    ink = "currentColor" if themed else colours.INK
    rules = [
        f"#{mark} input{{position:absolute;opacity:0;pointer-events:none}}",
        f"#{mark} label{{cursor:pointer;border-radius:3px;padding:2px 0}}#{mark} .w{{font-weight:600}}",
        f"#{mark} .d{{display:none;min-height:2.2em}}",
        f"#{mark} .seen{{display:grid;float:left;width:clamp(140px,38%,300px);margin:6px 14px 6px 0}}",
        f"#{mark} .seen>*{{grid-area:1/1;margin:0;align-self:start}}#{mark} .m{{visibility:hidden}}",
        f"#{mark} .seen img{{display:block;width:100%;margin:0;border-radius:4px}}",
    ]
    one = answers.signed(g)
    for t, row in enumerate(answers.unit(g)):
        rules += _coloured(mark, g.start + t, row, one, themed, _COLOURED)
    for j, column in enumerate(answers.served(g)[:, : g.start].T):
        rules += _coloured(mark, j, np.concatenate([np.zeros(g.start), column]), one, themed, _SERVED)
    for i in range(len(g.pieces)):
        chosen, focused = f"#{mark}-{i}:checked~", f"#{mark}-{i}:focus-visible~p .k{i}"
        rules.append(f"{chosen}p .k{i}{{outline:2px solid {ink}}}{chosen}.d{i}{{display:block}}")
        rules.append(f"{focused}{{outline:3px solid var(--accent,{colours.LIGHT['accent']})}}")
    if g.seen:  # the map of the word under the pointer stands for that of the chosen one
        steps = range(g.start, len(g.pieces))
        rules += [f"#{mark}-{i}:checked~.seen .m{i}{{visibility:visible}}" for i in steps]
        rules.append(f"#{mark}:has(.w:hover) .seen .m{{visibility:hidden}}")
        rules += [f"#{mark}:has(.k{i}:hover) .seen .m{i}{{visibility:visible}}" for i in steps]
    return Markup("\n".join(rules))


def _behind(unit: float, signed: bool, themed: bool) -> str:
    """What lies behind a word of this score: a colour, or in a page of ours an ink and how much of it."""
    if not themed:
        return colours.code(colours.ground(unit, signed))
    ink = "mattered" if not signed else "for" if unit >= 0 else "against"
    return f"rgb(var(--{ink})/calc({abs(unit):.2f}*var(--strong)))"


def _coloured(mark: str, choice: int, units: Any, signed: bool, themed: bool, most: int) -> list[str]:
    """The strongest words of one choice, so many at most; those of like colour in one rule."""
    alike: dict[float, list[int]] = {}
    least = max(_LEAST, float(np.sort(np.abs(units))[-most - 1])) if len(units) > most else _LEAST
    for i, value in enumerate(units.tolist()):
        if abs(value) > least:
            alike.setdefault(round(value * _LEVELS) / _LEVELS, []).append(i)
    made = []
    for value, places in alike.items():
        chosen = ",".join(f"#{mark}-{choice}:checked~p .k{i}" for i in places)
        made.append(f"{chosen}{{background:{_behind(value, signed, themed)}}}")
    return made

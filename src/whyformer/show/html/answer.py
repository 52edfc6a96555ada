"""HTML of a generated text: a card for notebooks, and a page of its own."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from whyformer.show import answers, colours, grid, html, paper, words

if TYPE_CHECKING:
    from whyformer.explanation.generation import Generation

_LEAST = 0.04  # of a scale, below which a word stays white
_LEVELS = 12
_DOTS = 150


def fragment(g: Generation) -> str:
    """A card for notebooks; no script."""
    return html.render("answer-card.html", **_facts(g))


def page(g: Generation, title: str = "whyformer") -> str:
    """A whole document: the text, each word of which can be chosen, and the matrix."""
    figure = grid.figure(g)
    picture = html.data_uri(paper.encode(figure, "png", dpi=_DOTS))
    width = round(float(figure.get_size_inches()[0]) * 96)
    return html.render("answer-page.html", title=title, picture=picture, width=width, **_facts(g))


def _facts(g: Generation) -> dict[str, Any]:
    digest = hashlib.sha256(repr((g.ids, g.pieces, g.method, g.matrix.double().sum().item())).encode()).hexdigest()
    return {
        "g": g, "mark": f"g{digest[:8]}", "answer_style": style, "answer_title": answers.title, "shown": answers.shown,
        "reasons": answers.reasons, "others": answers.others, "answer_remarks": answers.remarks,
        "figure_of": words.figure_of,
    }  # fmt: skip


def style(g: Generation, mark: str) -> Markup:
    """The rules that colour the words for each choice: numbers and colours alone."""
    rules = [
        f"#{mark} input{{position:absolute;opacity:0;pointer-events:none}}",
        f"#{mark} label{{cursor:pointer;border-radius:3px;padding:2px 0}}#{mark} .w{{font-weight:600}}",
        f"#{mark} .d{{display:none;min-height:2.2em}}",
    ]
    for t, row in enumerate(answers.unit(g)):
        rules += _coloured(mark, g.start + t, row)
    for j, column in enumerate(answers.served(g)[:, : g.start].T):
        rules += _coloured(mark, j, np.concatenate([np.zeros(g.start), column]))
    for i in range(len(g.pieces)):
        chosen, focused = f"#{mark}-{i}:checked~", f"#{mark}-{i}:focus-visible~p .k{i}"
        rules.append(f"{chosen}p .k{i}{{outline:2px solid #111}}{chosen}.d{i}{{display:block}}")
        rules.append(f"{focused}{{outline:3px solid #2266be}}")
    return Markup("\n".join(rules))


def _coloured(mark: str, choice: int, units: Any) -> list[str]:
    """The words of one choice, those of like colour in one rule."""
    alike: dict[float, list[int]] = {}
    for i, value in enumerate(units.tolist()):
        if abs(value) > _LEAST:
            alike.setdefault(round(value * _LEVELS) / _LEVELS, []).append(i)
    made = []
    for value, places in alike.items():
        chosen = ",".join(f"#{mark}-{choice}:checked~p .k{i}" for i in places)
        made.append(f"{chosen}{{background:{colours.code(colours.ground(value))}}}")
    return made

"""HTML of explained answers: a card for notebooks, a card for pages, and a document."""

from __future__ import annotations

import hashlib
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from whyformer.show import answers, colours, grid, html, painting, paper
from whyformer.show.words import model_title, short

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from whyformer.explanation.generation import Generation
    from whyformer.show.answers import Conversation

_LEAST = 0.04  # scaled score, below which a word stays white
_LEVELS = 12
_COLOURED, _SERVED = 150, 24  # coloured words for a chosen word of the answer, and of the prompt
_DOTS = 150
_COLUMNS = 200  # of a matrix
_MOST = 2000  # words that can be chosen
_LONGEST = 400  # pixels of each map
WHOLE, _WHOLE_NAME = "all", "the whole answer"


def fragment(g: Generation) -> str:
    """Return a card for notebooks: black on white, without a script.

    Its ids are random, because a notebook may show the same answer twice.
    """
    return html.render("answer-card.html", themed=False, **_facts(g, f"g{token_hex(4)}"))


def card(g: Generation, mark: str | None = None, *, titled: bool = True) -> str:
    """Return a card in the light or dark colours of a page, with matrices of tokens and of words.

    Args:
        mark: prefix of ids, for a page that may show the same answer twice.
        titled: begin with the question that the scores answer; False if the page has it as a heading.
    """
    talks = [answers.conversation(g, _COLUMNS)]
    if talks[0].g.unit == "token" and len((by_word := g.by("word")).matrix) < len(g):
        talks.append(answers.conversation(by_word, _COLUMNS))
    figures = [(talk.g.unit, grid.legend(talk), *_matrix(grid.drawn(talk, bare=True))) for talk in talks]
    return html.render("answer-full.html", themed=True, matrices=figures, **_facts(g, mark, titled=titled))


def page(g: Generation, title: str = "whyformer") -> str:
    """Return an HTML document: the text, whose words can be chosen, and the matrices."""
    return html.render("answer-page.html", title=title, body=Markup(card(g)))


def _matrix(figure: Figure) -> tuple[Markup, int]:
    """Return (address of the picture of a matrix, width in CSS pixels)."""
    width = round(float(figure.get_size_inches()[0]) * 96)
    return html.data_uri(paper.encode(figure, "png", dpi=_DOTS)), width


def _facts(whole: Generation, mark: str | None = None, *, titled: bool = True) -> dict[str, Any]:
    talk = answers.conversation(whole, _MOST)
    g = talk.g
    digest = hashlib.sha256(repr((g.ids, g.pieces, g.method, g.matrix.double().sum().item())).encode()).hexdigest()
    return {
        "title": short(answers.question(talk), 90) if titled else "",
        "g": g, "talk": talk, "mark": mark or f"g{digest[:8]}", "answer_style": style, "answer_source": answers.source,
        "one_line": answers.one_line, "alternatives": answers.alternatives, "answer_remarks": answers.remarks,
        "signed": talk.signed, "pictures": _pictures(talk),
        "background": _background, "model": model_title(g.model or ""), "long": len(g.pieces) > _COLOURED,
    }  # fmt: skip


def _pictures(talk: Conversation) -> list[tuple[Markup | None, list[tuple[int | str, str, Markup, str]]]]:
    """Return (picture, maps) for each picture of the prompt. Maps are (chosen word, its text, map, largest score) for
    the whole answer and each step."""
    g, pictures = talk.g, []
    for name in g.picture_maps:
        explanations = {step: talk.picture(name, step) for step in (None, *range(len(g)))}
        first = explanations[None]
        if not painting.drawable(first) and painting.base(first) is None:
            continue
        maps = []
        for t, e in explanations.items():
            choice = WHOLE if t is None else g.start + t
            label = _WHOLE_NAME if t is None else answers.one_line(g.pieces[g.start + t])
            maps.append((choice, label, _compressed(painting.overlay(e, longest=_LONGEST)), colours.largest(e)))
        plain = painting.plain(first, _LONGEST)
        pictures.append((None if plain is None else _compressed(np.asarray(plain.convert("RGB"))), maps))
    return pictures


def _compressed(pixels: Any) -> Markup:
    return html.data_uri(painting.encoded(pixels, "JPEG", quality=85), "image/jpeg")


def style(talk: Conversation, mark: str, themed: bool) -> Markup:
    """Return CSS rules that colour the words and show the map for each chosen word."""
    ink, g = "currentColor" if themed else colours.INK, talk.g
    rules = [
        f"#{mark} input{{position:absolute;opacity:0;pointer-events:none}}",
        f"#{mark} label{{cursor:pointer;border-radius:3px;padding:2px 0}}#{mark} .w{{font-weight:600}}",
        f"#{mark} .d{{display:none;min-height:2.2em}}",
        f"#{mark} .t p{{line-height:2;margin:0 0 6px;white-space:pre-wrap;overflow-wrap:anywhere}}",
        f"#{mark} summary{{cursor:pointer;width:fit-content;border-radius:3px;padding:0 3px}}",
        f"#{mark} .all{{display:inline-block;border:1px solid;border-radius:1em;padding:0 .8em;margin:4px 0}}",
        f"#{mark} .seen{{display:grid;float:left;width:clamp(140px,38%,300px);margin:6px 14px 6px 0}}",
        f"#{mark} .seen>*{{grid-area:1/1;margin:0;align-self:start}}#{mark} .m{{visibility:hidden}}",
        f"#{mark} .seen img{{display:block;width:100%;margin:0;border-radius:4px}}",
    ]
    rules += _coloured(talk, mark, WHOLE, talk.sums, talk.scale_of(None), themed)
    for t in range(len(g)):
        rules += _coloured(talk, mark, g.start + t, talk.row(t), talk.scale_of(t), themed)
    scale = colours.Scale(1.0, talk.signed)
    for j, column in enumerate(talk.column_units[:, : g.start].T):
        rules += _coloured(talk, mark, j, np.concatenate([np.zeros(g.start), column]), scale, themed, _SERVED)
    for i in (WHOLE, *range(len(g.pieces))):
        chosen, focused = f"#{mark}-{i}:checked~", f"#{mark}-{i}:focus-visible~.t .k{i}"
        rules.append(f"{chosen}.t .k{i}{{outline:2px solid {ink}}}{chosen}.d{i}{{display:block}}")
        rules.append(f"{focused}{{outline:3px solid var(--accent,{colours.LIGHT['accent']})}}")
    if g.picture_maps:  # the map of the word under the pointer replaces that of the chosen word
        steps = range(g.start, len(g.pieces))
        rules += [f"#{mark}-{i}:checked~.seen .m{i}{{visibility:visible}}" for i in (WHOLE, *steps)]
        rules.append(f"#{mark}:has(.w:hover) .seen .m{{visibility:hidden}}")
        rules += [f"#{mark}:has(.k{i}:hover) .seen .m{i}{{visibility:visible}}" for i in steps]
    return Markup("\n".join(rules))


def _background(unit: float, signed: bool, themed: bool) -> str:
    """Return the CSS colour behind a word of a scaled score; in a themed page a variable with an opacity."""
    if not themed:
        return colours.code(colours.background(unit, signed))
    return f"rgb(var(--{colours.hue_of(unit, signed)})/calc({abs(unit):.2f}*var(--strong)))"


def _coloured(
    talk: Conversation,
    mark: str,
    choice: int | str,
    row: Any,
    scale: colours.Scale,
    themed: bool,
    most: int = _COLOURED,
) -> list[str]:
    """Return a CSS rule for each colour of the ``most`` strongest words of a choice, and of collapsed messages (by the
    sums of their scores)."""
    collapsed = {f"s{m.first}": float(row[m.first : m.end].sum()) for m in talk.messages if m.collapsed}
    units = np.abs(scale.unit(row))
    least = max(_LEAST, float(np.sort(units)[-most - 1])) if len(units) > most else _LEAST
    by_colour: dict[float, list[str]] = {}
    scores = {f"k{i}": float(row[i]) for i in np.flatnonzero(units > least)} | collapsed
    for name, value in zip(scores, scale.unit(np.array([*scores.values()])).tolist(), strict=True):
        if abs(value) > _LEAST:
            by_colour.setdefault(round(value * _LEVELS) / _LEVELS, []).append(name)
    rules = []
    for value, names in by_colour.items():
        chosen = ",".join(f"#{mark}-{choice}:checked~.t .{name}" for name in names)
        rules.append(f"{chosen}{{background:{_background(value, talk.signed, themed)}}}")
    return rules

"""The explanations of a report: one card an input, and a table of all maps before them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from whyformer.apps.report import pictures
from whyformer.apps.report.cards import title
from whyformer.apps.report.material import Map
from whyformer.apps.report.pictures import Size
from whyformer.apps.report.tables import Cell, table
from whyformer.show import colours, painting
from whyformer.show.html import text
from whyformer.show.words import figure_of, probability, short, target_name, visible, words

if TYPE_CHECKING:
    from whyformer.explanation.result import Explanation

_TOP = 5


@dataclass(frozen=True)
class Shown:
    """One map of an input.

    Attributes:
        id: its anchor. label: the method, with the settings in which maps of this input differ.
    """

    id: str
    label: str
    source: Map

    @property
    def e(self) -> Explanation:
        return self.source.e

    @property
    def target(self) -> str:
        return target_name(self.e)

    @property
    def model(self) -> str:
        return title(self.e.model or "unnamed model")


@dataclass
class Input:
    """One picture or sentence, as one model sees it, with all its maps."""

    number: int
    title: str
    maps: list[Shown] = field(default_factory=list)

    @property
    def first(self) -> Explanation:
        return self.maps[0].e


def inputs_of(maps: Sequence[Map]) -> list[Input]:
    """Maps sorted by model and input, each in order of appearance."""
    groups: dict[tuple[str | None, str], list[Map]] = {}
    for one in maps:
        groups.setdefault((one.e.model, _key(one.e)), []).append(one)
    made = []
    for number, group in enumerate(groups.values(), 1):
        shown = [Shown(f"i{number}-{k}", _label(m, group), m) for k, m in enumerate(group, 1)]
        made.append(Input(number, _title(group), shown))
    return made


def _key(e: Explanation) -> str:
    if e.texts is not None:
        return e.texts[0]
    picture = painting.base(e)
    raw = picture.tobytes() if picture is not None else json.dumps([e.tokens, e.logits.tolist()]).encode()
    return hashlib.sha256(raw).hexdigest()


def _title(group: Sequence[Map]) -> str:
    """The sentence, or what the names of the maps' files begin with."""
    first = group[0]
    if first.e.texts is not None:
        return short(" ".join(first.e.texts[0].split()), 90)
    shared = takewhile(lambda letters: len(set(letters)) == 1, zip(*(m.title for m in group), strict=False))
    return "".join(letters[0] for letters in shared).rstrip("-_., ") or first.title


def _label(one: Map, group: Sequence[Map]) -> str:
    twins = [m.e.settings for m in group if m.e.method == one.e.method]
    differing = {k: v for k, v in one.e.settings.items() if any(t.get(k) != v for t in twins)}
    return visible(f"{one.e.method} ({_written(differing)})" if differing else one.e.method)


def _written(settings: dict[str, Any]) -> str:
    return ", ".join(f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in settings.items()) or "none"


# -- the table of all maps ---------------------------------------------------------------------------------------
def overview(inputs: Sequence[Input]) -> str:
    """One row a map; the script filters the rows, and the cards with them."""
    rows = []
    for one in inputs:
        (_, predicted, _, share) = one.first.top(0, 1)[0]
        for shown in one.maps:
            p = probability(shown.e)
            searched = f"{one.title} {shown.source.file} {shown.label} {shown.target} {predicted} {shown.model}"
            words = f"{searched} {shown.e.texts[0] if shown.e.texts else ''}".casefold()
            attributes = (
                f'data-map="{shown.id}" data-method="{text(shown.e.method)}" data-class="{text(shown.target)}" '
                f'data-model="{text(shown.model)}" data-text="{text(" ".join(words.split()))}"'
            )
            cells = [
                Cell(f'<a href="#{shown.id}">{one.number}</a>', one.number),
                Cell(f"<bdi>{text(one.title)}</bdi>", one.title),
                Cell(text(shown.label)),
                Cell(f"<bdi>{text(shown.target)}</bdi>", shown.target),
                Cell("–" if p is None else f"{100 * p:.1f} %", -1.0 if p is None else p),
                Cell(f"<bdi>{text(visible(predicted))}</bdi>", predicted),
                Cell(f"{100 * share:.1f} %", share),
                Cell(text(shown.model)),
            ]
            rows.append((attributes, cells))
    head = ["#", "input", "method", "explained", "probability", "predicted", "probability of it", "model"]
    return table("All maps", head, rows, numeric={0, 4, 6})


# -- one input ---------------------------------------------------------------------------------------------------
def card(one: Input, size: Size) -> str:
    """The input, what the model says of it, and its maps."""
    files = list(dict.fromkeys(m.source.file for m in one.maps))
    found = files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
    maps = "".join(_figure(shown, size) for shown in one.maps)
    return (
        f'<article class="card" id="i{one.number}" aria-labelledby="i{one.number}-t">'
        f'<h3 id="i{one.number}-t">{one.number}. <bdi>{text(one.title)}</bdi></h3>'
        f'<p class="s">{text(one.maps[0].model)} · {text(visible(found))}</p>'
        f'<div class="said">{_picture(one, size)}{_classes(one.first)}</div>'
        f'<div class="maps {"lines" if one.first.level == "token" else "tiles"}">{maps}</div>'
        f"{_details(one)}</article>\n"
    )


def _picture(one: Input, size: Size) -> str:
    plain = painting.base(one.first)
    if plain is None:
        return ""
    return f'<img class="plain" alt="the picture {text(one.title)}" src="{pictures.encoded(plain, size)}">'


def _classes(e: Explanation) -> str:
    """The likeliest classes, with their probabilities as bars."""
    rows = "".join(
        f'<tr><th scope="row"><bdi>{text(visible(name))}</bdi></th>'
        f'<td><span class="bar" style="--p:{share:.4f}"></span></td><td class="n">{100 * share:.1f} %</td></tr>'
        for _, name, _, share in e.top(0, _TOP)
    )
    several = " (each class by itself)" if e.multi_label else ""
    return f'<table class="classes"><caption>The model says{several}</caption><tbody>{rows}</tbody></table>'


def _figure(shown: Shown, size: Size) -> str:
    e, p = shown.e, probability(shown.e)
    share = "" if p is None else f' · <span class="n">{100 * p:.1f} %</span>'
    said = f"<b>{text(shown.label)}</b><br><span>for <bdi>{text(shown.target)}</bdi>{share}</span>"
    warned = "".join(f'<p class="warning">{text(w)}</p>' for w in _warnings(e.diagnostics))
    if e.level == "token":
        body = _sentence(e)
    elif e.level == "patch" and e.grid is None:
        body = '<p class="s">patch scores without a grid: they cannot be drawn</p>'
    else:
        about = text(f"{shown.label}: what speaks for {shown.target}")
        body = f'<img alt="{about}" src="{pictures.encoded(pictures.overlay(e, size), size)}">'
    return f'<figure id="{shown.id}"><figcaption>{said}</figcaption>{body}{_scale(e)}{warned}</figure>'


def _sentence(e: Explanation) -> str:
    pieces, rest = words(e)
    scale = colours.scale_of(e)
    made = []
    for piece in pieces:
        unit = float(scale.unit(np.array(piece.score)))
        kind = "against" if unit < 0 else "for"
        made.append(
            f'{text(piece.gap)}<span class="{kind}" style="--u:{abs(unit):.2f}" title="{figure_of(piece.score)}">'
            f"{text(piece.text)}</span>"
        )
    return f'<p class="sentence" dir="auto">{"".join(made)}{text(rest)}</p>'


def _scale(e: Explanation) -> str:
    """The colour bar with its ends, or why there is none."""
    scale = colours.scale_of(e)
    if scale.note is not None:
        return f'<p class="s">{scale.note}</p>'
    low, high = scale.ends
    if e.level == "token":
        bar = f'<span class="ramp {"both" if scale.signed else "one"}"></span>'
    else:
        steps = np.linspace(-1 if scale.signed else 0, 1, 9)
        stops = [np.rint(c * 255).astype(int).tolist() for c in colours.paint(steps, scale.signed)]
        ramp = ",".join(colours.code(stop) for stop in stops)
        bar = f'<span class="ramp" style="background:linear-gradient(to right,{ramp})"></span>'
    return f'<p class="s scale">{low} {bar} {high}</p>'


def _details(one: Input) -> str:
    rows = "".join(
        f'<tr><th scope="row">{text(m.label)}<br><bdi>{text(m.target)}</bdi></th>'
        f"<td>{text(visible(m.source.file))}</td>"
        f"<td>{text(_written(m.e.settings))}</td><td>{text(_diagnosed(m.e.diagnostics))}</td></tr>"
        for m in one.maps
    )
    return (
        "<details><summary>Settings and diagnostics</summary>"
        '<div class="wide" tabindex="0" role="region" aria-label="Settings and diagnostics">'
        '<table class="facts"><thead>'
        '<tr><th scope="col">map</th><th scope="col">file</th><th scope="col">settings</th>'
        '<th scope="col">diagnostics</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div></details>"
    )


def _warnings(diagnostics: dict[str, Any]) -> list[str]:
    """What the run itself warns of."""
    found = [v for k, v in diagnostics.items() if "warning" in k.casefold() and v]
    return [str(w) for value in found for w in (value if isinstance(value, list | tuple) else [value])]


def _diagnosed(diagnostics: dict[str, Any]) -> str:
    said = {k: v for k, v in diagnostics.items() if "warning" not in k.casefold() and k != "class_specific"}
    return "; ".join(f"{k}: {_brief(v)}" for k, v in said.items()) or "none"


def _brief(value: Any) -> str:
    """A figure in four digits; of a list only its beginning."""
    if isinstance(value, bool) or not isinstance(value, int | float | list | tuple | dict):
        return str(value)
    if isinstance(value, int | float):
        return figure_of(value)
    if isinstance(value, dict):
        return ", ".join(f"{k} {_brief(v)}" for k, v in value.items())
    if len(value) == 1:
        return _brief(value[0])
    return "[" + ", ".join(map(_brief, value[:4])) + (f", … {len(value)} in all" if len(value) > 4 else "") + "]"

"""The report as one HTML document: nothing in it is fetched, and it reads without its script."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

from whyformer.apps.report.benchmarks import benchmark
from whyformer.apps.report.facts import conventions, left_out, methods, models, versions_of
from whyformer.apps.report.inputs import Input, card, overview
from whyformer.apps.report.material import Material
from whyformer.apps.report.pictures import Size
from whyformer.explanation.versions import versions
from whyformer.show.html import text

Track = Callable[..., Any]


def page(material: Material, inputs: Sequence[Input], size: Size, title: str, track: Track) -> str:
    """The whole document, drawn one input after the other."""
    style, script = _asset("page.css"), _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # the page's own script has a known digest, so a script that came in by a name or a token would not run even if it
    # were not escaped
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )
    parts: list[tuple[str, str, str]] = []
    if inputs:
        cards = "".join(card(one, size) for one in track(inputs, "drawing", len(inputs)))
        parts.append(("explanations", "Explanations", f"{_filters(inputs)}{overview(inputs)}{cards}"))
    if material.results:
        body = "".join(benchmark(result, i) for i, result in enumerate(material.results, 1))
        parts.append(("benchmarks", "Benchmarks", body))
    parts += [(key, heading, body) for key, heading, body in _facts(material, inputs) if body]
    links = "".join(f'<li><a href="#{key}">{heading}</a></li>' for key, heading, _ in parts)
    sections = "".join(
        f'<section id="{key}" aria-labelledby="{key}-title"><h2 id="{key}-title">{heading}</h2>{body}</section>\n'
        for key, heading, body in parts
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta name="generator" content="whyformer {versions()["whyformer"]}">'
        f'<meta name="color-scheme" content="light dark"><title>{text(title)}</title>\n<style>{style}</style></head>\n'
        f'<body><header><h1><bdi>{text(title)}</bdi></h1><p class="s">{_summary(material, inputs)}</p>'
        f'<nav aria-label="Sections"><ul>{links}</ul></nav></header>\n<main>{sections}</main>\n'
        f"<script>{script}</script></body></html>\n"
    )


def _asset(name: str) -> str:
    return (resources.files("whyformer.apps.report") / name).read_text(encoding="utf-8")


def _summary(material: Material, inputs: Sequence[Input]) -> str:
    counts = ((len(inputs), "input"), (sum(len(i.maps) for i in inputs), "map"), (len(material.results), "benchmark"))
    said = [f"{count} {word}{'' if count == 1 else 's'}" for count, word in counts if count]
    return f"{', '.join(said)}. Made by whyformer {versions()['whyformer']}."


def _facts(material: Material, inputs: Sequence[Input]) -> list[tuple[str, str, str]]:
    return [
        ("models", "Models", models(material)),
        ("methods", "Methods", methods(material)),
        ("conventions", "Conventions", conventions() if inputs else ""),
        ("versions", "Versions", versions_of(material)),
        ("left-out", "Files left out", left_out(material)),
    ]


def _filters(inputs: Sequence[Input]) -> str:
    """Shown by the script, which does the work."""
    maps = [m for i in inputs for m in i.maps]

    def choice(key: str, name: str, values: list[str]) -> str:
        options = "".join(f'<option value="{text(v)}">{text(v)}</option>' for v in dict.fromkeys(sorted(values)))
        return f'<label>{name} <select data-filter="{key}"><option value="">all</option>{options}</select></label>'

    return (
        '<form class="filters" role="search" aria-label="Filter the explanations" hidden>'
        '<label>Text <input type="search" data-filter="text" placeholder="words, files, classes"></label>'
        + choice("method", "Method", [m.e.method for m in maps])
        + choice("class", "Class", [m.target for m in maps])
        + choice("model", "Model", [m.model for m in maps])
        + '<button type="reset">Show all</button><output aria-live="polite"></output></form>'
    )

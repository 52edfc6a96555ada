"""What a reader of a report must know besides: models, methods, conventions, versions, and files left out."""

from __future__ import annotations

from collections.abc import Sequence

from whyformer.apps.report.cards import Card, card, title
from whyformer.apps.report.material import Material
from whyformer.apps.report.tables import Cell, table
from whyformer.show.html import text
from whyformer.show.words import visible

_MOST_FILES = 200
_CONVENTIONS = (
    ("Colours", "Each map is scaled by its own largest score, so colours cannot be compared between maps; the figures "
     "at the ends of its colour bar can. Scores with a sign run from blue (against the class) over nothing to orange "
     "(for it); scores without one from dark to light."),
    ("Pictures", "Drawn in grey under the map, at the place where the model saw them. Hatched parts were cut off by "
     "its processor: they have no score. Pictures are made smaller and compressed."),
    ("Words", "A word has the score of its token of largest magnitude, with its sign; hold the pointer over a word for "
     "the figure."),
    ("Probability", "Softmax of the model's output; sigmoid where the classes do not exclude one another."),
    ("Any class", "The method's map is the same whatever class is asked for."),
    ("What a map says", "What this model used, under the assumptions of the method; not that the model is right."),
)  # fmt: skip


def models(material: Material) -> str:
    """A row for each model of the explanations and the benchmarks."""
    labels: dict[str, dict[int, str] | None] = {}
    for one in material.maps:
        if one.e.model is not None:
            labels.setdefault(one.e.model, one.e.labels)
    for result in material.results:
        named = result.facts.get("conventions")
        name = named.get("model") if isinstance(named, dict) else None
        if isinstance(name, str) and name:
            labels.setdefault(name, None)
    if not labels:
        return ""
    head = ["name", "architecture", "classes", "parameters", "licence"]
    rows = [("", _model(card(name, known))) for name, known in labels.items()]
    remark = '<p class="s">Read from the models\' own files; unknown where they are not on this machine.</p>'
    return table("Models", head, rows, numeric={3}, titled=False) + remark


def _model(facts: Card) -> list[Cell]:
    names = ", ".join(facts.classes[:12]) + (" …" if len(facts.classes) > 12 else "")
    classes = f"{len(facts.classes)}: <bdi>{text(visible(names))}</bdi>" if facts.classes else "unknown"
    return [
        Cell(text(title(facts.name))),
        Cell(text(facts.architecture or "unknown")),
        Cell(classes, len(facts.classes)),
        Cell("unknown" if facts.parameters is None else f"{facts.parameters:,}", facts.parameters or 0),
        Cell(text(facts.licence or "unknown")),
    ]


def methods(material: Material) -> str:
    """A row for each method of the explanations, as its registry describes it."""
    from whyformer.methods import METHODS

    rows = []
    for name in sorted({m.e.method for m in material.maps}):
        count = sum(m.e.method == name for m in material.maps)
        known = METHODS.get(name)
        about = (known.family, known.summary, known.citation) if known else ("unknown", "", "")
        rows.append(("", [Cell(text(visible(name))), *(Cell(text(a)) for a in about), Cell(str(count), count)]))
    head = ["name", "family", "what it is", "published", "maps"]
    return table("Methods", head, rows, numeric={4}, titled=False) if rows else ""


def conventions() -> str:
    """How to read the maps."""
    return f"<dl>{''.join(f'<dt>{text(k)}</dt><dd>{text(v)}</dd>' for k, v in _CONVENTIONS)}</dl>"


def versions_of(material: Material) -> str:
    """The versions that made the explanations; a benchmark's stand among its conventions."""
    found: dict[str, int] = {}
    for one in material.maps:
        said = ", ".join(f"{name} {number}" for name, number in one.versions.items()) or "not stored"
        found[said] = found.get(said, 0) + 1
    for result in material.results:
        listed = result.facts.get("conventions")
        if isinstance(listed, dict) and listed.get("versions"):
            found.setdefault(str(listed["versions"]), 0)
    return _points([f"{said}{f' ({count} maps)' if count else ' (benchmarks)'}" for said, count in found.items()])


def left_out(material: Material) -> str:
    """Files that were found and are not in the report; damaged ones first."""
    listed = sorted(material.skipped, key=lambda s: not s.damaged)
    rows = []
    for one in listed[:_MOST_FILES]:
        why = f'<span class="{"warning" if one.damaged else "s"}">{text(one.why)}</span>'
        rows.append(("", [Cell(text(visible(one.file))), Cell(why, one.why)]))
    more = len(listed) - len(rows)
    made = table("Files left out", ["file", "why"], rows, titled=False) if rows else ""
    return made + (f'<p class="s">and {more} more</p>' if more else "")


def _points(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{text(line)}</li>' for line in lines)}</ul>" if lines else ""

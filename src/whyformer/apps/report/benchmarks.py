"""The benchmarks of a report: tables, curves, samples without figures, and the conventions behind them."""

from __future__ import annotations

from typing import Any

from whyformer.apps.report.cards import title
from whyformer.apps.report.material import Result
from whyformer.apps.report.pictures import drawing
from whyformer.apps.report.tables import Cell, table
from whyformer.show.html import text
from whyformer.show.words import figure_of

_SHOWN_ERRORS = 5


def benchmark(result: Result, number: int) -> str:
    """One benchmark."""
    facts = result.facts
    name = str(facts.get("benchmark", "benchmark"))
    model = _listed(facts.get("conventions")).get("model")
    parts = [
        f'<article class="card" id="b{number}"><h3>{text(name)}{f" · {text(title(str(model)))}" if model else ""}</h3>',
        f'<p class="s">{text(result.file)}</p>',
        *(_table(entry, facts.get("figures") or []) for entry in _tables(facts)),
        _curves(result, name),
        _unscored(facts.get("counts")),
        _errors(result),
        _points(facts.get("remarks")),
        _conventions(facts.get("conventions")),
        "</article>\n",
    ]
    return "".join(parts)


def _tables(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """What stands around the figures; made up from the figures where a file of an earlier version has no such list."""
    if isinstance(facts.get("tables"), list):
        return [t for t in facts["tables"] if isinstance(t, dict)]
    figures = [f for f in facts.get("figures") or [] if isinstance(f, dict)]
    made = []
    for name in dict.fromkeys(str(f.get("table")) for f in figures):
        own = [f for f in figures if str(f.get("table")) == name]
        rows, columns = (list(dict.fromkeys(str(f.get(key)) for f in own)) for key in ("row", "column"))
        made.append({"table": name, "title": name, "rows": rows, "columns": columns})
    return made


def _table(entry: dict[str, Any], figures: list[Any]) -> str:
    name, caption = str(entry.get("table", "")), str(entry.get("title") or entry.get("table", ""))
    columns = [str(c) for c in entry.get("columns") or []]
    note = f'<p class="s">{text(str(entry["note"]))}</p>' if entry.get("note") else ""
    if not columns:
        return f"<h4>{text(caption)}</h4>{note}"
    digits = entry.get("digits")
    found = {
        (str(f.get("row")), str(f.get("column"))): f
        for f in figures
        if isinstance(f, dict) and str(f.get("table")) == name
    }
    rows = [
        ("", [Cell(text(row)), *(_figure(found.get((row, column), {}), digits) for column in columns)])
        for row in map(str, entry.get("rows") or [])
    ]
    head = [str(entry.get("corner") or ""), *columns]
    return table(caption, head, rows, numeric=range(1, len(head))) + note


def _figure(figure: dict[str, Any], digits: Any) -> Cell:
    """The measured value with its interval, and the published one under it."""

    def written(key: str) -> str | None:
        value = figure.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return f"{value:.{digits}f}" if isinstance(digits, int) and 0 <= digits < 12 else figure_of(value)

    measured, low, high, published = (written(k) for k in ("measured", "low", "high", "published"))
    shown = "–" if measured is None else measured
    if measured is not None and low is not None and high is not None and low != high:
        shown += f' <small class="s">[{low}, {high}]</small>'
    if published is not None:
        shown += f'<br><small class="s">published {published}</small>'
    value = figure.get("measured")
    return Cell(shown, float(value) if isinstance(value, int | float) else "")


def _curves(result: Result, name: str) -> str:
    if result.curves is None:
        return ""
    source = drawing(result.curves)
    if source is None:
        return '<p class="warning">curves.png cannot be read</p>'
    panels = _listed(result.facts.get("curves"))
    lines = list(dict.fromkeys(str(line) for panel in panels.values() for line in _listed(panel)))
    about = text(f"curves of {name}: {', '.join(map(str, panels))}; lines: {', '.join(lines)}")
    return f'<figure class="curves"><img alt="{about}" src="{source}"></figure>'


def _unscored(counts: Any) -> str:
    """Shown only where there are any."""
    kinds = ("scored", "failed", "constant", "nan")
    listed = {str(k): _listed(v) for k, v in _listed(counts).items()}
    if not any(found.get(kind) for found in listed.values() for kind in kinds[1:]):
        return ""
    rows = [
        ("", [Cell(text(label)), *(Cell(text(str(found.get(kind, 0)))) for kind in kinds)])
        for label, found in listed.items()
    ]
    return table("Samples without figures", ["configuration", *kinds], rows, numeric=range(1, 5))


def _errors(result: Result) -> str:
    shown = list(result.errors.items())[:_SHOWN_ERRORS]
    said = [f"{label}: {message} ({count} of {result.records} records)" for (label, message), count in shown]
    if len(result.errors) > len(shown):
        said.append(f"and {len(result.errors) - len(shown)} other errors in records.jsonl")
    return "".join(f'<p class="warning">{text(one)}</p>' for one in said)


def _points(remarks: Any) -> str:
    listed = [str(r) for r in remarks] if isinstance(remarks, list) else []
    return f"<ul>{''.join(f'<li>{text(r)}</li>' for r in listed)}</ul>" if listed else ""


def _conventions(listed: Any) -> str:
    said = {str(k): title(str(v)) if k == "model" else str(v) for k, v in _listed(listed).items()}
    rows = "".join(f"<dt>{text(k)}</dt><dd>{text(v)}</dd>" for k, v in said.items())
    return f"<details><summary>Conventions of this benchmark</summary><dl>{rows}</dl></details>" if rows else ""


def _listed(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}

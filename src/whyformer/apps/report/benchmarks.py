"""The benchmarks of a report, read for its template: tables, curves, samples without figures, conventions."""

from __future__ import annotations

from typing import Any

from whyformer.apps.report.cards import title
from whyformer.apps.report.contents import Benchmark
from whyformer.apps.report.pictures import drawing
from whyformer.show.words import figure_of

_SHOWN_ERRORS = 5
KINDS = ["scored", "failed", "constant", "nan"]


def shown(benchmark: Benchmark) -> dict[str, Any]:
    """What the template needs of one benchmark; whatever a file holds, the kinds of its values are right."""
    facts = benchmark.facts
    said = {str(k): title(str(v)) if k == "model" else str(v) for k, v in benchmark.conventions.items()}
    remarks = facts.get("remarks")
    return {
        "name": str(facts.get("benchmark", "benchmark")),
        "model": said.get("model"),
        "file": benchmark.file,
        "tables": [_table(entry, _dicts(facts.get("figures"))) for entry in _tables(facts)],
        "curves": None if benchmark.curves is None else drawing(benchmark.curves),
        "damaged": benchmark.curves is not None and drawing(benchmark.curves) is None,
        "panels": {str(k): list(map(str, _dict(v))) for k, v in _dict(facts.get("curves")).items()},
        "unscored": _unscored(facts.get("counts")),
        "errors": _errors(benchmark),
        "remarks": [str(r) for r in remarks] if isinstance(remarks, list) else [],
        "conventions": said,
    }


def _tables(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """What stands around the figures; made up from the figures where a file of an earlier version has no such list."""
    if isinstance(facts.get("tables"), list):
        return _dicts(facts["tables"])
    figures = _dicts(facts.get("figures"))
    made = []
    for name in dict.fromkeys(str(f.get("table")) for f in figures):
        own = [f for f in figures if str(f.get("table")) == name]
        rows, columns = (list(dict.fromkeys(str(f.get(key)) for f in own)) for key in ("row", "column"))
        made.append({"table": name, "title": name, "rows": rows, "columns": columns})
    return made


def _table(entry: dict[str, Any], figures: list[dict[str, Any]]) -> dict[str, Any]:
    name = str(entry.get("table", ""))
    columns = [str(c) for c in entry.get("columns") or []]
    found = {(str(f.get("row")), str(f.get("column"))): f for f in figures if str(f.get("table")) == name}
    return {
        "caption": str(entry.get("title") or name),
        "note": str(entry.get("note") or ""),
        "head": [str(entry.get("corner") or ""), *columns] if columns else [],
        "rows": [
            (row, [_figure(found.get((row, column), {}), entry.get("digits")) for column in columns])
            for row in map(str, entry.get("rows") or [])
        ],
    }


def _figure(figure: dict[str, Any], digits: Any) -> dict[str, Any]:
    """The measured value, its interval and the published one as they are written; ``by`` sorts them."""

    def written(key: str) -> str | None:
        value = figure.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return f"{value:.{digits}f}" if isinstance(digits, int) and 0 <= digits < 12 else figure_of(value)

    measured, low, high, published = (written(k) for k in ("measured", "low", "high", "published"))
    interval = f"[{low}, {high}]" if None not in (measured, low, high) and low != high else None
    value = figure.get("measured")
    by = float(value) if isinstance(value, int | float) else ""
    return {"measured": measured, "interval": interval, "published": published, "by": by}


def _unscored(counts: Any) -> list[tuple[str, list[str]]]:
    """Samples of each kind a configuration; none where all of them were scored."""
    listed = {str(label): _dict(found) for label, found in _dict(counts).items()}
    if not any(found.get(kind) for found in listed.values() for kind in KINDS[1:]):
        return []
    return [(label, [str(found.get(kind, 0)) for kind in KINDS]) for label, found in listed.items()]


def _errors(benchmark: Benchmark) -> list[str]:
    first = list(benchmark.errors.items())[:_SHOWN_ERRORS]
    said = [f"{label}: {message} ({count} of {benchmark.records} records)" for (label, message), count in first]
    more = len(benchmark.errors) - len(first)
    return [*said, f"and {more} other errors in records.jsonl"] if more else said


def _dict(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []

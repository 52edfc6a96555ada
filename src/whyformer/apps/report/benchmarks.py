"""Benchmarks and other results with tables, as sections of a report."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from whyformer.apps.report.pictures import drawing
from whyformer.explanation.schemas import BenchmarkSchema, checked
from whyformer.show.html import render
from whyformer.show.words import format_score, model_title

FILES = ("table.md", "table.csv", "curves.png", "records.jsonl")
"""Files of a benchmark beside its report.json."""
_COUNTS = ["scored", "failed", "constant", "nan"]

Cell = tuple[float | None, float | None, float | None, float | None]
"""A measured value, the ends of its interval, and the published value."""


@dataclass(frozen=True)
class BenchmarkSection:
    """A section in HTML.

    Attributes:
        html: the section.
        model: name of the model; empty if it is not stored.
        versions: versions of the packages; empty if they are not stored.
        kind: "benchmark", or "data set" and "drift" for the folder of a job.
    """

    html: Markup
    model: str
    versions: str
    kind: str


def section(
    kind: str, file: str, conventions: Mapping[str, Any], tables: Sequence[Mapping[str, Any]], remarks: Sequence[str],
    **facts: Any,
) -> BenchmarkSection:  # fmt: skip
    """Render a section.

    Args:
        kind: see :class:`BenchmarkSection`.
        file: the file or folder that it was read from.
        conventions: how the values were measured, with "model" and "versions".
        tables: title, corner, columns, rows (name, cells), digits and note of each table.
        remarks: notes for the reader.
        facts: other variables of the template.
    """
    model, versions = (str(conventions.get(key, "")) for key in ("model", "versions"))
    html = render(
        "report/benchmark.html", kind=kind, file=file, conventions=conventions, tables=tables, remarks=remarks,
        model=model_title(model), written=_written, kinds=_COUNTS,
        **{"name": kind, "counts": {}, "curves": None, "pictures": [], "errors": [], **facts},
    )  # fmt: skip
    return BenchmarkSection(Markup(html), model, versions, kind)


def read_benchmark(path: Path, file: str, facts: Mapping[str, Any]) -> BenchmarkSection:
    """Return the section of a ``report.json`` with the curves and records beside it, or of what --json printed.

    Raises:
        InputError: the values are not those of a benchmark.
    """
    report = checked(BenchmarkSchema, facts, "the report")
    cells = {(f.table, f.row, f.column): (f.measured, f.low, f.high, f.published) for f in report.figures}
    tables = [
        {**dict(t), "rows": [(row, [cells.get((t.table, row, column)) for column in t.columns]) for row in t.rows]}
        for t in report.tables
    ]
    curves, records = path.with_name("curves.png"), path.with_name("records.jsonl")
    in_folder = path.name == "report.json"
    drawn = {}
    if in_folder and curves.is_file():
        lines = dict.fromkeys(line for panel in report.curves.values() for line in panel)
        drawn["curves"] = {"picture": drawing(curves.read_bytes()), "panels": list(report.curves), "lines": list(lines)}
    errors = _errors(records) if in_folder and records.is_file() else []
    incomplete = any(count.failed or count.constant or count.nan for count in report.counts.values())
    return section(
        "benchmark", file, report.conventions, tables, report.remarks,
        name=report.benchmark, counts=report.counts if incomplete else {}, errors=errors, **drawn,
    )  # fmt: skip


def _written(value: float | None, digits: int | None) -> str | None:
    """Return a value with ``digits`` digits after the point."""
    return None if value is None else format_score(value) if digits is None else f"{value:.{min(digits, 12)}f}"


def _errors(records: Path) -> list[str]:
    """Return the first five errors in the records of a benchmark, each with its number of records."""
    errors: Counter[str] = Counter()
    count = 0
    for line in records.read_bytes().splitlines():
        try:
            record = json.loads(line)
            count += 1
            if "error" in record:
                errors[f"{record['configuration']}: {record['error']}"] += 1
        except (ValueError, KeyError, TypeError):
            continue  # a kill may truncate the last line
    listed = [f"{message} ({number} of {count} records)" for message, number in errors.items()]
    return listed if len(listed) <= 5 else [*listed[:5], f"and {len(listed) - 5} other errors in records.jsonl"]

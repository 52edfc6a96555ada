"""The benchmarks of a report: each read and put into its template at once, so that one that does not fit is told."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from markupsafe import Markup

from whyformer.apps.report.models import title
from whyformer.apps.report.pictures import drawing
from whyformer.errors import InputError, LoadError
from whyformer.explanation.schemas import HeldBenchmark, checked
from whyformer.show.html import render
from whyformer.show.words import figure_of

FILES = ("report.json", "table.md", "table.csv", "curves.png", "records.jsonl")
_KINDS = ["scored", "failed", "constant", "nan"]
_FIGURES = ("measured", "low", "high", "published")


@dataclass(frozen=True)
class BenchmarkSection:
    """A benchmark in HTML, with the names of its model and of the packages that made it where these are stated; of kind
    "data set" and "drift", what a job's folder says."""

    html: Markup
    model: str
    versions: str
    kind: str = "benchmark"


def read_benchmark(path: Path, file: str, facts: dict[str, Any]) -> BenchmarkSection:
    """A ``report.json`` with the curves and records beside it; printed with --json, it stands alone.

    Raises:
        LoadError: its values are not those of a benchmark.
    """
    try:
        checked(HeldBenchmark, facts, "the report")
    except InputError as error:
        raise LoadError(f"damaged: it is no whole report of a benchmark ({error})") from error
    alone = path.name != "report.json"
    curves, records = path.with_name("curves.png"), path.with_name("records.jsonl")
    drawn = curves.read_bytes() if not alone and curves.is_file() else None
    return rendered(facts, file, drawn, _errors(records) if not alone and records.is_file() else [])


def rendered(
    facts: dict[str, Any], file: str, drawn: bytes | None = None, errors: Sequence[str] = (), kind: str = "benchmark"
) -> BenchmarkSection:
    """The facts of a benchmark in its template.

    Raises:
        LoadError: the values are not those of a benchmark.
    """
    try:
        model, versions = (str(facts["conventions"].get(key, "")) for key in ("model", "versions"))
        html = render(
            "report/benchmark.html", facts=facts, file=file, model=title(model), kinds=_KINDS, written=_written,
            figures={(f["table"], f["row"], f["column"]): f for f in facts["figures"]},
            curves=None if drawn is None else drawing(drawn), drawn=drawn is not None, errors=errors, kind=kind,
        )  # fmt: skip
    except (TypeError, KeyError, AttributeError, ValueError, TemplateError) as error:
        raise LoadError(f"damaged: it is no whole report of a benchmark ({error})") from error
    return BenchmarkSection(Markup(html), model, versions, kind)


def read_table(path: Path, file: str) -> BenchmarkSection | None:
    """A ``table.csv`` without its ``report.json``; None if it is no benchmark's."""
    try:
        rows = list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))
        figures = [{**row, **{k: float(row[k]) if row[k] else None for k in _FIGURES}} for row in rows]
        cells = [(f["table"], f["row"], f["column"]) for f in figures]
    except (ValueError, KeyError, TypeError, csv.Error):
        return None
    tables = [
        {"table": name, "title": name, "digits": None, "note": "", "corner": "",
         "rows": list(dict.fromkeys(row for table, row, _ in cells if table == name)),
         "columns": list(dict.fromkeys(column for table, _, column in cells if table == name))}
        for name in dict.fromkeys(table for table, _, _ in cells)
    ]  # fmt: skip
    remark = "Only table.csv was found: the conventions behind these figures are in report.json."
    facts = {"benchmark": path.parent.name or "table", "figures": figures, "tables": tables, "remarks": [remark],
             "conventions": {}, "counts": {}, "curves": {}}  # fmt: skip
    return read_benchmark(path, file, facts) if figures else None


def _written(value: float | None, digits: int | None) -> str | None:
    """A figure of a table, in so many digits behind the point."""
    return None if value is None else figure_of(value) if digits is None else f"{value:.{min(digits, 12)}f}"


def _errors(records: Path) -> list[str]:
    """The first errors in a benchmark's records, each once with its number."""
    errors: Counter[str] = Counter()
    count = 0
    for line in records.read_bytes().splitlines():
        try:
            record = json.loads(line)
            count += 1
            if "error" in record:
                errors[f"{record['configuration']}: {record['error']}"] += 1
        except (ValueError, KeyError, TypeError):
            continue  # the line that was being written when a run was killed
    said = [f"{message} ({number} of {count} records)" for message, number in errors.items()]
    return said if len(said) <= 5 else [*said[:5], f"and {len(said) - 5} other errors in records.jsonl"]

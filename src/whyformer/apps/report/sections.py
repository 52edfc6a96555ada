"""Benchmarks and the folders of jobs as sections of a report: tables, curves, mean maps, failures and drift."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from whyformer.apps.report.pictures import drawing, drawn
from whyformer.errors import FOREIGN_ERRORS, InputError, WhyformerError
from whyformer.explanation.counts import amount
from whyformer.explanation.schemas import BenchmarkSchema, checked
from whyformer.show.html import render
from whyformer.show.words import format_score, model_title

if TYPE_CHECKING:
    from whyformer.evaluation.statistics import Interval
    from whyformer.jobs.reading import Maps

FILES = ("table.md", "table.csv", "curves.png", "records.jsonl")
"""Files of a benchmark beside its report.json."""
_WORDS, _PAIRS, _PICTURE = 12, 12, 60_000
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
) -> BenchmarkSection:
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
    )
    return BenchmarkSection(Markup(html), model, versions, kind)


# -- benchmarks ------------------------------------------------------------------------------------------------------
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
    )


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
    lines = [f"{message} ({number} of {count} records)" for message, number in errors.items()]
    return lines if len(lines) <= 5 else [*lines[:5], f"and {len(lines) - 5} other errors in records.jsonl"]


# -- jobs ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class JobFolder:
    """The folder of a job, and its name in the report."""

    maps: Maps
    file: str


def summary(job: JobFolder) -> BenchmarkSection:
    """Return a section with the words or the mean map of each method and class, of at most 12 pairs."""
    maps, tables, remarks = job.maps, list[dict[str, Any]](), list[str]()
    pictures: list[tuple[str, Markup]] = []
    keys = ["method", "target", "target_name", "level"]
    pairs = maps.table(keys).group_by(keys, use_threads=False).aggregate([]).to_pylist()
    for pair in pairs[:_PAIRS]:
        method, index, target = pair["method"], int(pair["target"]), pair["target_name"]
        label = (maps.labels or {}).get(index, str(index))
        name = f"{method}: {target or label}"
        target = index if target in (None, label) else target
        try:
            if pair["level"] == "token":
                tables.append(_words(name, maps, method, target))
            else:
                pictures.append((name, _mean(maps, method, target)))
        except WhyformerError as error:
            remarks.append(f"{name}: {error}")
    failed = maps.failures().to_pylist()
    if len(pairs) > _PAIRS:
        remarks.append(f"{len(pairs) - _PAIRS} more methods and classes are in the folder")
    if failed:
        remarks.append(f"{amount(len(failed), 'failure')}, the first: {failed[0]['id']}: {failed[0]['reason']}")
    if not maps.complete:
        remarks.append("unfinished: run the job again to finish it")
    return section("data set", job.file, _conventions(maps), tables, remarks, pictures=pictures)


def drifts(jobs: Sequence[JobFolder]) -> Iterator[BenchmarkSection]:
    """Yield a section for each job that follows another job over the same input."""
    for number, after in enumerate(jobs):
        source = after.maps.manifest["source"].get("sha256")
        earlier = [job for job in jobs[:number] if source and job.maps.manifest["source"].get("sha256") == source]
        if earlier:
            yield _drift(earlier[-1], after)


def _drift(before: JobFolder, after: JobFolder) -> BenchmarkSection:
    title = f"from {before.file} to {after.file}"
    tables, remarks = list[dict[str, Any]](), list[str]()
    try:
        drift = before.maps.drift(after.maps)
    except (WhyformerError, *FOREIGN_ERRORS) as error:
        remarks.append(f"{title}: {error}")
    else:
        rows = [("rows", [_cell(drift.rows)]), ("rows of another predicted class", [_cell(drift.changed)])]
        means = {"agreement of maps (Spearman)": drift.agreement, "probability moved by": drift.probability}
        rows += [(name, [_cell(mean)]) for name, mean in means.items() if mean.count]
        note = "of the rows that both have; 95 % bootstrap intervals over them"
        tables.append(_table(title, "", ["value"], rows, note))
        if drift.largest:
            least = ", ".join(f"{name} ({value:+.2f})" for name, value in drift.largest[:5])
            remarks.append(f"maps agree least in {least}")
    return section("drift", f"{before.file} → {after.file}", _conventions(after.maps), tables, remarks)


def _words(name: str, maps: Maps, method: str, target: int | str) -> dict[str, Any]:
    words = maps.words(target, method, count=_WORDS)
    if not words.words:
        raise InputError(f"no word occurs in 3 or more texts ({amount(words.texts, 'text')} in all)")
    rows = [(word.word, [_cell(word.share), _cell(word.share.count)]) for word in words.words]
    note = f"mean share of a text's Σ|score|, 95 % bootstrap intervals, over {words.texts} texts"
    return _table(name, "word", ["share", "texts"], rows, f"{note}; words of at least 3 of them")


def _mean(maps: Maps, method: str, target: int | str) -> Markup:
    """Return the drawing of a mean map."""
    import torch

    from whyformer.jobs.summaries import selected

    mean = maps.mean_map(target, method)
    like = next(selected(maps, target, method))
    scores = torch.from_numpy(mean.mean).reshape(like.scores.shape).to(like.scores)
    return drawn(replace(like, scores=scores, parts={}), _PICTURE)


def _table(
    title: str, corner: str, columns: list[str], rows: list[tuple[str, list[Cell]]], note: str
) -> dict[str, Any]:
    return {"title": title, "corner": corner, "columns": columns, "rows": rows, "note": note, "digits": None}


def _cell(value: float | Interval) -> Cell:
    return (value, None, None, None) if isinstance(value, int | float) else (value.value, value.low, value.high, None)


def _conventions(maps: Maps) -> dict[str, Any]:
    manifest = maps.manifest
    job, model = manifest["job"], manifest["model"]
    return {
        "model": model.get("name", ""), "rows": manifest.get("rows"), "failed": manifest.get("failed"),
        "methods": ", ".join(str(method["method"]) for method in job["methods"]),
        "scores": job.get("scores"), "fingerprint of the weights": model.get("fingerprint"),
        "versions": ", ".join(f"{k} {v}" for k, v in (manifest.get("versions") or {}).items()),
    }

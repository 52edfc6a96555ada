"""The folders of jobs in a report: words and mean maps of each class, failures, and drift between two runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from whyformer.apps.report.benchmarks import BenchmarkSection, rendered
from whyformer.apps.report.pictures import drawn
from whyformer.errors import LoadError, WhyformerError

if TYPE_CHECKING:
    from whyformer.jobs.reading import Maps

MANIFEST = "manifest.json"
_WORDS, _PAIRS, _PICTURE = 12, 12, 60_000


@dataclass(frozen=True)
class JobSection:
    """The folder of a job, and where it was found."""

    maps: Maps
    file: str

    @property
    def source(self) -> str | None:
        """What tells its input from another one."""
        found = self.maps.manifest["source"].get("sha256")
        return None if found is None else str(found)


def read_job(folder: Path, file: str) -> JobSection:
    """A folder that ``whyformer run`` or ``explain_many`` wrote.

    Raises:
        LoadError: its manifest or a part of it is damaged. MissingExtra: pyarrow is not installed.
    """
    from whyformer.jobs.reading import read

    return JobSection(read(folder), file)


def pairs(jobs: Sequence[JobSection]) -> Iterator[tuple[JobSection, JobSection]]:
    """Each job with the one before it of the same input."""
    for number, after in enumerate(jobs):
        before = next((b for b in reversed(jobs[:number]) if b.source == after.source is not None), None)
        if before is not None:
            yield before, after


def summary(job: JobSection) -> BenchmarkSection:
    """The words or the mean map of each method and class, as far as there is room.

    Raises:
        LoadError: a part is missing or damaged.
    """
    maps, tables, figures, remarks = job.maps, [], [], []
    pictures: list[tuple[str, Markup]] = []
    try:
        found = maps.table(["method", "target", "level"]).group_by(["method", "target", "level"], use_threads=False)
        listed = found.aggregate([]).to_pylist()
        for one in listed[:_PAIRS]:
            method, target = one["method"], int(one["target"])
            name = f"{method}: {(maps.labels or {}).get(target, target)}"
            try:
                if one["level"] != "token":
                    pictures.append((name, _mean(maps, method, target)))
                    continue
                words = maps.words(target, method, count=_WORDS)
            except WhyformerError as error:
                remarks.append(f"{name}: {error}")
                continue
            rows = [word.word for word in words.words]
            note = f"mean share of a text's Σ|score|, 95 % bootstrap intervals, over {words.texts} texts"
            tables.append(_table(name, "word", ["share", "texts"], rows, f"{note}; words of at least 3 of them"))
            for word in words.words:
                s = word.share
                figures.append(_figure(name, word.word, "share", s.value, s.low, s.high))
                figures.append(_figure(name, word.word, "texts", s.count))
        failed = maps.failures().to_pylist()
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise LoadError(f"damaged: it is no whole job ({error})") from error
    if len(listed) > _PAIRS:
        remarks.append(f"{len(listed) - _PAIRS} more methods and classes are in the folder")
    if failed:
        remarks.append(f"{len(failed)} failures, the first: {failed[0]['id']}: {failed[0]['reason']}")
    if not maps.complete:
        remarks.append("unfinished: run the job again to finish it")
    return _made("data set", [job], tables, figures, remarks, pictures)


def _mean(maps: Maps, method: str, target: int) -> Markup:
    """The mean map, drawn by itself."""
    import torch

    mean = maps.mean_map(target, method)
    like = next(e for e in maps if e.method == method and int(e.target[0]) == target)
    scores = torch.from_numpy(mean.mean).reshape(like.scores.shape).to(like.scores)
    return drawn(replace(like, scores=scores, parts={}), _PICTURE)


def drift(before: JobSection, after: JobSection) -> BenchmarkSection:
    """What changed from one job to the next one.

    Raises:
        LoadError: a part is missing or damaged.
    """
    title, remarks, figures = f"from {before.file} to {after.file}", list[str](), list[dict[str, Any]]()
    tables = [_table(title, "", ["value"], [], "of the rows that both have; 95 % bootstrap intervals over them")]
    try:
        found = before.maps.drift(after.maps)
    except WhyformerError as error:
        return _made("drift", [before, after], [], [], [f"{title}: {error}"], [])
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise LoadError(f"damaged: it is no whole job ({error})") from error
    figures.append(_figure(title, "rows", "value", found.rows))
    figures.append(_figure(title, "rows of another predicted class", "value", found.changed))
    for name, s in (("agreement of maps (Spearman)", found.agreement), ("probability moved by", found.probability)):
        if s.count:
            figures.append(_figure(title, name, "value", s.value, s.low, s.high))
    tables[0]["rows"] = [figure["row"] for figure in figures]
    if found.largest:
        remarks.append(
            "maps agree least in " + ", ".join(f"{name} ({value:+.2f})" for name, value in found.largest[:5])
        )
    return _made("drift", [before, after], tables, figures, remarks, [])


def _table(name: str, corner: str, columns: list[str], rows: list[str], note: str) -> dict[str, Any]:
    return {
        "table": name,
        "title": name,
        "corner": corner,
        "columns": columns,
        "rows": rows,
        "digits": None,
        "note": note,
    }


def _figure(
    table: str, row: str, column: str, value: float, low: float | None = None, high: float | None = None
) -> dict[str, Any]:
    return {
        "table": table,
        "row": row,
        "column": column,
        "measured": value,
        "low": low,
        "high": high,
        "published": None,
    }


def _made(
    kind: str, jobs: Sequence[JobSection], tables: list[Any], figures: list[Any], remarks: list[str],
    pictures: list[tuple[str, Markup]],
) -> BenchmarkSection:  # fmt: skip
    manifest = jobs[-1].maps.manifest
    asked = manifest["job"].get("methods")
    if not isinstance(asked, list) or not all(isinstance(one, dict) for one in asked):
        raise LoadError("damaged: its manifest names no methods")
    versions = ", ".join(f"{k} {v}" for k, v in dict(manifest.get("versions") or {}).items())
    conventions = {
        "model": manifest["model"].get("name", ""), "rows": manifest.get("rows"), "failed": manifest.get("failed"),
        "methods": ", ".join(str(one.get("method")) for one in asked),
        "scores": manifest["job"].get("scores"), "fingerprint of the weights": manifest["model"].get("fingerprint"),
        "versions": versions,
    }  # fmt: skip
    facts = {"benchmark": kind, "figures": figures, "tables": tables, "remarks": remarks, "counts": {}, "curves": {},
             "conventions": conventions, "pictures": pictures}  # fmt: skip
    return rendered(facts, " → ".join(job.file for job in jobs), kind=kind)

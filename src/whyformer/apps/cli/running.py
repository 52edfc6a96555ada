"""``whyformer run``: a job over a whole data set, described by a JOB.toml or by options."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from whyformer.apps import ended_by_signal
from whyformer.apps.cli import options as opt
from whyformer.apps.cli.printing import INCOMPLETE, Bars, Printer
from whyformer.explanation.counts import amount
from whyformer.explanation.versions import record
from whyformer.options import Options

if TYPE_CHECKING:
    from whyformer.jobs.description import Job

_Job = Annotated[Path | None, Argument(
    metavar="JOB.toml", help="The job; without it, --model, --input and --out are required."
)]
_Input = Annotated[str | None, Option(
    "--input", "-i", metavar="PLACE",
    help="A folder, a glob, a .jsonl, .csv or .parquet file, hf:NAME, or a URL of these (s3://...)."
)]
_Out = Annotated[str | None, Option(
    "--out", "-o", metavar="DIR", help="Folder for the tables; the same folder resumes."
)]
_Targets = Annotated[str | None, Option(
    "--targets", "-t", metavar="WHICH",
    help="predicted (default), top-K, all, column:NAME (the true class), or classes separated by commas."
)]
_Column = Annotated[str | None, Option(
    metavar="NAME", help="Column of a table that holds the input. Default: the first of text, image, path ..."
)]
_IdColumn = Annotated[str | None, Option(
    metavar="NAME", help="Column that identifies rows. Default: the index of the row, or the file name."
)]
_BatchSize = Annotated[str | None, Option(
    metavar="N|auto", help="Rows per batch. Default: auto, as many as fit into memory."
)]
_Scores = Annotated[str | None, Option(
    metavar="KIND", help="Format of stored scores: float32 (default), float16, or top-K."
)]
_Overlays = Annotated[bool, Option("--overlays", help="Also write a picture or page of each explanation.")]
_MetricsPort = Annotated[int | None, Option(min=1, max=65535, help="Port for Prometheus metrics during the run.")]
_DryRun = Annotated[bool, Option(
    "--dry-run", help="Only check the job, and estimate its duration and the size of its output on some rows."
)]


def _count(help: str, min: int = 1) -> Any:
    return Option(min=min, help=help)


@opt.command(resumes=True)
def run(
    job: _Job = None,
    *,
    input: _Input = None,
    model: opt.ModelOfJob = None,
    methods: Annotated[str | None, opt.methods_option("name:key=value,name ... Default: auto.")] = None,
    out: _Out = None,
    targets: _Targets = None,
    column: _Column = None,
    id_column: _IdColumn = None,
    limit: Annotated[int | None, _count("Number of rows. Default: all.")] = None,
    batch_size: _BatchSize = None,
    scores: _Scores = None,
    rows_per_part: Annotated[int | None, _count("Rows of the input per file. Default: 1000.")] = None,
    overlays: _Overlays = False,
    options: Options,
    workers: Annotated[int | None, _count("Threads that read the input. Default: 2.")] = None,
    max_failures: Annotated[int | None, _count("Stop if more rows fail. Default: never.", min=0)] = None,
    metrics_port: _MetricsPort = None,
    engine: Annotated[str | None, Option(metavar="local|ray", help="Engine that runs the job. Default: local.")] = None,
    address: opt.Address = None,
    actors: Annotated[int | None, _count("Number of Ray actors; each holds a copy of the model. Default: 1.")] = None,
    dry_run: _DryRun = False,
    printer: Printer,
) -> None:
    """Explain a data set, described by a JOB.toml or by options, which take precedence over keys of the file.

    After an interruption, the same command resumes, and the files are those of an uninterrupted run.
    """
    keys = _keys(
        input=input, model=model, methods=methods, out=out, targets=targets, column=column, id_column=id_column,
        limit=limit, batch_size=batch_size, scores=scores, rows_per_part=rows_per_part, overlays=overlays or None,
        workers=workers, max_failures=max_failures, metrics_port=metrics_port, engine=engine, address=address,
        actors=actors, **options.named,
    )
    with printer.working() as bars:
        with bars.step("starting"):
            from whyformer.jobs.description import make_job, read_job

            described = make_job(keys, "the job") if job is None else read_job(job, **keys)
        (_estimate if dry_run else _run)(described, printer, bars)


def _keys(**keys: Any) -> dict[str, Any]:
    """Return the options that differ from the defaults as keys of a job."""
    keys = {name: value for name, value in keys.items() if value is not None}
    if "methods" in keys:
        keys["methods"] = tuple(map(_method, opt.parts(keys["methods"])))
    if "," in keys.get("targets", ""):
        keys["targets"] = opt.parts(keys["targets"])
    size = keys.get("batch_size", "")
    if size.isascii() and size.isdigit():
        keys["batch_size"] = int(size)
    return keys


def _method(text: str) -> Any:
    """Parse ``name`` or ``name:setting=value:setting=value``."""
    name, *settings = text.split(":")
    return (name, opt.settings_in(settings)) if settings else name


def _estimate(job: Job, printer: Printer, bars: Bars) -> None:
    with bars.step("a trial"):
        from whyformer.jobs.costs import estimate

        cost = estimate(job)
    printer.result(record("run", out=job.out, cost={**asdict(cost), "warnings": cost.warnings}), cost.sentence())
    for line in cost.warnings:
        printer.note(line)


def _run(job: Job, printer: Printer, bars: Bars) -> None:
    with bars.step("loading"):
        from whyformer.jobs.engines import run_job
    with ended_by_signal():
        maps = run_job(job, track=bars.track, say=printer.note)
    facts = {name: maps.manifest[name] for name in ("rows", "written", "failed", "complete")}
    text = f"{amount(facts['written'], 'explanation')} of {amount(facts['rows'], 'row')} in {maps.path}"
    printer.result(record("run", out=str(maps.path), **facts), text)
    if facts["failed"]:
        printer.note(f"{facts['failed']} failed: see {maps.path / 'failures.parquet'}")
        raise typer.Exit(INCOMPLETE)

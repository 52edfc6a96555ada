"""``whyformer run``, a job over a whole data set, ``serve``, explanations over HTTP, and ``app``, the web page."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from whyformer.apps import ended_by_signal
from whyformer.apps.cli import options as opt
from whyformer.apps.cli.printing import INCOMPLETE, Bars, Printer
from whyformer.apps.server.limits import Limits
from whyformer.explanation.counts import amount
from whyformer.explanation.versions import record
from whyformer.notation import method_in, parts, value_of
from whyformer.options import Options

if TYPE_CHECKING:
    from whyformer.jobs.description import Job


@dataclass(frozen=True, kw_only=True)
class JobKeys:
    """Keys of :class:`~whyformer.jobs.description.Job`; None where an option was not passed."""

    input: Annotated[str | None, Option(
        "--input", "-i", metavar="PLACE",
        help="A folder, a glob, a .jsonl, .csv or .parquet file, hf:NAME, or a URL of these (s3://...)."
    )] = None
    model: Annotated[str | None, opt.model_option()] = None
    methods: Annotated[str | None, opt.methods_option("auto")] = None
    out: Annotated[str | None, Option(
        "--out", "-o", metavar="DIR", help="Folder for the tables; the same folder resumes."
    )] = None
    targets: Annotated[str | None, Option(
        "--targets", "-t", metavar="WHICH",
        help="predicted (default), top-K, all, column:NAME (the true class), or classes and targets such as "
        "\"Token(5, 'blue')\" with commas between."
    )] = None
    column: Annotated[str | None, Option(
        metavar="NAME", help="Column of a table that holds the input. Default: the first of text, image, path ..."
    )] = None
    id_column: Annotated[str | None, Option(
        metavar="NAME", help="Column that identifies rows. Default: the index of the row, or the file name."
    )] = None
    limit: Annotated[int | None, Option(min=1, help="Number of rows. Default: all.")] = None
    batch_size: Annotated[str | None, Option(
        metavar="N|auto", help="Rows per batch. Default: auto, as many as fit into memory."
    )] = None
    scores: Annotated[str | None, Option(
        metavar="KIND", help="Format of stored scores: float32 (default), float16, or top-K."
    )] = None
    rows_per_part: Annotated[int | None, Option(min=1, help="Rows of the input per file. Default: 1000.")] = None
    overlays: Annotated[bool | None, Option(
        "--overlays", help="Also write a picture or page of each explanation."
    )] = None
    max_failures: Annotated[int | None, Option(min=0, help="Stop if more rows fail. Default: never.")] = None
    metrics_port: Annotated[int | None, Option(
        min=1, max=65535, help="Port for Prometheus metrics during the run."
    )] = None

    def values(self) -> dict[str, Any]:
        """Return the keys that were passed, parsed."""
        keys = opt.specified(self)
        if self.methods is not None:
            keys["methods"] = tuple(map(method_in, parts(self.methods)))
        if self.targets is not None and "," in self.targets:
            keys["targets"] = parts(self.targets)
        if self.batch_size is not None:
            keys["batch_size"] = value_of(self.batch_size)
        return keys


@opt.command(resumes=True)
def run(
    job: Annotated[Path | None, Argument(
        metavar="JOB.toml", help="The job; without it, --model, --input and --out are required."
    )] = None,
    *,
    described: JobKeys,
    place: opt.Place,
    options: Options,
    dry_run: Annotated[bool, Option(
        "--dry-run", help="Only check the job, and estimate its duration and the size of its output on some rows."
    )] = False,
    printer: Printer,
) -> None:
    """Explain a data set, described by a JOB.toml or by options, which take precedence over keys of the file.

    After an interruption, the same command resumes, and the files are those of an uninterrupted run.
    """
    keys = described.values() | opt.specified(place) | options.named
    with printer.working() as bars:
        with bars.step("starting"):
            from whyformer.jobs.description import make_job, read_job

            described_job = make_job(keys, "the job") if job is None else read_job(job, **keys)
        (_estimate if dry_run else _run)(described_job, printer, bars)


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


@opt.command()
def serve(
    model: opt.ModelArgument,
    *,
    host: Annotated[str, Option(
        metavar="ADDRESS", help="Address to listen on; access from other machines needs a key."
    )] = "127.0.0.1",
    port: Annotated[int, Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    api_key: Annotated[list[str] | None, Option(
        metavar="KEY", envvar="WHYFORMER_API_KEY",
        help="Key that clients must send, as Authorization: Bearer KEY; can be repeated."
    )] = None,
    batch: Annotated[int, Option(min=1, help="Maximum number of requests in a batch.")] = Limits.batch,
    wait: Annotated[float, Option(
        min=0.001, metavar="MILLISECONDS", help="Time that the first request of a batch waits for others."
    )] = 1000 * Limits.wait,
    queue: Annotated[int, Option(
        min=1, help="Maximum number of waiting requests; others are refused (429)."
    )] = Limits.queue,
    seconds: Annotated[float, Option(
        min=0.1, help="Maximum time from a request to its response (else 504)."
    )] = Limits.seconds,
    grace: Annotated[float, Option(
        min=0.1, metavar="SECONDS", help="Time for accepted requests to finish when the server stops."
    )] = Limits.grace,
    options: Options,
    printer: Printer,
) -> None:
    """Serve explanations of one model over HTTP, by default for this machine only."""
    from whyformer.apps.server import serve as answer

    def started(url: str) -> None:
        text = f"whyformer serves {url}, described in {url}/openapi.json (stop it with Ctrl+C)"
        printer.result(record("serve", url=url), text)

    limits = Limits(batch=batch, wait=wait / 1000, queue=queue, seconds=seconds, grace=grace)
    keys = tuple(api_key or ())
    answer(model, host=host, port=port, keys=keys, limits=limits, options=options, started=started)


@opt.command()
def serve_page(
    *,
    model_dir: Annotated[list[Path] | None, Option(
        metavar="DIR",
        help="A model to offer: a folder that save_pretrained wrote, or a folder of these; can be repeated."
    )] = None,
    hub: Annotated[bool | None, Option(
        "--hub/--no-hub", help="Accept hub ids. Default: only if the page is for this machine only."
    )] = None,
    host: Annotated[str, Option(metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int | None, Option(
        min=1, max=65535, help="Port to listen on. Default: the first free one from 7860."
    )] = None,
    share: Annotated[bool, Option("--share", help="Also open a public address (through gradio).")] = False,
    password: Annotated[str | None, Option(
        metavar="WORD", envvar="WHYFORMER_PASSWORD",
        help="Password of visitors; the user name is whyformer. Required for --share and for other hosts."
    )] = None,
    browser: Annotated[bool, Option("--open", help="Open the page in the browser.")] = False,
    printer: Printer,
) -> None:
    """Serve the web page, by default for this machine only."""
    from whyformer.apps.web import Catalogue, serve
    from whyformer.apps.web.server import check_exposure

    def started(url: str) -> None:
        printer.result(record("app", url=url), f"whyformer serves {url} (stop it with Ctrl+C)")

    public = check_exposure(host, share, password)
    catalogue = Catalogue(model_dir or (), hub=not public if hub is None else hub)
    serve(catalogue, host=host, port=port, share=share, password=password, browser=browser, started=started)

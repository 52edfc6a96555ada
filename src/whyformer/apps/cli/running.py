"""``whyformer run``: a job over a whole data set, from a JOB.toml or from the same as options."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import typer

from whyformer.apps.cli import options as opt
from whyformer.apps.cli.telling import INCOMPLETE, remark, tell, working
from whyformer.explanation.counts import amount
from whyformer.explanation.versions import record
from whyformer.options import DEFAULTS, Options


@dataclass(kw_only=True)
class RunOptions(opt.Common):
    resumes: ClassVar[bool] = True
    job: Path | None = None
    input: str | None = None
    model: str | None = None
    methods: str | None = None
    out: str | None = None
    targets: str | None = None
    column: str | None = None
    id_column: str | None = None
    limit: int | None = None
    batch_size: str | None = None
    scores: str | None = None
    rows_per_part: int | None = None
    overlays: bool = False
    options: Options = DEFAULTS
    workers: int | None = None
    max_failures: int | None = None
    metrics_port: int | None = None
    engine: str | None = None
    address: str | None = None
    actors: int | None = None
    dry_run: bool = False


def run(asked: RunOptions) -> None:
    """Explain a whole data set, as a JOB.toml says, or the same as options (which come before the file's keys).

    Kill it and start it again: it goes on where it stopped, and ends with the same files.
    """
    with working(asked) as bars:
        with bars.step("starting"):
            from whyformer.jobs.description import make_job, read_job

            given = _given(asked)
            job = make_job(given, "the job") if asked.job is None else read_job(asked.job, **given)
        if asked.dry_run:
            with bars.step("a trial"):
                from whyformer.jobs.costs import estimate

                cost = estimate(job)
            tell(asked, record("run", out=job.out, cost={**asdict(cost), "warnings": cost.warnings}), cost.sentence())
            for line in cost.warnings:
                remark(asked, line)
            return
        with bars.step("loading"):
            from whyformer.jobs.engines import run_job
        with _ended_by_signal():
            maps = run_job(job, track=bars.track, say=lambda text: remark(asked, text))
    facts = {name: maps.manifest[name] for name in ("rows", "written", "failed", "complete")}
    said = f"{amount(facts['written'], 'explanation')} of {amount(facts['rows'], 'row')} in {maps.path}"
    tell(asked, record("run", out=str(maps.path), **facts), said)
    if facts["failed"]:
        remark(asked, f"{facts['failed']} failed: see {maps.path / 'failures.parquet'}")
        raise typer.Exit(INCOMPLETE)


@contextmanager
def _ended_by_signal() -> Iterator[None]:
    """SIGTERM ends a job as Ctrl-C does, so that it is not taken for the end that a row brings about."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _given(asked: RunOptions) -> dict[str, Any]:
    """The options that were given, as keys of a job."""
    others = ("resumes", "job", "dry_run", "options")
    own = {k: getattr(asked, k) for k in RunOptions.__annotations__ if k not in others}
    given = {k: v for k, v in own.items() if v is not None and v is not False} | asked.options.named
    if asked.methods is not None:
        given["methods"] = tuple(_method(one) for one in asked.methods.split(",") if one.strip())
    if asked.targets is not None and "," in asked.targets:
        given["targets"] = [t.strip() for t in asked.targets.split(",") if t.strip()]
    if asked.batch_size is not None and asked.batch_size.isascii() and asked.batch_size.isdigit():
        given["batch_size"] = int(asked.batch_size)
    return given


def _method(written: str) -> Any:
    """``name``, or ``name:setting=value:setting=value``."""
    name, *settings = written.strip().split(":")
    return (name, dict(opt.pair(one) for one in settings)) if settings else name

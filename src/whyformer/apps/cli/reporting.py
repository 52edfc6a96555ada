"""``whyformer benchmark``, which scores methods over a data set, and ``whyformer report``, about what was saved."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import typer

from whyformer.apps.cli import options as opt
from whyformer.apps.cli.telling import INCOMPLETE, remark, tell, working
from whyformer.explanation.counts import amount
from whyformer.explanation.versions import record


@dataclass(kw_only=True)
class BenchmarkOptions(opt.Common):
    resumes: ClassVar[bool] = True
    name: str
    model: str
    data: str | None = None
    methods: str | None = None
    out: Path = Path("benchmark")
    count: int | None = None
    split: str | None = None
    reader: str | None = None
    option: list[str] | None = None
    batch_size: int = 64
    seed: int = 0
    device: str | None = None
    engine: str = "local"
    workers: int = 2
    address: str | None = None
    actors: int = 1


def benchmark(asked: BenchmarkOptions) -> None:
    """Score methods over a data set, as the founding papers did.

    Kill it and start it again: it goes on where it stopped.
    """
    options = dict(opt.pair(one, "an option") for one in asked.option or [])
    if asked.count is not None:
        options["count"] = asked.count
    with working(asked) as bars:
        with bars.step("loading"):
            from whyformer.benchmarks.runner import run_benchmark

        outcome = run_benchmark(
            asked.name, asked.model, asked.data, asked.out, methods=asked.methods, split=asked.split,
            reader=asked.reader, batch_size=asked.batch_size, seed=asked.seed, device=asked.device,
            engine=asked.engine, workers=asked.workers, address=asked.address, actors=asked.actors,
            say=lambda text: remark(asked, text), track=bars.track, **options,
        )  # fmt: skip
    files, unscored = [str(path) for path in outcome.files], outcome.report.unscored
    facts = record(
        "benchmark", **outcome.report.facts(), measured=outcome.measured, resumed=outcome.resumed, unscored=unscored,
        files=files,
    )  # fmt: skip
    tell(asked, facts, outcome.report.markdown())
    remark(asked, f"wrote {', '.join(files)}")
    if unscored:
        have = "explanation has" if unscored == 1 else "explanations have"
        remark(asked, f"{unscored:,} {have} no figures (see 'Samples without figures')")
        raise typer.Exit(INCOMPLETE)


@dataclass(kw_only=True)
class ReportOptions(opt.Common):
    sources: list[Path]
    out: Path = Path("report.html")
    title: str = "Why the models said so"


def report(asked: ReportOptions) -> None:
    """Put saved explanations, benchmark results and what jobs wrote into one HTML file that needs nothing else."""
    with working(asked) as bars:
        with bars.step("starting"):
            from whyformer.apps.report import write_report
            from whyformer.show.words import visible

        made = write_report(asked.sources, asked.out, title=asked.title, track=bars.track)
    facts = {k: v for k, v in asdict(made).items() if k != "path"}
    counts = ((made.explanations, "map"), (made.inputs, "input"), (made.benchmarks, "benchmark"))
    maps, inputs, benchmarks = (amount(count, noun) for count, noun in counts)
    answers = f"{amount(made.answers, 'answer')}, " if made.answers else ""
    maps = f"{maps} of {inputs}, " if made.explanations or not made.answers else ""
    others = f"; {amount(len(made.skipped), 'file')} left out, see its end" if made.skipped else ""
    jobs = f", {amount(made.jobs, 'data set')}" if made.jobs else ""
    said = f"{maps}{answers}{benchmarks}{jobs}{others}"
    tell(asked, record("report", **facts), f"{said} ({made.bytes / 1e6:.1f} MB)", [made.path])
    damaged = [s for s in made.skipped if s.damaged]
    for one in damaged:
        remark(asked, f"left out: {visible(one.file)}: {visible(one.why)}")
    if damaged:
        raise typer.Exit(INCOMPLETE)

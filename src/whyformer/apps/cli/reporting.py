"""``whyformer benchmark``, which scores methods over a data set, and ``whyformer report`` on saved results."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from whyformer.apps.cli import completion
from whyformer.apps.cli import options as opt
from whyformer.apps.cli.printing import INCOMPLETE, Printer
from whyformer.explanation.counts import amount
from whyformer.explanation.versions import record

*_NAMES, _LAST = completion.known()["benchmarks"]
_Name = Annotated[str, Argument(
    metavar="NAME", autocompletion=completion.benchmarks, help=f"{', '.join(_NAMES)} or {_LAST}."
)]
_Data = Annotated[str | None, Option(metavar="PLACE", help="Folder or file of a supported data set, or scenes:COUNT.")]
_Records = Annotated[Path, Option(
    "--out", "-o", metavar="DIR", help="Folder for records and tables; the same folder resumes."
)]
_Option = Annotated[list[str] | None, Option(
    metavar="KEY=VALUE", autocompletion=completion.options, help="An option of the benchmark; can be repeated."
)]
_Methods = Annotated[str | None, opt.methods_option("name:key=value:key=value,name ... Default: the paper's.")]
_Sources = Annotated[list[Path], Argument(
    metavar="DIR_OR_RESULTS",
    help="Folders and files: explanations (.safetensors, or .json from --format json), benchmarks."
)]


@opt.command(resumes=True)
def benchmark(
    name: _Name,
    *,
    model: opt.NamedModel,
    data: _Data = None,
    methods: _Methods = None,
    out: _Records = Path("benchmark"),
    count: Annotated[int | None, Option(min=1, help="Number of samples, evenly spread over the data.")] = None,
    split: Annotated[str | None, Option(help="Split of the data, as the data set names it.")] = None,
    reader: Annotated[str | None, Option(help="Layout of the data, if it is not recognised.")] = None,
    option: _Option = None,
    batch_size: Annotated[int, Option(min=1, help="Samples in one plain forward pass.")] = 64,
    seed: Annotated[int, Option(help="Seed of all random numbers.")] = 0,
    device: opt.Device = None,
    engine: Annotated[str, Option(metavar="local|ray", help="Engine that runs the benchmark.")] = "local",
    workers: Annotated[int, Option(min=1, help="Threads that read the samples.")] = 2,
    address: opt.Address = None,
    actors: Annotated[int, Option(min=1, help="Number of Ray actors; each holds a copy of the model.")] = 1,
    printer: Printer,
) -> None:
    """Score methods over a data set, as the papers do.

    After an interruption, the same command resumes.
    """
    options = dict(opt.assignment(text, "an option") for text in option or [])
    if count is not None:
        options["count"] = count
    with printer.working() as bars:
        with bars.step("loading"):
            from whyformer.benchmarks.runner import run_benchmark

        outcome = run_benchmark(
            name, model, data, out, methods=methods, split=split, reader=reader, batch_size=batch_size, seed=seed,
            device=device, engine=engine, workers=workers, address=address, actors=actors, say=printer.note,
            track=bars.track, **options,
        )
    files, unscored = [str(path) for path in outcome.files], outcome.report.unscored
    counts = {"measured": outcome.measured, "resumed": outcome.resumed, "unscored": unscored}
    printer.result(record("benchmark", **outcome.report.facts(), **counts, files=files), outcome.report.markdown())
    printer.note(f"wrote {', '.join(files)}")
    if unscored:
        have = "explanation has" if unscored == 1 else "explanations have"
        printer.note(f"{unscored:,} {have} no figures (see 'Samples without figures')")
        raise typer.Exit(INCOMPLETE)


@opt.command()
def report(
    sources: _Sources,
    *,
    out: Annotated[Path, Option("--out", "-o", metavar="FILE", help="The .html file to write.")] = Path("report.html"),
    title: Annotated[str, Option(help="Title of the report.")] = "Why the models said so",
    printer: Printer,
) -> None:
    """Collect saved explanations, benchmark results and outputs of jobs in one self-contained HTML file."""
    with printer.working() as bars:
        with bars.step("starting"):
            from whyformer.apps.report import write_report
            from whyformer.show.words import visible

        written = write_report(sources, out, title=title, track=bars.track)
    facts = {name: value for name, value in asdict(written).items() if name != "path"}
    maps = [f"{amount(written.explanations, 'map')} of {amount(written.inputs, 'input')}"]
    counts = {"answer": written.answers, "benchmark": written.benchmarks, "data set": written.jobs}
    others = [amount(count, noun) for noun, count in counts.items() if count]
    left_out = f"; {amount(len(written.skipped), 'file')} left out, see its end" if written.skipped else ""
    content = ", ".join((maps if written.explanations else []) + others)
    text = f"{content}{left_out} ({written.bytes / 1e6:.1f} MB)"
    printer.result(record("report", **facts), text, [written.path])
    damaged = [s for s in written.skipped if s.damaged]
    for file in damaged:
        printer.note(f"left out: {visible(file.file)}: {visible(file.why)}")
    if damaged:
        raise typer.Exit(INCOMPLETE)

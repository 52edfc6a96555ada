"""``whyformer benchmark``: the command line of :func:`whyformer.evaluate.runner.run_benchmark`."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from whyformer.cli.options import Debug, Device
from whyformer.cli.telling import errors_as_sentences
from whyformer.errors import InputError

INCOMPLETE = 3
"""Exit status where some samples got no figures (a method failed, or a map was constant or NaN); the tables are
written."""


def benchmark(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="perturbation, segmentation, ablation, rationales, activation, conservation, bias, sanity or "
            "arbitration.",
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            "--model", "-m", metavar="ID|FOLDER", help="Hub id, local folder, bundled:digits or bundled:sst2."
        ),
    ],
    data: Annotated[
        str | None, typer.Option("--data", metavar="PLACE", help="Folder or file of a known data set, or scenes:COUNT.")
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option("--methods", metavar="LIST", help="name:key=value:key=value,name ... Default: the paper's."),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Folder for records and tables; the same folder resumes.")
    ] = Path("benchmark"),
    count: Annotated[
        int | None, typer.Option("--count", min=1, help="Only so many samples, spread evenly over the data.")
    ] = None,
    split: Annotated[
        str | None, typer.Option("--split", help="Which part of the data, as the data set calls it.")
    ] = None,
    reader: Annotated[
        str | None, typer.Option("--reader", help="How to read the data, if the layout does not tell.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="KEY=VALUE", help="An option of the benchmark; repeat for several."),
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Samples in one plain forward pass.")] = 64,
    seed: Annotated[int, typer.Option("--seed", help="Of everything random.")] = 0,
    device: Device = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar, no table: only the files.")] = False,
    debug: Debug = False,
) -> None:
    """Score methods over a data set, as the founding papers did. Kill it and start it again: it goes on where it
    stopped."""
    from rich.console import Console

    with errors_as_sentences(debug):
        from whyformer.evaluate.runner import run_benchmark

        talk = Console(stderr=True, quiet=quiet)
        outcome = run_benchmark(
            name, model, data, out, methods=methods, split=split, reader=reader, batch_size=batch_size, seed=seed,
            device=device, say=lambda text: talk.print(text, highlight=False), track=_bar(talk),
            **_options(option, count),
        )  # fmt: skip
        if not quiet:
            typer.echo(outcome.report.markdown())
        talk.print(f"wrote {', '.join(str(f) for f in outcome.files)}", highlight=False)
        lacking = outcome.report.unscored
        if lacking:
            talk.print(f"{lacking} explanations have no figures (see 'Samples without figures')", style="yellow")
            raise typer.Exit(INCOMPLETE)


def _options(given: list[str] | None, count: int | None) -> dict[str, Any]:
    made: dict[str, Any] = {} if count is None else {"count": count}
    for one in given or []:
        key, equals, value = one.partition("=")
        if not equals:
            raise InputError(f"--option takes KEY=VALUE, not {one!r}")
        try:
            made[key.strip()] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            made[key.strip()] = {"true": True, "false": False}.get(value.casefold(), value)
    return made


def _bar(console: Any) -> Any:
    def track(work: Iterable[Any], title: str, total: int) -> Iterable[Any]:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("batches"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, disable=console.quiet) as progress:
            yield from progress.track(work, total=total, description=title)

    return track

"""``whyformer benchmark``: the command line of :func:`whyformer.benchmarks.runner.run_benchmark`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from whyformer.apps.cli import completion
from whyformer.apps.cli.options import AsJson, Debug, Device, Quiet, pair
from whyformer.apps.cli.progress import Working
from whyformer.apps.cli.telling import INCOMPLETE, errors_as_sentences
from whyformer.explanation.versions import record


def benchmark(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="perturbation, segmentation, ablation, rationales, activation, conservation, bias, sanity or "
            "arbitration.",
            autocompletion=completion.complete_benchmark,
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            metavar="ID|FOLDER",
            help="Hub id, local folder, bundled:digits or bundled:sst2.",
            autocompletion=completion.complete_model,
        ),
    ],
    data: Annotated[
        str | None, typer.Option("--data", metavar="PLACE", help="Folder or file of a known data set, or scenes:COUNT.")
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods",
            metavar="LIST",
            help="name:key=value:key=value,name ... Default: the paper's.",
            autocompletion=completion.complete_configurations,
        ),
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
        typer.Option(
            "--option",
            metavar="KEY=VALUE",
            help="An option of the benchmark; repeat for several.",
            autocompletion=completion.complete_option,
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Samples in one plain forward pass.")] = 64,
    seed: Annotated[int, typer.Option("--seed", help="Of everything random.")] = 0,
    device: Device = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Score methods over a data set, as the founding papers did.

    Kill it and start it again: it goes on where it stopped.
    """
    with errors_as_sentences(debug):
        options = dict(pair(one, "an option") for one in option or [])
        if count is not None:
            options["count"] = count

        def say(text: str) -> None:
            if not quiet:
                typer.echo(text, err=True)

        with Working(quiet) as working:
            with working.step("loading"):
                from whyformer.benchmarks.runner import run_benchmark

            outcome = run_benchmark(
                name, model, data, out, methods=methods, split=split, reader=reader, batch_size=batch_size, seed=seed,
                device=device, say=say, track=working.track, **options,
            )  # fmt: skip
        files = [str(path) for path in outcome.files]
        if as_json:
            found = {"measured": outcome.measured, "resumed": outcome.resumed, "unscored": outcome.report.unscored}
            typer.echo(json.dumps(record("benchmark", **outcome.report.facts(), **found, files=files)))
        elif not quiet:
            typer.echo(outcome.report.markdown())
        say(f"wrote {', '.join(files)}")
        if outcome.report.unscored:
            say(f"{outcome.report.unscored} explanations have no figures (see 'Samples without figures')")
            raise typer.Exit(INCOMPLETE)

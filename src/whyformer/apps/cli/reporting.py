"""``whyformer report``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from whyformer.apps.cli.options import AsJson, Debug, Quiet
from whyformer.apps.cli.progress import Working
from whyformer.apps.cli.telling import INCOMPLETE, errors_as_sentences
from whyformer.explanation.versions import record


def report(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR_OR_RESULTS",
            help="Folders and files: explanations (.safetensors, or .json from --format json), benchmarks.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The .html file to write.")] = Path(
        "report.html"
    ),
    title: Annotated[str, typer.Option("--title", help="Its heading.")] = "Why the models said so",
    quiet: Quiet = False, as_json: AsJson = False, debug: Debug = False,
) -> None:  # fmt: skip
    """Put saved explanations and benchmark results into one HTML file that needs nothing else."""
    with errors_as_sentences(debug):
        with Working(quiet) as working:
            with working.step("starting"):
                from whyformer.apps.report import write_report

            made = write_report(sources, out, title=title, track=working.track)
        from whyformer.show.words import visible

        damaged = [s for s in made.skipped if s.damaged]
        if as_json:
            facts = {k: v for k, v in asdict(made).items() if k != "path"}
            typer.echo(json.dumps(record("report", **facts, files=[str(made.path)])))
        elif not quiet:
            counts = f"{made.explanations} maps of {made.inputs} inputs, {made.benchmarks} benchmarks"
            others = f"; {len(made.skipped)} files left out, see its end" if made.skipped else ""
            typer.echo(f"wrote {visible(str(made.path))} ({made.bytes / 1e6:.1f} MB): {counts}{others}")
        for one in damaged:
            if not quiet:
                typer.echo(f"left out: {visible(one.file)}: {visible(one.why)}", err=True)
        if damaged:
            raise typer.Exit(INCOMPLETE)

"""Where explanations go: files in a folder, and the terminal or JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from whyformer.cli.telling import console

if TYPE_CHECKING:
    from whyformer.explanation import Explanation
    from whyformer.inputs.argument import Argument


@dataclass(frozen=True)
class Delivery:
    """Where results go: a folder and the kinds of files in it, and what is printed."""

    folder: Path
    formats: list[str]
    top: int
    quiet: bool
    as_json: bool


def deliver(results: list[Explanation], asked: Argument, model: str, to: Delivery) -> None:
    """Make everything in memory, write the files, and only then print."""
    from whyformer.show import files, terminal, words

    record = {"model": model, "input": asked.title, "explanations": [e.to_dict() for e in results]}
    contents = files.contents(results, asked.name, asked.title, record, to.formats)
    written = files.write_all(to.folder, contents) if contents else []
    if to.as_json:
        typer.echo(json.dumps({**record, "files": [str(path) for path in written]}))
    elif not to.quiet:
        out = console()
        out.print(terminal.render(results, to.top))
        for path in written:
            out.print(f"wrote {words.visible(str(path))}", markup=False, soft_wrap=True)

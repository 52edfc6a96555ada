"""Where explanations go: files in a folder, and the terminal or JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from whyformer.apps.cli.telling import console

if TYPE_CHECKING:
    from whyformer.evaluate.trust import Trust
    from whyformer.explanation.result import Explanation
    from whyformer.inputs.argument import Argument


@dataclass(frozen=True)
class Delivery:
    """Where results go: a folder and the kinds of files in it, and what is printed."""

    command: str
    folder: Path
    formats: list[str]
    top: int
    quiet: bool
    as_json: bool


def deliver(
    results: list[Explanation], asked: Argument, model: str, to: Delivery, checks: list[Trust] | None, **look: Any
) -> None:
    """Make everything in memory, write the files, and only then print; ``look`` is for maps on pictures."""
    from whyformer.show import facts as json_facts
    from whyformer.show import files, terminal, words

    facts = json_facts.explanations(to.command, results, model, asked.title)
    if checks is not None:
        facts["checks"] = [found.to_dict() for found in checks]
    whole = {**facts, **json_facts.picture_of(results)} if "json" in to.formats else facts
    contents = files.contents(results, asked.name, asked.title, whole, to.formats, **look)
    written = files.write_all(to.folder, contents) if contents else []
    if to.as_json:
        typer.echo(json.dumps({**facts, "files": [str(path) for path in written]}))
    elif not to.quiet:
        out = console()
        out.print(terminal.render(results, to.top))
        for e, found in zip(results, checks or (), strict=False):
            said = f"{found}".replace(e.method, f"{e.method}, measured for {e.label(int(e.target[0]))}", 1)
            out.print(words.visible(said, keep="\n"), markup=False)
        for path in written:
            out.print(f"wrote {words.visible(str(path))}", markup=False, soft_wrap=True)

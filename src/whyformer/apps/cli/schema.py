"""``whyformer schema``: what ``--json`` prints, as a JSON Schema that is shipped with the package."""

from __future__ import annotations

import json
from importlib import resources
from typing import Annotated, Any

import typer

from whyformer.apps.cli.completion import Offers, beginning
from whyformer.apps.cli.options import Debug
from whyformer.apps.cli.telling import errors_as_sentences
from whyformer.errors import InputError


def read_schema() -> dict[str, Any]:
    """The schema of every command's output; the commands are in its ``$defs``."""
    text = (resources.files("whyformer.apps.cli") / "output.schema.json").read_text(encoding="utf-8")
    made: dict[str, Any] = json.loads(text)
    return made


def commands_with_json() -> list[str]:
    """Names of the commands that take ``--json``."""
    return [entry["$ref"].rpartition("/")[2] for entry in read_schema()["oneOf"]]


def complete_command(incomplete: str) -> Offers:
    """Commands that print JSON."""
    return beginning(incomplete, ((name, "") for name in commands_with_json()))


def schema(
    command: Annotated[
        str | None,
        typer.Argument(metavar="COMMAND", help="Only this command's.", autocompletion=complete_command),
    ] = None,
    debug: Debug = False,
) -> None:
    """Print the JSON Schema of what --json prints, of one command or of all."""
    with errors_as_sentences(debug):
        whole = read_schema()
        if command is not None:
            known = commands_with_json()
            if command not in known:
                raise InputError(f"no command '{command}' prints JSON; these do: {', '.join(known)}")
            del whole["oneOf"]
            whole["$ref"] = f"#/$defs/{command}"
        typer.echo(json.dumps(whole, indent=1))

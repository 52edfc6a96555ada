"""Facts about whyformer and a model: ``whyformer methods``, ``whyformer audit``, and the schema of its JSON."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from typer import Argument

from whyformer.apps.cli import completion
from whyformer.apps.cli import options as opt
from whyformer.apps.cli.printing import Debug, Printer
from whyformer.errors import InputError
from whyformer.explanation.versions import record
from whyformer.options import Options


@opt.command()
def methods(
    name: Annotated[str | None, Argument(
        autocompletion=completion.method, help="A method to describe in detail."
    )] = None,
    *,
    printer: Printer,
) -> None:
    """List the methods, or describe one with its settings and their defaults."""
    from whyformer.show.terminal import catalogue, describe

    known = completion.known()["methods"]
    if name is not None and name not in known:
        from whyformer.methods import find

        find(name)  # raises an error that lists the names
    chosen = [(known[n]["facts"], known[n]["signed"]) for n in sorted(known) if name in (None, n)]
    shown = catalogue(chosen) if name is None else describe(chosen[0][0], signed=chosen[0][1])
    printer.result(record("methods", methods=[facts for facts, _ in chosen]), shown)


@opt.command()
def audit(
    model: opt.ModelArgument,
    *,
    input: opt.Input = None,
    target: opt.WrittenTarget = None,
    options: Options,
    printer: Printer,
) -> None:
    """Show what is recognised in a model: inputs, attentions, the rule of each operation, and methods that apply."""
    with printer.working() as bars:
        import whyformer
        from whyformer.inputs.argument import read_argument
        from whyformer.show import auditing

        content = None if input is None else read_argument(input).content
        result = whyformer.audit(model, content, target=target, progress=bars.track, **options.named)
    printer.result(record("audit", **result.to_dict()), auditing.render(result))


@opt.command()
def schema(
    command: Annotated[str | None, Argument(
        metavar="COMMAND", autocompletion=completion.commands, help="Only this command's."
    )] = None,
    *,
    debug: Debug = False,
) -> None:
    """Print the JSON Schema of the output of --json, for one command or for all."""
    from whyformer.apps.cli.output import COMMANDS
    from whyformer.apps.cli.schema import make_schema

    if command is not None and command not in COMMANDS:
        raise InputError(f"no command '{command}' prints JSON; these do: {', '.join(COMMANDS)}")
    typer.echo(json.dumps(make_schema(command), indent=1))

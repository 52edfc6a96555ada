"""The ``whyformer`` command.

Commands import torch and the rest of the library when they are called, so that ``--help``, ``--version`` and completion
are fast.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from whyformer.apps.cli.evaluating import benchmark, maximize, report
from whyformer.apps.cli.explaining import compare, explain, generate
from whyformer.apps.cli.inspecting import attention, audit, methods, perturb, schema
from whyformer.apps.cli.serving import run, serve, serve_page

__all__ = ["app", "main"]

_EXAMPLES = (
    'whyformer explain cat.jpg -m facebook/deit-tiny-patch16-224 -t "tiger cat"',
    'whyformer explain "A charming film, though it drags." --method gae',
    'echo "A charming film." | whyformer explain - --json',
    "whyformer compare scene.png -m bundled:digits -t 3 -t 7 --out out",
    "whyformer perturb scene.png -m bundled:digits -t 3",
    'whyformer generate "Name three fruits." --model FOLDER --chat -n 20',
    'whyformer attention "A charming film." --matrix',
    "whyformer methods transformer_attribution",
)


class _UntypedFlags:
    """The help of a command shows the type of each option except flags, which take no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters


class Command(_UntypedFlags, TyperCommand):
    """A command."""


class Commands(_UntypedFlags, TyperGroup):
    """The commands."""


def _epilog(command: str = "") -> str | None:
    """Return the examples of a command, or all."""
    examples = [line for line in _EXAMPLES if f"whyformer {command}" in line]
    return "\n\n".join(["[bold]Examples[/bold]", *examples]) if examples else None


app = typer.Typer(
    name="whyformer",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    epilog=_epilog(),
    context_settings={"help_option_names": ["-h", "--help"]},
)
_COMMANDS = (explain, compare, generate, attention, perturb, audit, methods, run, benchmark, maximize, report, serve)
for function in _COMMANDS:
    app.command(cls=Command, epilog=_epilog(function.__name__))(function)
app.command("app", cls=Command)(serve_page)
app.command(cls=Command)(schema)


def _version(wanted: bool) -> None:
    if wanted:
        from whyformer import __version__

        typer.echo(f"whyformer {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option(
        "--version", callback=_version, is_eager=True, help="Show the version and exit."
    )] = False,
) -> None:
    """Explain predictions of Transformers: which patches of a picture or words of a text led to them."""


def main() -> None:
    """Entry point of the ``whyformer`` command."""
    app()

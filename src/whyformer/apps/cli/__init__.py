"""The ``whyformer`` command. Thin: it reads arguments, calls the library, and shows what came back.

torch and the rest of the library are imported inside the commands, so that ``--help``, ``--version`` and completion
stay quick.
"""

from __future__ import annotations

from typing import Annotated

import typer

from whyformer.apps.cli.drawing import attention, perturb
from whyformer.apps.cli.explaining import compare, explain
from whyformer.apps.cli.maximizing import maximize
from whyformer.apps.cli.offering import audit, methods, schema, serve_page
from whyformer.apps.cli.options import WORDS, command
from whyformer.apps.cli.reporting import benchmark, report
from whyformer.apps.cli.running import run
from whyformer.apps.cli.serving import serve

__all__ = ["app", "main"]

_EXAMPLES = WORDS["examples"]

app = typer.Typer(
    name="whyformer", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich", epilog=_EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
app.command(epilog=_EXAMPLES)(command(explain))
app.command(epilog=_EXAMPLES)(command(compare))
for function in (attention, perturb, audit, methods, run, benchmark, maximize, report, serve):
    app.command()(command(function))
app.command("app")(command(serve_page))
app.command()(command(schema))


def _version(wanted: bool) -> None:
    if wanted:
        from whyformer import __version__

        typer.echo(f"whyformer {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Explain what a Transformer says: which patches of a picture, which words of a sentence, made it say so."""


def main() -> None:
    """Entry point of the ``whyformer`` command."""
    app()

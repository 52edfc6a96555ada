"""The ``whyformer`` command.

Commands import torch and the rest of the library when they are called, so that ``--help``, ``--version`` and completion
are fast.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from whyformer.apps.cli.drawing import attention, perturb
from whyformer.apps.cli.explaining import compare, explain
from whyformer.apps.cli.generating import generate
from whyformer.apps.cli.info import audit, methods, schema
from whyformer.apps.cli.maximizing import maximize
from whyformer.apps.cli.reporting import benchmark, report
from whyformer.apps.cli.running import run
from whyformer.apps.cli.serving import serve, serve_page

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
    """The commands. ``explain`` with an option that has moved to ``generate`` calls that command."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        moved = _answer_of(rest) if name == "explain" else None
        if moved is None:
            return name, command, rest
        if not ctx.resilient_parsing and not {"-q", "--quiet"} & set(moved):
            line = shlex.join(["whyformer", "generate", *moved])
            typer.echo(f"answers have a command of their own: {line}", err=True)
        return "generate", self.get_command(ctx, "generate"), moved


def _answer_of(arguments: Sequence[str]) -> list[str] | None:
    """Return arguments of ``explain`` with ``--generate N`` or ``--chat`` as those of ``generate``; else None."""
    moved, answers, rest = [], False, iter(arguments)
    for argument in rest:
        if argument == "--":
            moved += [argument, *rest]
            break
        name, equals, _ = argument.partition("=")
        if name[:2] == "-g" and name[2:].isdigit():
            argument, answers = f"-n{name[2:]}", True
        answers |= name in ("--generate", "-g", "--continuation", "--chat")
        if name == "--top":  # has no effect on an answer
            _ = None if equals else next(rest, None)
        else:
            renamed = argument.replace("--generate=", "--max-new-tokens=", 1)
            moved.append("-n" if argument in ("--generate", "-g") else renamed)
    return moved if answers else None


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

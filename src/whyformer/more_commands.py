"""The commands that take long, ``whyformer benchmark`` and ``whyformer maximize``; without torch until they run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated

import typer

Guard = Callable[[bool], AbstractContextManager[None]]
_FORWARD = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def add(app: typer.Typer, guard: Guard) -> None:
    """Put both commands into ``app``; ``guard(debug)`` turns errors into sentences and exit statuses."""

    @app.command(context_settings=_FORWARD, add_help_option=False)
    def benchmark(context: typer.Context) -> None:
        """Score methods over a data set, as the papers' tables do (see `whyformer benchmark --help`)."""
        asked = [a for a in context.args if a != "--debug"]
        with guard("--debug" in context.args):
            from whyformer.evaluate.command import benchmark as command

            inner = typer.Typer(add_completion=False, rich_markup_mode="markdown")
            inner.command()(command)
            try:
                inner(args=asked, prog_name="whyformer benchmark")
            except SystemExit as leaving:
                raise typer.Exit(int(leaving.code or 0)) from None

    @app.command()
    def maximize(
        unit: Annotated[
            str,
            typer.Argument(
                metavar="UNIT", help='A class (number or name), "module.path:neuron" or "module.path:token:neuron".'
            ),
        ],
        model: Annotated[
            str, typer.Option("--model", "-m", metavar="ID|FOLDER", help="A picture model.")
        ] = "bundled:digits",
        steps: Annotated[int, typer.Option(min=1, help="Gradient steps.")] = 256,
        learning_rate: Annotated[float, typer.Option(min=0, help="Of Adam.")] = 0.05,
        weight_decay: Annotated[float, typer.Option(min=0, help="λ of −λ‖I‖².")] = 1e-4,
        jitter: Annotated[int, typer.Option(min=0, help="Random shift in pixels in each step.")] = 0,
        blur: Annotated[float, typer.Option(min=0, help="Gaussian blur after each step, in pixels.")] = 0.0,
        seed: Annotated[int, typer.Option(help="Of the starting noise and the jitter.")] = 0,
        out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="A .png or .safetensors file.")] = Path(
            "maximized.png"
        ),
        device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
        quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
        debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    ) -> None:
        """Draw the picture that a class, a neuron or a token answers to most (activation maximisation)."""
        with guard(debug):
            from whyformer.errors import InputError
            from whyformer.maximize import maximize_activation

            if out.suffix.lower() not in (".png", ".safetensors"):
                raise InputError(f"--out must end in .png or .safetensors, not {out.name!r}")
            if not out.parent.is_dir():
                raise InputError(f"there is no folder {out.parent}")
            made = maximize_activation(
                model,
                int(unit) if unit.isdigit() else unit,
                steps=steps,
                learning_rate=learning_rate,
                weight_decay=weight_decay,
                jitter=jitter,
                blur=blur,
                seed=seed,
                progress=not quiet,
                device=device,
            )
            made.save(out)
            if not quiet:
                typer.echo(f"{unit}: activation {made.history[0]:.3f} at the start, {made.activation:.3f} now")
                typer.echo(f"wrote {out}")

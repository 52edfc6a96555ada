"""``whyformer maximize``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from whyformer.apps.cli.completion import complete_model
from whyformer.apps.cli.options import AsJson, Debug, Device, Quiet
from whyformer.apps.cli.progress import Working
from whyformer.apps.cli.telling import errors_as_sentences
from whyformer.errors import InputError
from whyformer.explanation.versions import record


def maximize(
    unit: Annotated[
        str,
        typer.Argument(
            metavar="UNIT", help='A class (number or name), "module.path:neuron" or "module.path:token:neuron".'
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            "--model", "-m", metavar="ID|FOLDER", help="A picture model.", autocompletion=complete_model
        ),
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
    device: Device = None, quiet: Quiet = False, as_json: AsJson = False, debug: Debug = False,
) -> None:  # fmt: skip
    """Draw the picture that a class, a neuron or a token answers to most (activation maximisation)."""
    with errors_as_sentences(debug):
        if out.suffix.lower() not in (".png", ".safetensors"):
            raise InputError(f"--out must end in .png or .safetensors, not {out.name!r}")
        if not out.parent.is_dir():
            raise InputError(f"there is no folder {out.parent}")
        with Working(quiet) as working:
            with working.step(f"loading {model}"):
                from whyformer.maximize import maximize_activation
                from whyformer.models import load

                loaded = load(model, device=device)
            made = maximize_activation(
                loaded.model, int(unit) if unit.isdigit() else unit, steps=steps, learning_rate=learning_rate,
                weight_decay=weight_decay, jitter=jitter, blur=blur, seed=seed, processor=loaded.processor,
                progress=working.track,
            )  # fmt: skip
        made.save(out)
        if as_json:
            facts = {"unit": made.unit, "activation": made.activation, "history": made.history}
            made_with = {"model": model, "settings": made.settings, "files": [str(out)]}
            typer.echo(json.dumps(record("maximize", **facts, **made_with)))
        elif not quiet:
            typer.echo(f"{unit}: activation {made.history[0]:.3f} at the start, {made.activation:.3f} now")
            typer.echo(f"wrote {out}")

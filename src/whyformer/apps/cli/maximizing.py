"""``whyformer maximize``: the pictures that maximise the activation of units of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from whyformer.apps.cli import options as opt
from whyformer.apps.cli.explaining import load_model
from whyformer.apps.cli.printing import Printer
from whyformer.errors import InputError
from whyformer.explanation.versions import record
from whyformer.options import Options

_Units = Annotated[list[str], Argument(
    metavar="UNIT",
    help='One or more of: a class (index or name), "module.path:neuron", "module.path:token:neuron".'
)]
_Recipe = Annotated[str, Option(
    metavar="feature_visualisation|plain",
    help="Defaults of the settings; plain is gradient ascent on pixels."
)]
_File = Annotated[Path, Option(
    "--out", "-o", metavar="FILE",
    help="A .png or .safetensors file; for several units, a figure as .png, .svg or .pdf."
)]


@opt.command()
def maximize(
    units: _Units,
    *,
    model: Annotated[str, opt.model_option("A picture model.")] = "bundled:digits",
    recipe: _Recipe = "feature_visualisation",
    steps: Annotated[int | None, Option(min=1, help="Gradient steps. Default: 256.")] = None,
    learning_rate: Annotated[float | None, Option(min=0, help="Learning rate of Adam.")] = None,
    weight_decay: Annotated[float | None, Option(min=0, help="λ of −λ‖I‖².")] = None,
    jitter: Annotated[int | None, Option(min=0, help="Random shift in pixels in each step.")] = None,
    blur: Annotated[float | None, Option(min=0, help="Gaussian blur after each step, in pixels.")] = None,
    setting: Annotated[list[str] | None, opt.setting_option(
        "Any other setting of whyformer.maximize_activation, such as total_variation=20"
    )] = None,
    seed: Annotated[int, Option(help="Seed of the initial noise and all random changes.")] = 0,
    out: _File = Path("maximized.png"),
    device: opt.Device = None,
    printer: Printer,
) -> None:
    """Draw the pictures that maximise classes, neurons or tokens (activation maximisation)."""
    _check_file(out, several=len(units) > 1)
    numbers = {"steps": steps, "learning_rate": learning_rate, "weight_decay": weight_decay, "jitter": jitter,
               "blur": blur}
    settings = opt.settings_in(setting) | {name: value for name, value in numbers.items() if value is not None}
    with printer.working() as bars:
        loaded = load_model(model, Options(device=device), bars)
        from whyformer.maximize import maximize_activation
        from whyformer.show import encode, files, gallery

        results = [
            maximize_activation(
                loaded.model, int(unit) if unit.isdecimal() else unit, recipe=recipe, seed=seed,
                processor=loaded.processor, progress=bars.track, **settings,
            )
            for unit in units
        ]
    if len(results) > 1:
        files.write_all(out.parent, {out.name: encode(gallery(results), out.suffix.lower()[1:])})
    else:
        results[0].save(out)
    facts = [{"unit": r.unit, "activation": r.activation, "history": r.history} for r in results]
    lines = [
        f"{unit}: activation {r.history[0]:.3f} at the start, {r.activation:.3f} at the end"
        for unit, r in zip(units, results, strict=True)
    ]
    printer.result(
        record("maximize", units=facts, model=model, settings=results[0].settings), "\n".join(lines), [out]
    )


def _check_file(out: Path, several: bool) -> None:
    kind = out.suffix.lower()
    if several and kind not in (".png", ".svg", ".pdf"):
        raise InputError(f"--out of several units must end in .png, .svg or .pdf, not {out.name!r}")
    if not several and kind not in (".png", ".safetensors"):
        raise InputError(f"--out must end in .png or .safetensors, not {out.name!r}")
    if not out.parent.is_dir():
        raise InputError(f"there is no folder {out.parent}")

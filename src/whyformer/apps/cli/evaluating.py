"""``whyformer benchmark``, ``maximize``, and ``report`` on saved results."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from whyformer.apps.cli import completion
from whyformer.apps.cli import options as opt
from whyformer.apps.cli.explaining import load_model
from whyformer.apps.cli.printing import INCOMPLETE, Printer
from whyformer.errors import InputError
from whyformer.explanation.counts import amount
from whyformer.explanation.versions import record
from whyformer.notation import settings_in
from whyformer.options import Options

_NAMES = list(completion.names_file()["benchmarks"])


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions:
    """Arguments of :func:`whyformer.benchmarks.runner.run_benchmark`."""

    name: Annotated[str, Argument(
        metavar="NAME", autocompletion=completion.benchmarks,
        help=f"{', '.join(_NAMES[:-1])} or {_NAMES[-1]}."
    )]
    model: Annotated[str, opt.model_option()]
    data: Annotated[str | None, Option(
        metavar="PLACE", help="Folder or file of a supported data set, or scenes:COUNT."
    )] = None
    methods: Annotated[str | None, opt.methods_option("the paper's")] = None
    out: Annotated[Path, Option(
        "--out", "-o", metavar="DIR", help="Folder for records and tables; the same folder resumes."
    )] = Path("benchmark")
    count: Annotated[int | None, Option(min=1, help="Number of samples, evenly spread over the data.")] = None
    split: Annotated[str | None, Option(help="Split of the data, as the data set names it.")] = None
    reader: Annotated[str | None, Option(help="Layout of the data, if it is not recognised.")] = None
    batch_size: Annotated[int, Option(min=1, help="Samples in one plain forward pass.")] = 64
    seed: Annotated[int, Option(help="Seed of all random numbers.")] = 0
    device: opt.Device = None


@opt.command(resumes=True)
def benchmark(
    *,
    described: BenchmarkOptions,
    option: Annotated[list[str] | None, Option(
        metavar="KEY=VALUE", help="An option of the benchmark; can be repeated.",
        autocompletion=lambda: [o for name in _NAMES for o in completion.settings_of("benchmarks", [name])],
    )] = None,
    place: opt.Place,
    printer: Printer,
) -> None:
    """Score methods over a data set, as the papers do.

    After an interruption, the same command resumes.
    """
    arguments = settings_in(option, "an option") | opt.specified(described) | opt.specified(place)
    with printer.working() as bars:
        with bars.step("loading"):
            from whyformer.benchmarks.runner import run_benchmark

        outcome = run_benchmark(**arguments, say=printer.note, track=bars.track)
    files, unscored = [str(path) for path in outcome.files], outcome.report.unscored
    counts = {"measured": outcome.measured, "resumed": outcome.resumed, "unscored": unscored}
    printer.result(record("benchmark", **outcome.report.facts(), **counts, files=files), outcome.report.markdown())
    printer.note(f"wrote {', '.join(files)}")
    if unscored:
        have = "explanation has" if unscored == 1 else "explanations have"
        printer.note(f"{unscored:,} {have} no figures (see 'Samples without figures')")
        raise typer.Exit(INCOMPLETE)


@dataclass(frozen=True, kw_only=True)
class Ascent:
    """Arguments of :func:`whyformer.maximize_activation`."""

    recipe: Annotated[str, Option(
        metavar="feature_visualisation|plain", help="Defaults of the settings; plain is gradient ascent on pixels."
    )] = "feature_visualisation"
    steps: Annotated[int | None, Option(min=1, help="Gradient steps. Default: 256.")] = None
    learning_rate: Annotated[float | None, Option(min=0, help="Learning rate of Adam.")] = None
    weight_decay: Annotated[float | None, Option(min=0, help="λ of −λ‖I‖².")] = None
    jitter: Annotated[int | None, Option(min=0, help="Random shift in pixels in each step.")] = None
    blur: Annotated[float | None, Option(min=0, help="Gaussian blur after each step, in pixels.")] = None
    seed: Annotated[int, Option(help="Seed of the initial noise and all random changes.")] = 0


@opt.command()
def maximize(
    units: Annotated[list[str], Argument(
        metavar="UNIT",
        help='One or more of: a class (index or name), "module.path:neuron", "module.path:token:neuron".'
    )],
    *,
    model: Annotated[str, opt.model_option("A picture model.")] = "bundled:digits",
    ascent: Ascent,
    setting: Annotated[list[str] | None, Option(
        "--setting", "-s", metavar="KEY=VALUE",
        help="Any other setting of whyformer.maximize_activation, such as total_variation=20; can be repeated."
    )] = None,
    out: Annotated[Path, Option(
        "--out", "-o", metavar="FILE",
        help="A .png or .safetensors file; for several units, a figure as .png, .svg or .pdf."
    )] = Path("maximized.png"),
    device: opt.Device = None,
    printer: Printer,
) -> None:
    """Draw the pictures that maximise classes, neurons or tokens (activation maximisation)."""
    kinds = (".png", ".safetensors") if len(units) == 1 else (".png", ".svg", ".pdf")
    if out.suffix.lower() not in kinds:
        raise InputError(f"--out for {amount(len(units), 'unit')} must end in {', '.join(kinds)}, not {out.name!r}")
    if not out.parent.is_dir():
        raise InputError(f"there is no folder {out.parent}")
    settings = settings_in(setting) | opt.specified(ascent)
    with printer.working() as bars:
        loaded = load_model(model, Options(device=device), bars)
        from whyformer.maximize import maximize_activation
        from whyformer.show import encode, files, gallery

        results = [
            maximize_activation(
                loaded.model, int(unit) if unit.isdecimal() else unit, processor=loaded.processor, progress=bars.track,
                **settings,
            )
            for unit in units
        ]
    if len(results) > 1:
        files.write_all(out.parent, {out.name: encode(gallery(results), out.suffix.lower()[1:])})
    else:
        results[0].save(out)
    activations = [{"unit": r.unit, "activation": r.activation, "history": r.history} for r in results]
    lines = [
        f"{unit}: activation {r.history[0]:.3f} at the start, {r.activation:.3f} at the end"
        for unit, r in zip(units, results, strict=True)
    ]
    facts = record("maximize", units=activations, model=model, settings=results[0].settings)
    printer.result(facts, "\n".join(lines), [out])


@opt.command()
def report(
    sources: Annotated[list[Path], Argument(
        metavar="DIR_OR_RESULTS",
        help="Folders and files: explanations (.safetensors, or .json from --format json), benchmarks."
    )],
    *,
    out: Annotated[Path, Option("--out", "-o", metavar="FILE", help="The .html file to write.")] = Path("report.html"),
    title: Annotated[str, Option(help="Title of the report.")] = "Why the models said so",
    printer: Printer,
) -> None:
    """Collect saved explanations, benchmark results and outputs of jobs in one self-contained HTML file."""
    with printer.working() as bars:
        with bars.step("starting"):
            from whyformer.apps.report import write_report
            from whyformer.show.words import visible

        written = write_report(sources, out, title=title, track=bars.track)
    left_out = f"; {amount(len(written.skipped), 'file')} left out, see its end" if written.skipped else ""
    text = f"{written.content}{left_out} ({written.bytes / 1e6:.1f} MB)"
    printer.result(record("report", **asdict(written) | {"path": str(written.path)}), text, [written.path])
    damaged = [s for s in written.skipped if s.damaged]
    for file in damaged:
        printer.note(f"left out: {visible(file.file)}: {visible(file.why)}")
    if damaged:
        raise typer.Exit(INCOMPLETE)

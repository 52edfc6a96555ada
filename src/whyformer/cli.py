"""The ``whyformer`` command. Thin: it reads arguments, calls the library, and shows what came back.
torch and the rest of the library are imported inside the commands, so that ``--help`` and ``--version`` stay quick.
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whyformer import more_commands
from whyformer.errors import InputError, MethodNotApplicable, WhyformerError

if TYPE_CHECKING:
    from whyformer.explanation import Explanation
    from whyformer.inputs.argument import Argument
    from whyformer.methods import Method
    from whyformer.models import Loaded

FORMATS = ("png", "svg", "pdf", "html", "json")
DEFAULT_MODEL = {"image": "bundled:digits", "text": "bundled:sst2"}
COMPARED = (
    "transformer_attribution", "gae", "gradcam_attention", "partial_lrp", "raw_attention", "rollout",
    "input_x_gradient", "integrated_gradients",
)  # fmt: skip

_EXAMPLES = """[bold]Examples[/bold]

whyformer explain cat.jpg --model facebook/deit-tiny-patch16-224 --target "tiger cat" --target 243

whyformer explain "A charming film, though it drags." --method transformer_attribution

echo "A charming film." | whyformer explain - --json

whyformer compare scene.png --target 3 --target 7 --out out

whyformer methods transformer_attribution
"""

app = typer.Typer(
    name="whyformer", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich", epilog=_EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip

Source = Annotated[
    str,
    typer.Argument(metavar="PICTURE_OR_TEXT", help="A picture file, a .txt file, a sentence, or - for standard input."),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", metavar="ID|FOLDER",
        help="Hub id, local folder, bundled:digits or bundled:sst2. Default: the bundled one for the kind of input.",
    ),
]  # fmt: skip
Targets = Annotated[
    list[str] | None,
    typer.Option(
        "--target", "-t", metavar="CLASS|ID",
        help="Class to explain, by name or number; repeat for several. Default: what the model predicts.",
    ),
]  # fmt: skip
Names = Annotated[
    str,
    typer.Option("--method", metavar="NAMES", help="A method, or several with commas between; see: whyformer methods."),
]
SomeNames = Annotated[
    str | None,
    typer.Option("--method", metavar="NAMES", help="Methods, separated by commas. Default: a choice that applies."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--setting", "-s", metavar="KEY=VALUE",
        help="A setting of the method (see: whyformer methods NAME); repeat for several.",
    ),
]  # fmt: skip
Formats = Annotated[
    str | None,
    typer.Option(
        "--format", "-f", metavar="LIST", help=f"Files to write, separated by commas: {', '.join(FORMATS)}; or none."
    ),
]
Top = Annotated[int, typer.Option("--top", min=1, help="How many of the likeliest classes to list.")]
Out = Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder for the files.")]
Device = Annotated[str | None, typer.Option("--device", metavar="cpu|cuda", help="Where the model runs.")]
Dtype = Annotated[str | None, typer.Option("--dtype", metavar="TYPE", help="float32 (default), float64 or bfloat16.")]
Truncate = Annotated[bool, typer.Option("--truncate", help="Cut off text that is longer than the model takes.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, nothing else.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


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


@app.command(epilog=_EXAMPLES)
def explain(
    source: Source, model: ModelName = None, method: Names = "transformer_attribution",
    target: Targets = None, top: Top = 5, setting: Settings = None, out: Out = Path("whyformer-out"),
    format: Formats = None, device: Device = None, dtype: Dtype = None, truncate: Truncate = False,
    quiet: Quiet = False, as_json: AsJson = False, debug: Debug = False,
) -> None:  # fmt: skip
    """Explain a prediction: prints the top classes and the map of each class asked for, and writes it to files.

    A picture becomes a PNG, a text an HTML page, unless --format says otherwise; several classes stand side by side.
    """
    from whyformer.inputs.argument import read_argument

    with _errors_as_sentences(debug):
        _formats(format, "")
        asked = read_argument(source)
        chosen = _methods(method, setting, asked.kind)
        loaded = _load(model, asked.kind, device, dtype, quiet or as_json)
        wanted: list[str] | list[None] = target or [None]
        results = [
            _explain(loaded, asked, one, t, given, truncate, quiet or as_json) for one, given in chosen for t in wanted
        ]
        formats = _formats(format, "png" if asked.kind == "image" else "html")
        _deliver(results, asked, loaded.name, _Delivery(out, formats, top, quiet, as_json))


@app.command(epilog=_EXAMPLES)
def compare(
    source: Source, model: ModelName = None, method: SomeNames = None,
    target: Targets = None, top: Top = 5, setting: Settings = None, out: Out = Path("whyformer-out"),
    format: Formats = None, device: Device = None, dtype: Dtype = None, truncate: Truncate = False,
    quiet: Quiet = False, as_json: AsJson = False, debug: Debug = False,
) -> None:  # fmt: skip
    """Show several methods side by side: rows are methods, columns classes; a sentence gets one line a method.

    Without --target a picture is explained for its two likeliest classes, a text for the predicted one.
    """
    from whyformer.inputs.argument import read_argument

    with _errors_as_sentences(debug):
        formats = _formats(format, "png,html")
        asked = read_argument(source)
        chosen = _methods(method, setting, asked.kind)
        loaded = _load(model, asked.kind, device, dtype, quiet or as_json)
        results: list[Explanation] = []
        targets: list[Any] = list(target) if target else [None]
        refusals = []
        for one, given in chosen:
            try:
                row = [_explain(loaded, asked, one, t, given, truncate, quiet or as_json) for t in targets]
                if targets == [None] and asked.kind == "image":
                    targets = [index for index, *_ in row[0].top(0, 2)]
                    row = [_explain(loaded, asked, one, t, given, truncate, quiet or as_json) for t in targets]
            except MethodNotApplicable as error:
                if method is not None:
                    raise
                refusals.append(error)
            else:
                results += row
        if not results:
            raise refusals[0]
        for refusal in refusals:
            typer.echo(f"left out: {_one_line(refusal)}", err=True)
        _deliver(results, asked, loaded.name, _Delivery(out, formats, top, quiet, as_json))


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="A method to describe in full.")] = None,
    as_json: AsJson = False, debug: Debug = False,
) -> None:  # fmt: skip
    """List the methods, or describe one with its settings and their defaults."""
    with _errors_as_sentences(debug):
        import whyformer
        from whyformer.show.listing import catalogue, describe, facts

        known = whyformer.methods() if name is None else [_find(name)]
        if as_json:
            typer.echo(json.dumps([facts(m) for m in known] if name is None else facts(known[0]), indent=1))
        else:
            _console().print(catalogue(known) if name is None else describe(known[0]))


# -- what is asked -----------------------------------------------------------------------------------------------
def _formats(given: str | None, default: str) -> list[str]:
    wanted = [f.strip().lower() for f in (default if given is None else given).split(",") if f.strip()]
    for one in wanted:
        if one not in (*FORMATS, "none"):
            raise InputError(f"unknown format '{one}': use {', '.join(FORMATS)}, or none")
    return [f for f in dict.fromkeys(wanted) if f != "none"]


def _find(name: str) -> Method:
    from whyformer.methods import find

    return find(name)


def _methods(names: str | None, setting: list[str] | None, kind: str) -> list[tuple[Method, dict[str, Any]]]:
    """The methods asked for, each with those settings it knows; all checked before a model is loaded."""
    import whyformer

    given = dict(map(_pair, setting or []))
    if names is None:
        known = {m.name: m for m in whyformer.methods()}
        chosen = [known[n] for n in COMPARED if n in known and known[n].modality in ("both", kind)]
    else:
        chosen = [_find(n.strip()) for n in dict.fromkeys(names.split(",")) if n.strip()]
    if not chosen:
        raise InputError("no method was named; whyformer methods lists them")
    for key in given:
        if not any(key in m.settings for m in chosen):
            chosen[0].complete({key: given[key]})
    pairs = [(m, {k: v for k, v in given.items() if k in m.settings}) for m in chosen]
    for one, own in pairs:
        one.complete(own)
    return pairs


def _pair(setting: str) -> tuple[str, Any]:
    key, sign, value = setting.partition("=")
    if not sign or not key.strip():
        raise InputError(f"a setting is written key=value, not '{setting}'")
    try:
        return key.strip(), json.loads(value)
    except ValueError:
        return key.strip(), {"True": True, "False": False, "None": None}.get(value, value)


@dataclass(frozen=True)
class _Delivery:
    """Where results go: a folder and the kinds of files in it, and what is printed."""

    folder: Path
    formats: list[str]
    top: int
    quiet: bool
    as_json: bool


# -- work --------------------------------------------------------------------------------------------------------
def _load(name: str | None, kind: str, device: str | None, dtype: str | None, silent: bool) -> Loaded:
    from rich.console import Console

    from whyformer.models import load

    name = name or DEFAULT_MODEL[kind]
    with Console(stderr=True, quiet=silent).status(f"loading {name}", spinner="dots"):
        loaded = load(name, device=device, dtype=dtype)
    if loaded.modality != kind:
        reads, got = ("pictures", "a text") if loaded.modality == "image" else ("text", "a picture")
        raise InputError(f"{name} reads {reads}, and this is {got}: choose another --model")
    return loaded


def _explain(
    loaded: Loaded, asked: Argument, method: Method, target: Any, settings: dict[str, Any], truncate: bool, silent: bool
) -> Explanation:
    import whyformer

    return whyformer.explain(
        loaded.model, asked.content, method.name, target, loaded.processor,
        truncate=truncate, progress=not silent and sys.stdout.isatty(), **settings,
    )  # fmt: skip


def _deliver(results: list[Explanation], asked: Argument, model: str, to: _Delivery) -> None:
    """Make everything in memory, write the files, and only then print."""
    from whyformer.show import files, terminal, words

    record = {"model": model, "input": asked.title, "explanations": [e.to_dict() for e in results]}
    contents = files.contents(results, asked.name, asked.title, record, to.formats)
    written = files.write_all(to.folder, contents) if contents else []
    if to.as_json:
        typer.echo(json.dumps({**record, "files": [str(path) for path in written]}))
    elif not to.quiet:
        console = _console()
        console.print(terminal.render(results, to.top))
        for path in written:
            console.print(f"wrote {words.visible(str(path))}", markup=False, soft_wrap=True)


# -- telling -----------------------------------------------------------------------------------------------------
def _console() -> Any:
    from rich.console import Console

    return Console(highlight=False, emoji=False)


def _one_line(error: BaseException) -> str:
    from whyformer.show.words import visible

    return visible(re.sub(r"\s+", " ", str(error)).strip()) or type(error).__name__


@contextmanager
def _errors_as_sentences(debug: bool) -> Iterator[None]:
    """Status 2 and one sentence for what the user can mend, 1 for a bug; third-party chatter is for --debug."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    status = 2
    try:
        with warnings.catch_warnings():
            if not debug:
                warnings.simplefilter("ignore")
            yield
            return
    except WhyformerError as error:
        if debug:
            raise
        message = _one_line(error)
    except KeyboardInterrupt:
        status, message = 130, "interrupted"
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if debug:
            raise
        status, message = 1, f"whyformer failed ({type(error).__name__}: {_one_line(error)}); --debug shows where"
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(status)


more_commands.add(app, _errors_as_sentences)


def main() -> None:
    """Entry point of the ``whyformer`` command."""
    app()


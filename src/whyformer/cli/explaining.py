"""``whyformer explain`` and ``whyformer compare``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from whyformer.cli.delivery import Delivery, deliver
from whyformer.cli.options import (
    AsJson,
    Debug,
    Device,
    Dtype,
    Formats,
    ModelName,
    Names,
    Out,
    Quiet,
    Settings,
    SomeNames,
    Source,
    Targets,
    Top,
    Truncate,
    chosen_formats,
    chosen_methods,
)
from whyformer.cli.telling import errors_as_sentences, one_line
from whyformer.errors import InputError, MethodNotApplicable

if TYPE_CHECKING:
    from whyformer.explanation import Explanation
    from whyformer.inputs.argument import Argument
    from whyformer.methods import Method
    from whyformer.models import Loaded

DEFAULT_MODEL = {"image": "bundled:digits", "text": "bundled:sst2"}


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

    with errors_as_sentences(debug):
        chosen_formats(format, "")
        asked = read_argument(source)
        chosen = chosen_methods(method, setting, asked.kind)
        loaded = _load(model, asked.kind, device, dtype, quiet or as_json)
        wanted: list[str] | list[None] = target or [None]
        results = [
            _explain(loaded, asked, one, t, given, truncate, quiet or as_json) for one, given in chosen for t in wanted
        ]
        formats = chosen_formats(format, "png" if asked.kind == "image" else "html")
        deliver(results, asked, loaded.name, Delivery(out, formats, top, quiet, as_json))


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

    with errors_as_sentences(debug):
        formats = chosen_formats(format, "png,html")
        asked = read_argument(source)
        chosen = chosen_methods(method, setting, asked.kind)
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
            typer.echo(f"left out: {one_line(refusal)}", err=True)
        deliver(results, asked, loaded.name, Delivery(out, formats, top, quiet, as_json))


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

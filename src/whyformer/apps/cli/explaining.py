"""``whyformer explain`` and ``whyformer compare``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from whyformer.apps.cli.delivery import Delivery, deliver
from whyformer.apps.cli.looks import Above, Cmap, Contours, Cover, Keep, Opacity, chosen_look
from whyformer.apps.cli.options import (
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
from whyformer.apps.cli.progress import Working
from whyformer.apps.cli.telling import errors_as_sentences, one_line
from whyformer.errors import InputError, MethodNotApplicable

if TYPE_CHECKING:
    from whyformer.explanation.result import Explanation
    from whyformer.inputs.argument import Argument
    from whyformer.methods import Method
    from whyformer.models import Loaded

DEFAULT_MODEL = {"image": "bundled:digits", "text": "bundled:sst2"}


def explain(
    source: Source, model: ModelName = None, method: Names = "transformer_attribution",
    target: Targets = None, top: Top = 5, setting: Settings = None, out: Out = Path("whyformer-out"),
    format: Formats = None, device: Device = None, dtype: Dtype = None, truncate: Truncate = False,
    opacity: Opacity = None, cmap: Cmap = None, cover: Cover = False, contours: Contours = None, keep: Keep = None,
    above: Above = None, quiet: Quiet = False, as_json: AsJson = False, debug: Debug = False,
) -> None:  # fmt: skip
    """Explain a prediction: prints the top classes and the map of each class asked for, and writes it to files.

    A picture becomes a PNG, a text an HTML page, unless --format says otherwise; several classes stand side by side.
    """
    from whyformer.inputs.argument import read_argument

    with errors_as_sentences(debug):
        chosen_formats(format, "")
        look = chosen_look(opacity, cmap, cover, contours, keep, above)
        asked = read_argument(source)
        chosen = chosen_methods(method, setting, asked.kind)
        formats = chosen_formats(format, "png" if asked.kind == "image" else "html")
        with Working(quiet) as working:
            work = Work(asked, truncate, working)
            work.load(model, device, dtype)
            wanted: list[str] | list[None] = target or [None]
            results = [work.explain(one, t, given) for one, given in chosen for t in wanted]
        deliver(results, asked, work.loaded.name, Delivery("explain", out, formats, top, quiet, as_json), **look)


def compare(
    source: Source, model: ModelName = None, method: SomeNames = None,
    target: Targets = None, top: Top = 5, setting: Settings = None, out: Out = Path("whyformer-out"),
    format: Formats = None, device: Device = None, dtype: Dtype = None, truncate: Truncate = False,
    opacity: Opacity = None, cmap: Cmap = None, cover: Cover = False, contours: Contours = None, keep: Keep = None,
    above: Above = None, quiet: Quiet = False, as_json: AsJson = False, debug: Debug = False,
) -> None:  # fmt: skip
    """Show several methods side by side: rows are methods, columns classes; a sentence gets one line a method.

    Without --target a picture is explained for its two likeliest classes, a text for the predicted one.
    """
    from whyformer.inputs.argument import read_argument

    with errors_as_sentences(debug):
        chosen_formats(format, "")
        look = chosen_look(opacity, cmap, cover, contours, keep, above)
        asked = read_argument(source)
        formats = chosen_formats(format, "png,html")
        chosen = chosen_methods(method, setting, asked.kind)
        with Working(quiet) as working:
            work = Work(asked, truncate, working)
            work.load(model, device, dtype)
            results, refusals = _compared(work, chosen, list(target) if target else [None], named=method is not None)
        for refusal in refusals:
            if not quiet:
                typer.echo(f"left out: {one_line(refusal)}", err=True)
        deliver(results, asked, work.loaded.name, Delivery("compare", out, formats, top, quiet, as_json), **look)


def _compared(
    work: Work, chosen: list[tuple[Method, dict[str, Any]]], targets: list[Any], *, named: bool
) -> tuple[list[Explanation], list[MethodNotApplicable]]:
    """All methods for all targets, and why some do not apply; one that was asked for by name has to."""
    results: list[Explanation] = []
    refusals = []
    for one, given in chosen:
        try:
            row = [work.explain(one, t, given) for t in targets]
            if targets == [None] and work.asked.kind == "image":
                targets = [index for index, *_ in row[0].top(0, 2)]
                row = [work.explain(one, t, given) for t in targets]
        except MethodNotApplicable as error:
            if named:
                raise
            refusals.append(error)
        else:
            results += row
    if not results:
        raise refusals[0]
    return results, refusals


class Work:
    """One input and one model, used as often as is asked."""

    loaded: Loaded

    def __init__(self, asked: Argument, truncate: bool, working: Working) -> None:
        self.asked, self.truncate, self.working = asked, truncate, working

    def load(self, name: str | None, device: str | None, dtype: str | None) -> None:
        with self.working.step(f"loading {name or DEFAULT_MODEL[self.asked.kind]}"):
            from whyformer.models import load

            self.loaded = load(name or DEFAULT_MODEL[self.asked.kind], device=device, dtype=dtype)
        if self.loaded.modality != self.asked.kind:
            reads, got = ("pictures", "a text") if self.loaded.modality == "image" else ("text", "a picture")
            raise InputError(f"{self.loaded.name} reads {reads}, and this is {got}: choose another --model")

    def explain(self, method: Method, target: Any, settings: dict[str, Any]) -> Explanation:
        import whyformer

        with self.working.step(method.name if target is None else f"{method.name}, class {target}"):
            return whyformer.explain(
                self.loaded.model, self.asked.content, method.name, target, self.loaded.processor,
                truncate=self.truncate, progress=self.working.track, **settings,
            )  # fmt: skip

"""``whyformer explain`` and ``whyformer compare``; one input and one model for them and the commands that draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whyformer.apps.cli import options as opt
from whyformer.apps.cli.delivery import Delivery, deliver
from whyformer.apps.cli.progress import Working
from whyformer.apps.cli.telling import errors_as_sentences, one_line
from whyformer.errors import InputError, MethodNotApplicable

if TYPE_CHECKING:
    from whyformer.comparing import Refusal
    from whyformer.evaluate.trust import Trust
    from whyformer.explanation.result import Explanation
    from whyformer.inputs.argument import Argument
    from whyformer.methods import Method
    from whyformer.models import Loaded

DEFAULT_MODEL = {"image": "bundled:digits", "text": "bundled:sst2"}


Check = Annotated[
    bool,
    typer.Option("--check", help="Measure how far each map may be believed, against random maps (forward passes)."),
]


def explain(
    source: opt.Source, model: opt.ModelName = None, method: opt.Names = "transformer_attribution",
    target: opt.Targets = None, top: opt.Top = 5, setting: opt.Settings = None, out: opt.Out = Path("whyformer-out"),
    format: opt.Formats = None, device: opt.Device = None, dtype: opt.Dtype = None, truncate: opt.Truncate = False,
    opacity: opt.Opacity = None, cmap: opt.Cmap = None, cover: opt.Cover = False, contours: opt.Contours = None,
    keep: opt.Keep = None, above: opt.Above = None, check: Check = False, quiet: opt.Quiet = False,
    as_json: opt.AsJson = False, debug: opt.Debug = False,
) -> None:  # fmt: skip
    """Explain a prediction: prints the top classes and the map of each class asked for, and writes it to files.

    A picture becomes a PNG, a text an HTML page, unless --format says otherwise; several classes stand side by side.
    """
    with errors_as_sentences(debug):
        look = opt.chosen_look(opacity, cmap, cover, contours, keep, above)
        _run("explain", source, model, method, target, top, setting, out, format, device, dtype, truncate, look, check,
             quiet, as_json, refuse=lambda _: False)  # fmt: skip


def compare(
    source: opt.Source, model: opt.ModelName = None, method: opt.SomeNames = None, target: opt.Targets = None,
    top: opt.Top = 5, setting: opt.Settings = None, out: opt.Out = Path("whyformer-out"), format: opt.Formats = None,
    device: opt.Device = None, dtype: opt.Dtype = None, truncate: opt.Truncate = False, opacity: opt.Opacity = None,
    cmap: opt.Cmap = None, cover: opt.Cover = False, contours: opt.Contours = None, keep: opt.Keep = None,
    above: opt.Above = None, check: Check = False, quiet: opt.Quiet = False, as_json: opt.AsJson = False,
    debug: opt.Debug = False,
) -> None:  # fmt: skip
    """Show several methods side by side: rows are methods, columns classes; a sentence gets one line a method.

    Without --target a picture is explained for its two likeliest classes, a text for the predicted one.
    """
    with errors_as_sentences(debug):
        look = opt.chosen_look(opacity, cmap, cover, contours, keep, above)
        # a method that was asked for by name has to apply
        _run("compare", source, model, method, target, top, setting, out, format, device, dtype, truncate, look, check,
             quiet, as_json, refuse=lambda error: method is None and isinstance(error, MethodNotApplicable),
             likeliest=2)  # fmt: skip


def _run(
    command: str, source: str, model: str | None, method: str | None, target: list[str] | None, top: int,
    setting: list[str] | None, out: Path, format: str | None, device: str | None, dtype: str | None, truncate: bool,
    look: dict[str, Any], check: bool, quiet: bool, as_json: bool, *, refuse: Callable[[Exception], bool],
    likeliest: int = 1,
) -> None:  # fmt: skip
    """Both commands; ``refuse`` says which errors leave a method out instead of ending the command."""
    from whyformer.inputs.argument import read_argument

    opt.chosen_formats(format, "")
    asked = read_argument(source)
    default = "png,html" if command == "compare" else "png" if asked.kind == "image" else "html"
    formats = opt.chosen_formats(format, default)
    chosen = opt.chosen_methods(method, setting, asked.kind)
    with Working(quiet) as working:
        work = Work(asked, model, device, dtype, truncate, working)
        wanted: Sequence[Any] = target or work.ready.likeliest(likeliest if asked.kind == "image" else 1)
        results, refusals = work.explain(chosen, wanted)
        for refusal in refusals:
            if not refuse(refusal.error) or not results:
                raise refusal.error
        checks = [work.check(e) for e in results] if check else None
    for refusal in refusals:
        if not quiet:
            typer.echo(f"left out: {one_line(refusal.error)}", err=True)
    to = Delivery(command, out, formats, top, quiet, as_json)
    deliver(results, asked, work.loaded.name, to, checks, **look)


class Work:
    """One input and one model, used as often as is asked."""

    def __init__(
        self, asked: Argument, name: str | None, device: str | None, dtype: str | None, truncate: bool, working: Working
    ) -> None:
        self.working = working
        name = name or DEFAULT_MODEL[asked.kind]
        with working.step(f"loading {name}"):
            from whyformer.explaining import begin
            from whyformer.models import load

            self.loaded: Loaded = load(name, device=device, dtype=dtype)
        if self.loaded.modality != asked.kind:
            reads, got = ("pictures", "a text") if self.loaded.modality == "image" else ("text", "a picture")
            raise InputError(f"{self.loaded.name} reads {reads}, and this is {got}: choose another --model")
        self.ready = begin(self.loaded.model, asked.content, self.loaded.processor, truncate=truncate)
        self.checked: list[Trust] = []

    def explain(
        self, methods: list[tuple[Method, dict[str, Any]]], targets: Sequence[Any]
    ) -> tuple[list[Explanation], list[Refusal]]:
        """Each method for each target, and why some do not apply."""
        from whyformer.comparing import Refusal, each

        def once(key: Any, make: Callable[[], Explanation]) -> Explanation:
            with self.working.step(key[0] if key[2] is None else f"{key[0]}, class {key[2]}"):
                return make()

        found = list(each(self.ready, methods, targets, progress=self.working.track, once=once))
        refusals = [one for one in found if isinstance(one, Refusal)]
        return [one for one in found if not isinstance(one, Refusal)], refusals

    def check(self, e: Explanation) -> Trust:
        """How far an explanation of this input may be believed."""
        import whyformer

        with self.working.step(f"checking {e.method}"):
            self.checked.append(
                whyformer.trust(
                    e, self.loaded.model, self.ready.inputs, self.loaded.processor, known=self.checked
                )
            )  # fmt: skip
        return self.checked[-1]

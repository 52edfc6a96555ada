"""``whyformer explain`` and ``whyformer compare``, and the choice of the model for an input."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from whyformer.apps import INPUTS, model_for
from whyformer.apps.cli import completion
from whyformer.apps.cli import options as opt
from whyformer.apps.cli.printing import INCOMPLETE, Bars, Printer, one_line
from whyformer.defaults import DEFAULT_METHOD
from whyformer.errors import InputError, MethodNotApplicable, WhyformerError
from whyformer.explanation.counts import amount
from whyformer.options import Options

if TYPE_CHECKING:
    from whyformer.comparing import Refusal
    from whyformer.evaluation.trust import Trust
    from whyformer.explanation.result import Explanation
    from whyformer.inputs.argument import Argument
    from whyformer.methods import Method
    from whyformer.models import Loaded
    from whyformer.prepared import Prepared

_More = Annotated[list[str] | None, typer.Argument(
    metavar="MORE", help="Further pictures, .wav and .txt files, or folders."
)]
_Methods = Annotated[str | None, Option(
    metavar="NAMES", autocompletion=completion.methods,
    help="Methods, separated by commas; `whyformer methods` lists them. Default: auto, the method that measured "
    "best for the kind of input and the purpose; the output names it."
)]
_ComparedMethods = Annotated[str | None, Option(
    metavar="NAMES", autocompletion=completion.methods,
    help="Methods, separated by commas. Default: recommended ones that apply to the model."
)]
_Purpose = Annotated[str | None, Option(
    metavar="faithful|localise", autocompletion=completion.purposes,
    help="What auto selects for: scores that the prediction depends on (faithful, the default), or that lie on the "
    "object."
)]
_Contrast = Annotated[str | None, Option(
    metavar="CLASS|TEXT", help='Explain why the target rather than this: --target " are" --contrast " is".'
)]
_Images = Annotated[list[Path] | None, Option(
    metavar="PICTURE", help="A picture that belongs to the text; can be repeated."
)]
_Pair = Annotated[str | None, Option(
    metavar="TEXT", help="The second text, for a model that reads two, such as a premise and a hypothesis."
)]


@dataclass(frozen=True, kw_only=True)
class Question:
    """Options of both commands: target, model and files."""

    target: opt.Targets = None
    top: opt.Top = 5
    setting: opt.Setting = None
    format: opt.Formats = None
    check: opt.Check = False
    model: opt.Model = None
    out: opt.Out = Path("whyformer-out")


@dataclass(frozen=True, kw_only=True)
class Request:
    """The explanations to compute for each input.

    Attributes:
        command: name of the command.
        methods: each with its settings; required: whether each of them has to apply.
        targets: None for the predicted class, or the ``likeliest`` classes.
        formats: of files; None for the usual one of the kind of input.
        look: how maps are drawn.
        loaded: the models that were loaded, by name.
    """

    command: str
    methods: list[tuple[Method, dict[str, Any]]]
    targets: list[Any] | None
    formats: list[str] | None
    look: dict[str, Any]
    question: Question
    options: Options
    printer: Printer
    required: bool = True
    likeliest: int = 1
    images: list[Path] | None = None
    pair: str | None = None
    loaded: dict[str, Loaded] = field(default_factory=dict)


@opt.command()
def explain(
    source: opt.Source,
    more: _More = None,
    *,
    method: _Methods = None,
    purpose: _Purpose = None,
    contrast: _Contrast = None,
    image: _Images = None,
    pair: _Pair = None,
    question: Question,
    options: Options,
    printer: Printer,
    drawing: opt.Drawing,
) -> None:
    """Explain a prediction: print the likeliest classes and the map of each target, and write files.

    By default, the file is a PNG for a picture and HTML for a text; several classes are drawn side by side.
    Several inputs, or a folder of pictures, .wav and .txt files, are explained one after the other. Answers of
    language models have a separate command, generate.
    """
    from whyformer.comparing import read_methods
    from whyformer.inputs.argument import read_argument

    names, settings = opt.parts(method or DEFAULT_METHOD), opt.settings_in(question.setting)
    if purpose is not None:
        if DEFAULT_METHOD not in names:
            raise InputError(f"--purpose is a setting of auto, and the method is {method}: leave one of them out")
        settings["purpose"] = purpose
    targets: list[Any] | None = question.target
    if contrast is not None:
        targets = [opt.contrasted(name, contrast) for name in question.target or (None,)]
    request = Request(
        command="explain", methods=read_methods(names, settings), images=image, pair=pair, targets=targets,
        formats=None if question.format is None else opt.formats_in(question.format), look=drawing.look(),
        question=question, options=options, printer=printer,
    )
    files = _files_in(source, more or [])
    if files is None:
        _explain_input(request, read_argument(source))
    else:
        _explain_files(request, files)


@opt.command()
def compare(
    source: opt.Source,
    *,
    method: _ComparedMethods = None,
    pair: _Pair = None,
    question: Question,
    options: Options,
    printer: Printer,
    drawing: opt.Drawing,
) -> None:
    """Show several methods side by side: rows are methods, columns classes; a sentence has a line for each method.

    By default, the files are a PNG and an HTML page.
    """
    from whyformer.comparing import read_methods
    from whyformer.inputs.argument import read_argument

    look, formats = drawing.look(), opt.formats_in("png,html" if question.format is None else question.format)
    settings = opt.settings_in(question.setting)
    argument = read_argument(source)
    methods = read_methods(None if method is None else opt.parts(method), settings, argument.kind)
    request = Request(
        command="compare", methods=methods, required=method is not None,
        likeliest=2 if argument.kind == "image" else 1, targets=question.target, pair=pair, formats=formats,
        look=look, question=question, options=options, printer=printer,
    )
    _explain_input(request, argument)


def _files_in(source: str, more: Sequence[str]) -> list[str] | None:
    """Return the files, and the files in folders sorted by name; None for a single input that is no folder.

    Raises:
        InputError: a folder holds no input, or one of several inputs is no such file.
    """
    if not more and not os.path.isdir(source):  # False too for what is longer than any name, or has a NUL in it
        return None
    from whyformer.inputs.pictures import SUFFIXES

    kinds, files = (*SUFFIXES, ".wav", ".txt"), list[str]()
    for name in (source, *more):
        path = Path(name)
        if os.path.isdir(name):
            inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in kinds and p.is_file())
            if not inside:
                raise InputError(f"{name} is a folder that holds no picture, no .wav and no .txt file")
            files += map(str, inside)
        elif path.suffix.lower() in kinds:
            files.append(name)
        else:
            raise InputError(
                f"several inputs are folders, pictures, .wav or .txt files; '{name[:60]}' is none (quote a sentence)"
            )
    return files


def _explain_files(request: Request, files: Sequence[str]) -> None:
    """Explain each file. A file that cannot be read or explained is reported and skipped (status 3)."""
    from whyformer.inputs.argument import read_argument
    from whyformer.show.files import slug

    taken: set[str] = set()
    failed = 0
    for file in files:
        try:
            argument = read_argument(file)
            stem = slug(argument.name[:40])  # names of output files begin so; those of several inputs may agree in it
            names = itertools.chain([stem], (f"{stem[:34]}-{number}" for number in itertools.count(2)))
            name = next(name for name in names if name.casefold() not in taken)
            taken.add(name.casefold())
            _explain_input(request, replace(argument, name=name))
        except WhyformerError as error:
            failed += 1
            request.printer.note(f"left out: {file}: {one_line(error)}")
    if failed:
        request.printer.note(f"{failed} of {amount(len(files), 'input')} left out")
        raise typer.Exit(INCOMPLETE)


def _explain_input(request: Request, argument: Argument) -> None:
    """Print and write the explanations of one input."""
    printer = request.printer
    usual = "png" if argument.kind in ("image", "sound") or request.images else "html"
    formats = [usual] if request.formats is None else request.formats
    with printer.working() as bars:
        ready = _prepare(request, argument, bars)
        results, refusals = _explain_each(request, ready, bars)
        for refusal in refusals:
            if request.required or not isinstance(refusal.error, MethodNotApplicable) or not results:
                raise refusal.error
        checks = _check(results, ready, bars) if request.question.check else []
    for refusal in refusals:
        printer.note(f"left out: {one_line(refusal.error)}")
    # all files are complete in memory before the first is written, and written before anything is printed
    from whyformer.show import files, terminal

    results = [check.noted_in(e) for e, check in zip(results, checks, strict=True)] if checks else results
    facts = files.record_of(request.command, results, ready.name, argument.title)
    if checks:
        facts["checks"] = [check.to_dict() for check in checks]
    contents = files.contents(results, argument.name, argument.title, facts, formats, **request.look)
    written = files.write_all(request.question.out, contents)
    printer.result(facts, terminal.render(results, request.question.top), written)


def _prepare(request: Request, argument: Argument, bars: Bars) -> Prepared:
    """Read the input with its pictures or its second text for its model."""
    kind = "both" if request.images and argument.kind == "text" else argument.kind
    loaded = load_for(kind, request.question.model, request.options, bars, request.loaded)
    content: Any = {"text": argument.content, "images": request.images} if kind == "both" else argument.content
    if request.pair is not None:
        if kind != "text":
            raise InputError(f"--pair is the second of two texts, and this is {INPUTS[kind]}")
        content = {"text": argument.content, "text_pair": request.pair}
    from whyformer.explainer import Explainer

    return Explainer(loaded, **request.options.named).prepare(content)


def _explain_each(request: Request, ready: Prepared, bars: Bars) -> tuple[list[Explanation], list[Refusal]]:
    """Explain with each method for each target; return the explanations and the refusals."""
    from whyformer.comparing import Refusal, each

    def once(key: Any, make: Callable[[], Explanation]) -> Explanation:
        with bars.step(key[0] if key[2] is None else f"{key[0]}, class {key[2]}"):
            return make()

    targets = request.targets or ready.likeliest(request.likeliest)
    outcomes = list(each(ready, request.methods, targets, progress=bars.track, once=once))
    refusals = [outcome for outcome in outcomes if isinstance(outcome, Refusal)]
    return [outcome for outcome in outcomes if not isinstance(outcome, Refusal)], refusals


def _check(results: Sequence[Explanation], ready: Prepared, bars: Bars) -> list[Trust]:
    """Measure the faithfulness of each explanation of an input."""
    import whyformer

    checks: list[Trust] = []
    for e in results:
        with bars.step(f"checking {e.method}"):
            checks.append(whyformer.trust(e, ready.model, ready.inputs, ready.processor, known=checks))
    return checks


def load_for(
    kind: str, model: str | None, options: Options, bars: Bars, loaded: dict[str, Loaded] | None = None
) -> Loaded:
    """Return the model for a kind of input; ``loaded`` is a cache of models.

    Raises:
        InputError: no model is named and there is no default, or it reads another kind of input.
    """
    name, loaded = model_for(kind, model), {} if loaded is None else loaded
    if name not in loaded:
        loaded[name] = load_model(name, options, bars)
    if loaded[name].modality != kind:
        reads = loaded[name].reads + (" (--image)" if loaded[name].modality == "both" else "")
        raise InputError(f"{name} reads {reads}, and this is {INPUTS[kind]}: choose another --model")
    return loaded[name]


def load_model(name: str, options: Options, bars: Bars) -> Loaded:
    """Load a model by name and show it as a step of the progress."""
    with bars.step(f"loading {name}"):
        from whyformer.models import load

        return load(name, device=options.device, dtype=options.dtype)

"""``whyformer explain``, ``compare`` and ``generate``, and the choice of the model for an input."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from whyformer.apps import INPUTS, model_for
from whyformer.apps.cli import completion
from whyformer.apps.cli import options as opt
from whyformer.apps.cli.printing import INCOMPLETE, Bars, Printer, one_line
from whyformer.defaults import COMPARED, DEFAULT_METHOD
from whyformer.errors import InputError, MethodNotApplicable, WhyformerError
from whyformer.explanation.counts import amount
from whyformer.notation import parts, settings_in
from whyformer.options import Options

if TYPE_CHECKING:
    from whyformer.evaluation.trust import Trust
    from whyformer.inputs.argument import Argument
    from whyformer.models import Loaded

_FORMATS = ("png", "svg", "pdf", "html", "json")
_ANSWER_FORMATS = (*_FORMATS, "safetensors")


@dataclass(frozen=True, kw_only=True)
class Question:
    """Options of both commands: input, methods, targets, model and files."""

    source: opt.Source
    more: Annotated[list[str] | None, typer.Argument(
        metavar="MORE", help="Further pictures, .wav and .txt files, or folders."
    )] = None
    method: Annotated[str | None, Option(
        metavar="NAMES", autocompletion=completion.methods,
        help="Methods, separated by commas; `whyformer methods` lists them. Default: auto, the method that measured "
        "best for the kind of input and the purpose; the output names it. In compare, recommended ones that apply to "
        "the model."
    )] = None
    purpose: Annotated[str | None, Option(
        metavar="faithful|localise", autocompletion=lambda: ["faithful", "localise"],
        help="What auto selects for: scores that the prediction depends on (faithful, the default), or that lie on the "
        "object."
    )] = None
    target: Annotated[list[str] | None, opt.target_option(
        "Name or index of a class, or a target such as \"Token(5, 'blue')\"; can be repeated. Default: the predicted "
        "class; in compare, the two likeliest classes of a picture."
    )] = None
    contrast: opt.Contrast = None
    image: opt.Images = None
    pair: Annotated[str | None, Option(
        metavar="TEXT", help="The second text, for a model that reads two, such as a premise and a hypothesis."
    )] = None
    top: Annotated[int, Option(min=1, help="Number of likeliest classes to list.")] = 5
    setting: opt.Setting = None
    format: Annotated[str | None, opt.format_option(_FORMATS)] = None
    check: Annotated[bool, Option(
        "--check", help="Measure the faithfulness of each map, compared with random maps (needs forward passes)."
    )] = False
    model: opt.Model = None
    out: opt.Out = Path("whyformer-out")


@dataclass(frozen=True, kw_only=True)
class Request:
    """The explanations to compute for each input: the options of a command, parsed.

    Attributes:
        command: name of the command.
        methods: names, each with its settings.
        targets: None for the predicted class, or in ``compare`` the likeliest classes.
        formats: of files; None for the usual ones of the kind of input.
        look: how maps are drawn.
        loaded: the models that were loaded, by name.
    """

    command: str
    question: Question
    methods: list[tuple[str, dict[str, Any]]]
    targets: list[Any] | None
    formats: list[str] | None
    look: dict[str, Any]
    options: Options
    printer: Printer
    loaded: dict[str, Loaded] = field(default_factory=dict)


@opt.command()
def explain(*, question: Question, options: Options, printer: Printer, drawing: opt.Drawing) -> None:
    """Explain a prediction: print the likeliest classes and the map of each target, and write files.

    By default, the file is a PNG for a picture and HTML for a text; several classes are drawn side by side.
    Several inputs, or a folder of pictures, .wav and .txt files, are explained one after the other. Answers of
    language models have a separate command, generate.
    """
    _explain("explain", question, options, printer, drawing)


@opt.command()
def compare(*, question: Question, options: Options, printer: Printer, drawing: opt.Drawing) -> None:
    """Show several methods side by side: rows are methods, columns classes; a sentence has a line for each method.

    By default, the files are a PNG and an HTML page.
    """
    _explain("compare", question, options, printer, drawing)


def _explain(command: str, question: Question, options: Options, printer: Printer, drawing: opt.Drawing) -> None:
    from whyformer.comparing import read_methods
    from whyformer.inputs.argument import read_argument

    names = [*COMPARED] if command == "compare" else [DEFAULT_METHOD]
    if question.method is not None:
        names = parts(question.method)
    settings, targets = settings_in(question.setting), question.target
    if question.purpose is not None:
        if DEFAULT_METHOD not in names:
            raise InputError(f"--purpose is a setting of auto, and the method is {names[0]}: leave one of them out")
        settings["purpose"] = question.purpose
    if question.contrast is not None:
        targets = [opt.contrasted(target, question.contrast) for target in targets or (None,)]
    request = Request(
        command=command, question=question, options=options, printer=printer, look=drawing.look(), targets=targets,
        methods=[(method.name, chosen) for method, chosen in read_methods(names, settings)],
        formats=None if question.format is None else opt.formats_in(question.format, _FORMATS),
    )
    if question.more or os.path.isdir(question.source):  # False for what is longer than any name, or has a NUL in it
        _explain_files(request, _files_in([question.source, *(question.more or [])]))
    else:
        _explain_input(request, read_argument(question.source))


def _files_in(names: Sequence[str]) -> list[str]:
    """Return files, and the files in folders sorted by name.

    Raises:
        InputError: a folder holds no input, or a name is not that of such a file.
    """
    from whyformer.inputs.pictures import SUFFIXES

    kinds, files = (*SUFFIXES, ".wav", ".txt"), list[str]()
    for name in names:
        if os.path.isdir(name):
            inside = sorted(p for p in Path(name).rglob("*") if p.suffix.lower() in kinds and p.is_file())
            if not inside:
                raise InputError(f"{name} is a folder that holds no picture, no .wav and no .txt file")
            files += map(str, inside)
        elif name.lower().endswith(kinds):
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

    used: set[str] = set()
    failed = 0
    for file in files:
        try:
            argument = read_argument(file)
            stem = slug(argument.name[:40])  # names of output files begin so; those of several inputs may agree in it
            names = itertools.chain([stem], (f"{stem[:34]}-{number}" for number in itertools.count(2)))
            name = next(name for name in names if name.casefold() not in used)
            used.add(name.casefold())
            _explain_input(request, replace(argument, name=name))
        except WhyformerError as error:
            failed += 1
            request.printer.note(f"left out: {file}: {one_line(error)}")
    if failed:
        request.printer.note(f"{failed} of {amount(len(files), 'input')} left out")
        raise typer.Exit(INCOMPLETE)


def _explain_input(request: Request, argument: Argument) -> None:
    """Print and write the explanations of one input."""
    question, printer, compares = request.question, request.printer, request.command == "compare"
    kind = "both" if question.image and argument.kind == "text" else argument.kind
    usual = ["png", "html"] if compares else ["html"] if kind == "text" else ["png"]
    with printer.working() as bars:
        loaded = load_for(kind, question.model, request.options, bars, request.loaded)
        content: Any = {"text": argument.content, "images": question.image} if kind == "both" else argument.content
        if question.pair is not None:
            if kind != "text":
                raise InputError(f"--pair is the second of two texts, and this is {INPUTS[kind]}")
            content = {"text": argument.content, "text_pair": question.pair}
        from whyformer.evaluation.trust import trust
        from whyformer.explainer import Explainer

        explainer = Explainer(loaded, **request.options.named)
        with bars.step("explaining"):
            likeliest = 2 if compares and kind == "image" else 1
            comparison = explainer.compare(
                content, request.methods, request.targets, likeliest=likeliest, progress=bars.track
            )
        for refusal in comparison.refusals:
            if question.method is not None or not isinstance(refusal.error, MethodNotApplicable):
                raise refusal.error
        results = comparison.explanations
        checks: list[Trust] = []
        for e in results if question.check else ():
            with bars.step(f"checking {e.method}"):
                checks.append(trust(e, explainer, content, known=checks))
    for refusal in comparison.refusals:
        printer.note(f"left out: {one_line(refusal.error)}")
    # all files are complete in memory before the first is written, and written before anything is printed
    from whyformer.show import files, terminal

    if checks:
        results = [check.noted_in(e) for e, check in zip(results, checks, strict=True)]
    facts = files.record_of(request.command, results, loaded.name, argument.title)
    if checks:
        facts["checks"] = [check.to_dict() for check in checks]
    formats = usual if request.formats is None else request.formats
    contents = files.contents(results, argument.name, argument.title, facts, formats, **request.look)
    written = files.write_all(question.out, contents)
    printer.result(facts, terminal.render(results, question.top), written)


# -- answers -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """Options of the command: prompt, answer, method and files."""

    prompt: Annotated[str, typer.Argument(
        metavar="PROMPT", help="A sentence, a .txt file, or - for standard input."
    )]
    model: Annotated[str | None, opt.model_option(
        "A language model: a hub id, a local folder or bundled:reader. Required."
    )] = None
    max_new_tokens: Annotated[int, Option(
        "--max-new-tokens", "-n", metavar="N", min=1, help="Maximum number of tokens of the answer."
    )] = 32
    continuation: Annotated[str | None, Option(
        metavar="TEXT", help="Explain this answer instead of a generated one."
    )] = None
    chat: Annotated[bool, Option(
        "--chat", help="Format the prompt as a user's message, with the tokenizer's chat template."
    )] = False
    image: opt.Images = None
    method: opt.Method = DEFAULT_METHOD
    target: Annotated[str | None, opt.target_option(
        "The explained quantity of each token: log_probability (default), logit, probability, among_likeliest, "
        "contrast (to the best other token), or the logit of a token.", metavar="WHAT"
    )] = None
    contrast: opt.Contrast = None
    setting: opt.Setting = None
    format: Annotated[str | None, opt.format_option(_ANSWER_FORMATS)] = None
    out: opt.Out = Path("whyformer-out")


@opt.command()
def generate(*, answer: AnswerOptions, options: Options, printer: Printer, drawing: opt.Drawing) -> None:
    """Generate an answer with a language model, and explain each of its tokens.

    By default, the file is an HTML page; for a prompt with pictures, a PNG with the map of each word.
    """
    from whyformer.inputs.argument import read_argument

    look, images = drawing.look(), answer.image
    formats = opt.formats_in(answer.format or ("png" if images else "html"), _ANSWER_FORMATS)
    method, settings = opt.one_method(answer.method, answer.setting)
    target = opt.contrasted(answer.target, answer.contrast)
    if options.truncate:
        raise InputError("the prompt of an answer is never truncated: leave --truncate out, and shorten a long prompt")
    argument = read_argument(answer.prompt)
    if argument.kind != "text":
        raise InputError("the prompt is a text: pass a sentence, a .txt file or -, and pictures with --image")
    if images and answer.chat:
        raise InputError("leave --chat out: a prompt with a picture is formatted by the model's processor")
    if answer.model is None and not images:
        raise InputError("an answer needs a language model: --model ID|FOLDER")
    with printer.working() as bars:
        loaded = load_model(model_for("both" if images else "text", answer.model), options, bars)
        if images and loaded.modality != "both":
            raise InputError(f"{loaded.name} reads no pictures: choose another --model, or omit --image")
        import whyformer

        prompt: Any = [{"role": "user", "content": argument.content}] if answer.chat else argument.content
        generation: Any = whyformer.explain_generation(
            loaded, prompt, answer.continuation, method, images=images, max_new_tokens=answer.max_new_tokens,
            target=target, progress=bars.track, **options.named, **settings,
        )
    from whyformer.explanation.display import actual_method
    from whyformer.show import files, terminal_answer

    facts = files.record_of("generate", [], loaded.name, argument.title) | {"generation": generation.to_dict()}
    stem = files.slug(argument.name[:40], actual_method(generation[0]), "generated")
    contents = files.answer_contents(generation, stem, argument.title, facts, formats, **look)
    printer.result(facts, terminal_answer.render(generation), files.write_all(answer.out, contents))


# -- models --------------------------------------------------------------------------------------------------------
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

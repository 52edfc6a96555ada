"""``whyformer generate``: every token of a language model's answer, explained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from whyformer.apps import model_for
from whyformer.apps.cli import options as opt
from whyformer.apps.cli.explaining import load_model
from whyformer.apps.cli.printing import Printer
from whyformer.defaults import DEFAULT_METHOD
from whyformer.errors import InputError
from whyformer.options import Options

_FORMATS = ("png", "svg", "pdf", "html", "json", "safetensors")
_Prompt = Annotated[str, Argument(metavar="PROMPT", help="A sentence, a .txt file, or - for standard input.")]
_LanguageModel = Annotated[str | None, opt.model_option(
    "A language model: a hub id, a local folder or bundled:reader. Required."
)]
_Length = Annotated[int, Option(
    "--max-new-tokens", "-n", metavar="N", min=1, help="Maximum number of tokens of the answer."
)]
_Continuation = Annotated[str | None, Option(metavar="TEXT", help="Explain this answer instead of a generated one.")]
_Chat = Annotated[bool, Option(
    "--chat", help="Format the prompt as a user's message, with the tokenizer's chat template."
)]
_Images = Annotated[list[Path] | None, Option(
    metavar="PICTURE", help="A picture that belongs to the prompt; can be repeated."
)]
_Explained = Annotated[str | None, opt.target_option(
    "The explained quantity of each token: log_probability (default), logit, probability, among_likeliest, contrast "
    "(to the best other token), or the logit of a token.",
    metavar="WHAT"
)]
_Contrast = Annotated[str | None, Option(metavar="TEXT", help="Explain why the target rather than this token.")]
_Formats = Annotated[str | None, opt.format_option(
    "Files to write, separated by commas: png, svg, pdf, html, json, safetensors; or none."
)]


@opt.command()
def generate(
    prompt: _Prompt,
    *,
    model: _LanguageModel = None,
    max_new_tokens: _Length = 32,
    continuation: _Continuation = None,
    chat: _Chat = False,
    image: _Images = None,
    method: opt.Method = DEFAULT_METHOD,
    target: _Explained = None,
    contrast: _Contrast = None,
    setting: opt.Setting = None,
    format: _Formats = None,
    out: opt.Out = Path("whyformer-out"),
    options: Options,
    printer: Printer,
    drawing: opt.Drawing,
) -> None:
    """Generate an answer with a language model, and explain each of its tokens.

    By default, the file is an HTML page; for a prompt with pictures, a PNG with the map of each word.
    """
    from whyformer.inputs.argument import read_argument

    look = drawing.look()
    formats = opt.formats_in(("png" if image else "html") if format is None else format, _FORMATS)
    chosen, settings = opt.one_method(method, setting)
    explained = target if contrast is None else opt.contrasted(target, contrast)
    argument = read_argument(prompt)
    if argument.kind != "text":
        raise InputError("the prompt is a text: pass a sentence, a .txt file or -, and pictures with --image")
    if image and chat:
        raise InputError("leave --chat out: a prompt with a picture is formatted by the model's processor")
    if model is None and not image:
        raise InputError("an answer needs a language model: --model ID|FOLDER")
    with printer.working() as bars:
        loaded = load_model(model_for("both" if image else "text", model), options, bars)
        if image and loaded.modality != "both":
            raise InputError(f"{loaded.name} reads no pictures: choose another --model, or omit --image")
        import whyformer
        from whyformer.inputs.pictures import open_picture

        answer: Any = whyformer.explain_generation(
            loaded, [{"role": "user", "content": argument.content}] if chat else argument.content, continuation, chosen,
            images=[open_picture(path) for path in image] if image else None, max_new_tokens=max_new_tokens,
            target=explained, progress=bars.track, **options.named, **settings,
        )
    from whyformer.explanation.display import actual_method
    from whyformer.show import files, terminal_answer

    facts = files.record_of("generate", [], loaded.name, argument.title) | {"generation": answer.to_dict()}
    stem = files.slug(argument.name[:40], actual_method(answer[0]), "generated")
    contents = files.answer_contents(answer, stem, argument.title, facts, formats, **look)
    printer.result(facts, terminal_answer.render(answer), files.write_all(out, contents))

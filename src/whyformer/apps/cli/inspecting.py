"""Inside models: ``whyformer attention``, ``perturb``, ``audit``, ``methods``, and ``schema`` for the JSON of all."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from whyformer.apps import INPUTS
from whyformer.apps.cli import completion
from whyformer.apps.cli import options as opt
from whyformer.apps.cli.explaining import load_for
from whyformer.apps.cli.printing import Debug, Printer
from whyformer.baselines import BASELINES, names_for
from whyformer.defaults import DEFAULT_METHOD
from whyformer.errors import InputError
from whyformer.explanation.versions import record
from whyformer.options import Options

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from whyformer.attention import AttentionMaps
    from whyformer.evaluation.strip import Strip

_FIGURES = ("png", "svg", "pdf")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The attention maps to draw."""

    block: Annotated[int | None, Option(
        metavar="N", help="Index of a block; negative ones count from the last. Default: all."
    )] = None
    heads: Annotated[bool, Option("--heads", help="A map for each head instead of their mean.")] = False
    matrix: Annotated[bool, Option(
        "--matrix", help="Attention from token to token in one block (default: the last)."
    )] = False
    head: Annotated[str, Option(metavar="N|mean|max|min", help="Head of the matrix and of single maps.")] = "mean"

    def figure(self, maps: AttentionMaps, look: dict[str, Any]) -> tuple[str, Figure]:
        """Return a description and the figure."""
        from whyformer import show

        block, head = self.block, int(self.head) if self.head.lstrip("-").isdecimal() else self.head
        if self.matrix:
            block = -1 if block is None else block
            weights = maps.matrix(block, head)
            block %= maps.blocks
            names = None if maps.tokens is None else maps.tokens[0]
            title = f"block {block}, {f'head {head}' if isinstance(head, int) else f'{head} over heads'}"
            return f"block {block} head {head} matrix", show.matrix(weights, names, title=title, cmap=look.get("cmap"))
        if self.heads:
            several = maps.each_head(block)
            named = "heads" if block is None else f"block {several[0].settings['block']} heads"
            return named, show.panels(several, maps.heads if block is None else None, **look)
        if block is not None:
            single = maps.explanation(block, head)
            return f"block {single.settings['block']} head {head}", show.figure(single, **look)
        return "blocks", show.panels(maps.each_block(head), **look)


@opt.command()
def attention(
    source: opt.Source,
    *,
    selection: Selection,
    gradient: Annotated[bool, Option(
        "--gradient", help="Weight maps by the gradient of the target, so that they are specific to a class."
    )] = False,
    target: opt.Target = None,
    format: Annotated[str, opt.format_option(
        (*_FIGURES, "html"), " (for texts: an interactive page of blocks and heads)"
    )] = "png",
    model: opt.Model = None,
    out: opt.Out = Path("whyformer-out"),
    options: Options,
    printer: Printer,
    drawing: opt.Drawing,
) -> None:
    """Draw the attention maps inside a model: each block, each head, or the matrix of tokens."""
    from whyformer.inputs.argument import read_argument

    formats, look = opt.formats_in(format, (*_FIGURES, "html")), drawing.look()
    if target is not None and not gradient:
        raise InputError("attention does not depend on a class; --gradient weights it by the gradient of one")
    argument = read_argument(source)
    if "html" in formats and argument.kind == "image":
        raise InputError("the page of heads is for texts: for a picture, --heads draws a map for each head")
    with printer.working() as bars:
        loaded = load_for(argument.kind, model, options, bars)
        with bars.step("attention"):
            import whyformer
            from whyformer.show import files
            from whyformer.show import heads as page_of_heads

            maps = whyformer.attention_maps(loaded, argument.content, target=target, gradient=gradient, **options.named)
            contents, drawn = {}, "heads"
            if "html" in formats:
                formats.remove("html")
                name = files.slug(argument.name[:40], "attention", "heads")
                contents[f"{name}.html"] = page_of_heads(maps, title=argument.title).encode()
            if formats or not contents:
                drawn, figure = selection.figure(maps, look)
                contents |= _encoded(formats, figure, argument.name, "attention", *drawn.split())
    facts = record(
        "attention", model=loaded.name, input=argument.title, blocks=maps.blocks, heads=maps.heads, drawn=drawn
    )
    printer.result(facts, drawn, files.write_all(out, contents))


@opt.command()
def perturb(
    source: Annotated[str, Argument(metavar="PICTURE", help="A picture file.")],
    *,
    method: opt.Method = DEFAULT_METHOD,
    target: opt.Target = None,
    baseline: Annotated[str, Option(
        metavar="|".join(names_for("image")), help="What replaces removed pixels.",
        autocompletion=lambda: [(name, BASELINES[name].kinds["image"]) for name in names_for("image")],
    )] = "black",
    setting: opt.Setting = None,
    format: Annotated[str, opt.format_option(_FIGURES)] = "png",
    model: opt.Model = None,
    out: opt.Out = Path("whyformer-out"),
    options: Options,
    printer: Printer,
) -> None:
    """Remove 10 to 90 % of a picture, the highest and the lowest scores first, and show the model's predictions."""
    from whyformer.inputs.argument import read_argument

    formats = opt.formats_in(format, _FIGURES)
    argument = read_argument(source)
    if argument.kind != "image":
        raise InputError(f"perturb removes parts of a picture, and this is {INPUTS[argument.kind]}: pass a picture")
    method_name, settings = opt.one_method(method, setting)
    with printer.working() as bars:
        loaded = load_for(argument.kind, model, options, bars)
        import whyformer
        from whyformer import show
        from whyformer.evaluation.strip import perturbation_strip

        with bars.step(method_name):
            e = whyformer.explain(
                loaded, argument.content, method_name, target, progress=bars.track, **options.named, **settings
            )
        with bars.step("removing pixels"):
            strip = perturbation_strip(loaded.model, argument.content, e, loaded.processor, baseline=baseline)
            figure = show.strip(strip)
    facts, lines = _measured(strip)
    facts = record("perturb", model=loaded.name, input=argument.title, method=e.method, settings=e.settings, **facts)
    contents = _encoded(formats, figure, argument.name, strip.method, strip.target, "removed")
    printer.result(facts, "\n".join(lines), show.files.write_all(out, contents))


def _measured(strip: Strip) -> tuple[dict[str, Any], list[str]]:
    """Return values and predictions at each step of a removal, for JSON and as lines."""
    orders = ("highest_first", "lowest_first")
    values = dict(zip(orders, strip.probabilities.tolist(), strict=True))
    facts = {
        "target": strip.target, "baseline": strip.baseline, "fractions": list(strip.fractions),
        "probabilities": None if strip.numeric else values, "values": values if strip.numeric else None,
        "predicted": dict(zip(orders, strip.predicted, strict=True)),
    }
    name, form = ("value", ".4g") if strip.numeric else ("probability", ".1%")
    lines = [f"{name} of {strip.target}, baseline {strip.baseline}", "removed   highest first   lowest first"]
    rows = zip(strip.fractions, *values.values(), strict=True)
    return facts, lines + [f"{f:7.0%}   {a:>13{form}}   {b:>12{form}}" for f, a, b in rows]


def _encoded(formats: list[str], drawing: Figure, *name: str) -> dict[str, bytes]:
    from whyformer.show import encode, files

    return {f"{files.slug(*name)}.{kind}": encode(drawing, kind) for kind in formats}


@opt.command()
def methods(
    name: Annotated[str | None, Argument(
        autocompletion=lambda: completion.named("methods"), help="A method to describe in detail."
    )] = None,
    *,
    printer: Printer,
) -> None:
    """List the methods, or describe one with its settings and their defaults."""
    from whyformer.show.terminal import catalogue, describe

    entries = completion.names_file()["methods"]
    if name is not None and name not in entries:
        from whyformer.methods import find

        find(name)  # raises an error that lists the names
    selected = [(entries[n]["facts"], entries[n]["signed"]) for n in sorted(entries) if name in (None, n)]
    drawing = catalogue(selected) if name is None else describe(selected[0][0], signed=selected[0][1])
    printer.result(record("methods", methods=[facts for facts, _ in selected]), drawing)


@opt.command()
def audit(
    model: opt.ModelArgument,
    *,
    input: Annotated[str | None, Option(
        "--input", "-i", metavar="PICTURE_OR_TEXT", help=f"{opt.SOURCE} Default: noise, or a short sentence."
    )] = None,
    target: opt.Target = None,
    options: Options,
    printer: Printer,
) -> None:
    """Show what is recognised in a model: inputs, attentions, the rule of each operation, and methods that apply."""
    with printer.working() as bars:
        import whyformer
        from whyformer.inputs.argument import read_argument
        from whyformer.show import auditing

        content = None if input is None else read_argument(input).content
        result = whyformer.audit(model, content, target=target, progress=bars.track, **options.named)
    printer.result(record("audit", **result.to_dict()), auditing.render(result))


def _commands(context: typer.Context) -> list[str]:
    """Return the commands that print JSON: all but ``schema`` itself."""
    names = context.find_root().command.list_commands(context)  # type: ignore[attr-defined]
    return [name for name in names if name != context.info_name]


@opt.command()
def schema(
    command: Annotated[str | None, Argument(
        metavar="COMMAND", autocompletion=_commands, help="Only this command's."
    )] = None,
    *,
    debug: Debug = False,
) -> None:
    """Print the JSON Schema of the output of --json, for one command or for all."""
    from whyformer.apps.cli.schema import COMMANDS, make_schema

    if command is not None and command not in COMMANDS:
        raise InputError(f"no command '{command}' prints JSON; these do: {', '.join(COMMANDS)}")
    typer.echo(json.dumps(make_schema(command), indent=1))

"""``whyformer attention`` and ``whyformer perturb``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from whyformer.apps import INPUTS
from whyformer.apps.cli import completion
from whyformer.apps.cli import options as opt
from whyformer.apps.cli.explaining import load_for
from whyformer.apps.cli.printing import Printer
from whyformer.baselines import names_for
from whyformer.defaults import DEFAULT_METHOD
from whyformer.errors import InputError
from whyformer.explanation.versions import record
from whyformer.options import Options

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from whyformer.attention import AttentionMaps
    from whyformer.evaluation.strip import Strip

_FIGURES = ("png", "svg", "pdf")
_Block = Annotated[int | None, Option(
    metavar="N", help="Index of a block; negative ones count from the last. Default: all."
)]
_Heads = Annotated[bool, Option("--heads", help="A map for each head instead of their mean.")]
_Matrix = Annotated[bool, Option("--matrix", help="Attention from token to token in one block (default: the last).")]
_Head = Annotated[str, Option(metavar="N|mean|max|min", help="Head of the matrix and of single maps.")]
_Gradient = Annotated[bool, Option(
    "--gradient", help="Weight maps by the gradient of the target, so that they are specific to a class."
)]
_AttentionFormats = Annotated[str, opt.format_option(
    "Files to write: png, svg, pdf, html (for texts: an interactive page of blocks and heads); or none."
)]
_Picture = Annotated[str, Argument(metavar="PICTURE", help="A picture file.")]
_PerturbFormats = Annotated[str, opt.format_option("Files to write: png, svg, pdf; or none.")]
_Baseline = Annotated[str, Option(
    metavar="|".join(names_for("image")), autocompletion=completion.baselines,
    help="What replaces removed pixels."
)]


@opt.command()
def attention(
    source: opt.Source,
    *,
    block: _Block = None,
    heads: _Heads = False,
    matrix: _Matrix = False,
    head: _Head = "mean",
    gradient: _Gradient = False,
    target: opt.Target = None,
    format: _AttentionFormats = "png",
    model: opt.Model = None,
    out: opt.Out = Path("whyformer-out"),
    options: Options,
    printer: Printer,
    drawing: opt.Drawing,
) -> None:
    """Draw the attention maps inside a model: each block, each head, or the matrix of tokens."""
    from whyformer.inputs.argument import read_argument

    formats, look = opt.formats_in(format, (*_FIGURES, "html")), drawing.look()
    which = int(head) if head.lstrip("-").isdecimal() else head
    if isinstance(which, str) and which not in ("mean", "max", "min"):
        raise InputError(f"--head takes a number, or mean, max or min over the heads, not '{head}'")
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
                drawn, figure = _drawn(maps, which, look, block=block, heads=heads, matrix=matrix)
                contents |= _encoded(formats, figure, argument.name, "attention", *drawn.split())
    facts = record(
        "attention", model=loaded.name, input=argument.title, blocks=maps.blocks, heads=maps.heads, drawn=drawn
    )
    printer.result(facts, drawn, files.write_all(out, contents))


def _drawn(
    maps: AttentionMaps, head: int | str, look: dict[str, Any], *, block: int | None, heads: bool, matrix: bool
) -> tuple[str, Figure]:
    """Return a description and the figure."""
    from whyformer import show

    if matrix:
        block = -1 if block is None else block
        weights = maps.matrix(block, head)
        block %= maps.blocks
        names = None if maps.tokens is None else maps.tokens[0]
        title = f"block {block}, {f'head {head}' if isinstance(head, int) else f'{head} over heads'}"
        return f"block {block} head {head} matrix", show.matrix(weights, names, title=title, cmap=look.get("cmap"))
    if heads:
        several = maps.each_head(block)
        named = "heads" if block is None else f"block {several[0].settings['block']} heads"
        return named, show.panels(several, maps.heads if block is None else None, **look)
    if block is not None:
        single = maps.explanation(block, head)
        return f"block {single.settings['block']} head {head}", show.figure(single, **look)
    return "blocks", show.panels(maps.each_block(head), **look)


@opt.command()
def perturb(
    source: _Picture,
    *,
    method: opt.Method = DEFAULT_METHOD,
    target: opt.Target = None,
    baseline: _Baseline = "black",
    setting: opt.Setting = None,
    format: _PerturbFormats = "png",
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
    chosen, settings = opt.one_method(method, setting)
    with printer.working() as bars:
        loaded = load_for(argument.kind, model, options, bars)
        import whyformer
        from whyformer import show
        from whyformer.evaluation.strip import perturbation_strip

        with bars.step(chosen):
            e = whyformer.explain(
                loaded, argument.content, chosen, target, progress=bars.track, **options.named, **settings
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

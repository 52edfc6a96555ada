"""``whyformer attention`` and ``whyformer perturb``: figures that are no explanation of a class on their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whyformer.apps.cli import options as opt
from whyformer.apps.cli.explaining import Work
from whyformer.apps.cli.progress import Working
from whyformer.apps.cli.telling import console, errors_as_sentences
from whyformer.errors import InputError
from whyformer.explanation.versions import record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from whyformer.attention import AttentionMaps

_FIGURES = ("png", "svg", "pdf")
Figures = Annotated[str, typer.Option("--format", "-f", metavar="LIST", help="Files to write: png, svg, pdf; or none.")]


def attention(
    source: opt.Source, model: opt.ModelName = None,
    block: Annotated[
        int | None, typer.Option(metavar="N", help="A block, from 0; negative ones from the last. Default: all.")
    ] = None,
    heads: Annotated[bool, typer.Option("--heads", help="One map a head instead of their mean.")] = False,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Which token looks at which, in one block (default: the last).")
    ] = False,
    head: Annotated[
        str, typer.Option(metavar="N|mean|max|min", help="The head of the matrix and of single maps.")
    ] = "mean",
    gradient: Annotated[
        bool, typer.Option("--gradient", help="Weighted by the gradient of the target, so that maps speak of a class.")
    ] = False,
    target: opt.Target = None, out: opt.Out = Path("whyformer-out"), format: Figures = "png",
    device: opt.Device = None, dtype: opt.Dtype = None, truncate: opt.Truncate = False, opacity: opt.Opacity = None,
    cmap: opt.Cmap = None, cover: opt.Cover = False, contours: opt.Contours = None, keep: opt.Keep = None,
    above: opt.Above = None, quiet: opt.Quiet = False, as_json: opt.AsJson = False, debug: opt.Debug = False,
) -> None:  # fmt: skip
    """Draw the attention maps inside a model: each block, each head, or the matrix of tokens."""
    from whyformer.inputs.argument import read_argument

    with errors_as_sentences(debug):
        formats = _formats(format)
        look = opt.chosen_look(opacity, cmap, cover, contours, keep, above)
        chosen = int(head) if head.lstrip("-").isdigit() else head
        if isinstance(chosen, str) and chosen not in ("mean", "max", "min"):
            raise InputError(f"--head takes a number, or mean, max or min over the heads, not '{head}'")
        if target is not None and not gradient:
            raise InputError("attention itself belongs to no class; --gradient weights it by the gradient of one")
        asked = read_argument(source)
        with Working(quiet) as working:
            work = Work(asked, model, device, dtype, truncate, working)
            with working.step("attention"):
                import whyformer

                maps = whyformer.attention_maps(
                    work.loaded.model, asked.content, work.loaded.processor, target=target, gradient=gradient,
                    truncate=truncate,
                )  # fmt: skip
                which, drawing = _drawn(maps, block, heads, matrix, chosen, look)
        facts = {"blocks": maps.blocks, "heads": maps.heads, "drawn": which}
        _deliver("attention", drawing, (asked.name, "attention", *which.split()), formats, out, quiet, as_json,
                 {"model": work.loaded.name, "input": asked.title, **facts}, which)  # fmt: skip


def _drawn(
    maps: AttentionMaps, block: int | None, heads: bool, matrix: bool, head: int | str, look: dict[str, Any]
) -> tuple[str, Figure]:
    """(what is drawn, in words; the figure)."""
    from whyformer import show

    if matrix:
        block = -1 if block is None else block
        weights = maps.matrix(block, head)
        named = f"block {block % maps.blocks} head {head} matrix"
        names = None if maps.tokens is None else maps.tokens[0]
        return named, show.matrix(weights, names, title=named, cmap=look.get("cmap"))
    if heads:
        several = maps.each_head(block)
        return ("heads" if block is None else f"block {several[0].settings['block']} heads"), show.panels(
            several, maps.heads if block is None else None, **look
        )
    if block is not None:
        single = maps.explanation(block, head)
        return f"block {single.settings['block']} head {head}", show.figure(single, **look)
    return "blocks", show.panels(maps.each_block(head), **look)


def perturb(
    source: opt.Source, model: opt.ModelName = None, method: opt.Name = "transformer_attribution",
    target: opt.Target = None,
    baseline: Annotated[
        str, typer.Option(metavar="black|zero|mean|blur", help="What stands in for removed pixels.")
    ] = "black",
    setting: opt.Settings = None, out: opt.Out = Path("whyformer-out"), format: Figures = "png",
    device: opt.Device = None, dtype: opt.Dtype = None, quiet: opt.Quiet = False, as_json: opt.AsJson = False,
    debug: opt.Debug = False,
) -> None:  # fmt: skip
    """Remove 10 to 90 % of a picture, highest scores first and lowest first, and show what the model then says."""
    from whyformer.inputs.argument import read_argument

    with errors_as_sentences(debug):
        formats = _formats(format)
        asked = read_argument(source)
        if asked.kind != "image":
            raise InputError("perturb shows a picture with parts removed, and this is a text")
        ((one, given), *others) = opt.chosen_methods(method, setting, asked.kind)
        if others:
            raise InputError("perturb takes one method")
        with Working(quiet) as working:
            work = Work(asked, model, device, dtype, False, working)
            results, refusals = work.explain([(one, given)], [target])
            if refusals:
                raise refusals[0].error
            e = results[0]
            with working.step("removing pixels"):
                from whyformer import show
                from whyformer.evaluate.strip import perturbation_strip

                made = perturbation_strip(work.loaded.model, asked.content, e, work.loaded.processor, baseline=baseline)
                drawing = show.strip(made)
        orders = ("highest_first", "lowest_first")
        shares = dict(zip(orders, made.probabilities.tolist(), strict=True))
        said = dict(zip(orders, made.predicted, strict=True))
        facts = {"method": one.name, "settings": e.settings, "target": made.target, "baseline": baseline}
        lines = [f"probability of {made.target}, baseline {baseline}", "removed   highest first   lowest first"]
        lines += [f"{f:7.0%}   {a:13.1%}   {b:12.1%}" for f, a, b in zip(made.fractions, *shares.values(), strict=True)]
        _deliver("perturb", drawing, (asked.name, one.name, made.target, "removed"), formats, out, quiet, as_json,
                 {"model": work.loaded.name, "input": asked.title, **facts, "fractions": list(made.fractions),
                  "probabilities": shares, "predicted": said}, "\n".join(lines))  # fmt: skip


def _formats(given: str) -> list[str]:
    wanted = opt.chosen_formats(given, "")
    for one in wanted:
        if one not in _FIGURES:
            raise InputError(f"this is a figure: it is written as {', '.join(_FIGURES)}, not {one}")
    return wanted


def _deliver(
    command: str, drawing: Figure, name: tuple[str, ...], formats: list[str], out: Path, quiet: bool, as_json: bool,
    facts: dict[str, Any], said: str,
) -> None:  # fmt: skip
    from whyformer.show import encode, files, words

    stem = files.slug(*name)
    contents = {f"{stem}.{kind}": encode(drawing, kind) for kind in formats}
    written = [str(path) for path in files.write_all(out, contents)] if contents else []
    if as_json:
        typer.echo(json.dumps(record(command, **facts, files=written)))
    elif not quiet:
        console().print(words.visible(said, keep="\n"), markup=False)
        for path in written:
            console().print(f"wrote {words.visible(path)}", markup=False, soft_wrap=True)

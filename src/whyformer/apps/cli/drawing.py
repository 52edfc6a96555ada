"""``whyformer attention`` and ``perturb``: pictures that are no explanation of a class on their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from whyformer.apps.cli import options as opt
from whyformer.apps.cli.explaining import Work
from whyformer.apps.cli.telling import tell, working
from whyformer.defaults import DEFAULT_METHOD
from whyformer.errors import InputError
from whyformer.explanation.versions import record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from whyformer.attention import AttentionMaps

_FIGURES = ("png", "svg", "pdf")


@dataclass(kw_only=True)
class AttentionOptions(opt.InputOptions, opt.Drawing):
    block: int | None = None
    heads: bool = False
    matrix: bool = False
    head: str = "mean"
    gradient: bool = False
    target: str | None = None
    format: str = "png"


def attention(asked: AttentionOptions) -> None:
    """Draw the attention maps inside a model: each block, each head, or the matrix of tokens."""
    from whyformer.inputs.argument import read_argument

    formats, look = opt.chosen_formats(asked.format, (*_FIGURES, "html")), asked.look()
    head = int(asked.head) if asked.head.lstrip("-").isdecimal() else asked.head
    if isinstance(head, str) and head not in ("mean", "max", "min"):
        raise InputError(f"--head takes a number, or mean, max or min over the heads, not '{head}'")
    if asked.target is not None and not asked.gradient:
        raise InputError("attention itself belongs to no class; --gradient weights it by the gradient of one")
    given = read_argument(asked.source)
    if "html" in formats and given.kind == "image":
        raise InputError("the page of heads is for text; of a picture --heads draws one map a head")
    with working(asked) as bars:
        work = Work(asked, given, bars)
        with bars.step("attention"):
            from whyformer.show import files, heads

            maps = work.explainer.attention_maps(given.content, target=asked.target, gradient=asked.gradient)
            contents = {}
            if "html" in formats:
                formats.remove("html")
                name = files.slug(given.name[:40], "attention", "heads")
                contents[f"{name}.html"] = heads(maps, title=given.title).encode()
            which, drawing = _drawn(maps, asked, head, look) if formats or not contents else ("heads", None)
    facts = record("attention", model=work.loaded.name, input=given.title, blocks=maps.blocks, heads=maps.heads,
                   drawn=which)  # fmt: skip
    if drawing is not None:
        contents |= _encoded(formats, drawing, given.name, "attention", *which.split())
    tell(asked, facts, which, files.write_all(asked.out, contents))


def _drawn(maps: AttentionMaps, asked: AttentionOptions, head: int | str, look: dict[str, Any]) -> tuple[str, Figure]:
    """(what is drawn, in words; the figure)."""
    from whyformer import show

    block = asked.block
    if asked.matrix:
        block = -1 if block is None else block
        weights = maps.matrix(block, head)
        named = f"block {block % maps.blocks} head {head} matrix"
        names = None if maps.tokens is None else maps.tokens[0]
        return named, show.matrix(weights, names, title=named, cmap=look.get("cmap"))
    if asked.heads:
        several = maps.each_head(block)
        named = "heads" if block is None else f"block {several[0].settings['block']} heads"
        return named, show.panels(several, maps.heads if block is None else None, **look)
    if block is not None:
        single = maps.explanation(block, head)
        return f"block {single.settings['block']} head {head}", show.figure(single, **look)
    return "blocks", show.panels(maps.each_block(head), **look)


@dataclass(kw_only=True)
class Perturb(opt.InputOptions):
    method: str = DEFAULT_METHOD
    target: str | None = None
    baseline: str = "black"
    setting: list[str] | None = None
    format: str = "png"


def perturb(asked: Perturb) -> None:
    """Remove 10 to 90 % of a picture, highest scores first and lowest first, and show what the model then says."""
    from whyformer.inputs.argument import read_argument

    formats = opt.chosen_formats(asked.format, _FIGURES)
    given = read_argument(asked.source)
    if given.kind != "image":
        raise InputError("perturb shows a picture with parts removed, and this is a text")
    chosen = opt.chosen_method(asked.method, asked.setting, given.kind)
    with working(asked) as bars:
        work = Work(asked, given, bars)
        results, refusals = work.explain([chosen], [asked.target])
        if refusals:
            raise refusals[0].error
        with bars.step("removing pixels"):
            from whyformer import show
            from whyformer.evaluation.strip import perturbation_strip

            model, processor = work.loaded.model, work.loaded.processor
            made = perturbation_strip(model, given.content, results[0], processor, baseline=asked.baseline)
            drawing = show.strip(made)
    orders = ("highest_first", "lowest_first")
    shares = dict(zip(orders, made.probabilities.tolist(), strict=True))
    said, form = ("value", ".4g") if made.numeric else ("probability", ".1%")
    facts = record(
        "perturb", model=work.loaded.name, input=given.title, method=made.method, settings=results[0].settings,
        target=made.target, baseline=asked.baseline, fractions=list(made.fractions),
        probabilities=None if made.numeric else shares, values=shares if made.numeric else None,
        predicted=dict(zip(orders, made.predicted, strict=True)),
    )  # fmt: skip
    lines = [f"{said} of {made.target}, baseline {asked.baseline}", "removed   highest first   lowest first"]
    rows = zip(made.fractions, *shares.values(), strict=True)
    lines += [f"{f:7.0%}   {a:>13{form}}   {b:>12{form}}" for f, a, b in rows]
    from whyformer.show.files import write_all

    contents = _encoded(formats, drawing, given.name, made.method, made.target, "removed")
    tell(asked, facts, "\n".join(lines), write_all(asked.out, contents))


def _encoded(formats: list[str], drawing: Figure, *name: str) -> dict[str, bytes]:
    from whyformer.show import encode, files

    return {f"{files.slug(*name)}.{kind}": encode(drawing, kind) for kind in formats}

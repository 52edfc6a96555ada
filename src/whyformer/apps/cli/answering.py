"""``whyformer explain --generate`` and ``--continuation``: every token of an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from whyformer.apps.cli import options as opt
from whyformer.apps.cli.telling import tell, working
from whyformer.defaults import DEFAULT_METHOD
from whyformer.errors import InputError

if TYPE_CHECKING:
    from whyformer.explanation.generation import Generation

_FORMATS = ("html", "png", "svg", "pdf", "json", "safetensors")


def wanted(asked: Any) -> bool:
    """Whether an answer is to be explained."""
    return asked.generate is not None or asked.continuation is not None or asked.chat


def answer(asked: Any) -> None:
    """Explain every token of the answer to a prompt."""
    from whyformer.inputs.argument import read_argument

    formats = opt.chosen_formats("html" if asked.format is None else asked.format, _FORMATS)
    targets = asked.target or [None] if asked.contrast is None else rather(asked.target, asked.contrast)
    if len(targets) > 1 or asked.check or asked.more:
        raise InputError("an answer is explained for one prompt and one target, without --check")
    methods = opt.chosen_methods(asked.method or DEFAULT_METHOD, asked.setting, "text")
    if len(methods) > 1:
        raise InputError("an answer is explained by one method: name one")
    if asked.model is None:
        raise InputError("an answer needs a language model: --model ID|FOLDER")
    given = read_argument(asked.source)
    if given.kind != "text":
        raise InputError("an answer is to a text: give the prompt as a sentence, a .txt file or -")
    ((method, settings),) = methods
    with working(asked) as bars:
        with bars.step(f"loading {asked.model}"):
            from whyformer.explainer import Explainer

            explainer = Explainer(asked.model, **asked.options.named)
        prompt = [{"role": "user", "content": given.content}] if asked.chat else given.content
        with bars.step("writing and explaining"):
            made: Any = explainer.explain_generation(
                prompt, asked.continuation, method.name,
                max_new_tokens=32 if asked.generate is None else asked.generate,
                target=targets[0], progress=bars.track, **settings,
            )  # fmt: skip
    _show(asked, made, given.name, given.title, formats)


def rather(targets: list[str] | None, other: str) -> list[Any]:
    """Each of the targets rather than another."""
    if not targets:
        raise InputError("--contrast says what the target is compared with: give --target too")
    from whyformer.targets import Contrast

    return [Contrast(target, other) for target in targets]


def _show(asked: Any, g: Generation, name: str, title: str, formats: list[str]) -> None:
    """The files, and what is printed."""
    import json

    from whyformer.explanation import kept
    from whyformer.show import files, grid, paper, speaking
    from whyformer.show.html.answer import page
    from whyformer.show.words import made_by

    facts = files.record_of("explain", [], g.model or "", title)
    facts["generation"] = g.to_dict()
    stem, contents = files.slug(name[:40], made_by(g[0]), "answer"), dict[str, bytes]()
    for kind in formats:
        if kind == "html":
            contents[f"{stem}.html"] = page(g, title).encode()
        elif kind == "json":
            contents[f"{stem}.json"] = (json.dumps(facts) + "\n").encode()
        elif kind == "safetensors":
            contents[f"{stem}.{kind}"] = kept.content(g)
        else:
            contents[f"{stem}.{kind}"] = paper.encode(grid.figure(g), kind)
    tell(asked, facts, speaking.render(g), files.write_all(asked.out, contents))

"""``whyformer generate``: every token of a language model's answer, explained."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whyformer.apps import model_for
from whyformer.apps.cli import options as opt
from whyformer.apps.cli.telling import tell, working
from whyformer.defaults import DEFAULT_METHOD
from whyformer.errors import InputError
from whyformer.options import DEFAULTS, Options

if TYPE_CHECKING:
    from whyformer.explanation.generation import Generation

_FORMATS = ("png", "svg", "pdf", "html", "json", "safetensors")


@dataclass(kw_only=True)
class Generate(opt.Drawing):
    source: str
    model: str | None = None
    max_new_tokens: int = 32
    continuation: str | None = None
    chat: bool = False
    image: list[Path] | None = None
    method: str = DEFAULT_METHOD
    target: str | None = None
    contrast: str | None = None
    setting: list[str] | None = None
    format: str | None = None
    out: Path = Path("whyformer-out")
    options: Options = DEFAULTS


def generate(asked: Generate) -> None:
    """Let a language model answer, and explain each token of the answer.

    A prompt becomes an HTML page, a prompt with pictures a PNG with the map of each word, unless --format is given.
    """
    from whyformer.inputs.argument import read_argument

    look = asked.look()
    formats = opt.chosen_formats(asked.format or ("png" if asked.image else "html"), _FORMATS)
    method, settings = opt.chosen_method(asked.method, asked.setting, "text")
    target = asked.target if asked.contrast is None else opt.rather(asked.target, asked.contrast)
    given = read_argument(asked.source)
    if given.kind != "text":
        raise InputError("the prompt is a text: give a sentence, a .txt file or -, and pictures with --image")
    if asked.image and asked.chat:
        raise InputError("leave --chat out: a prompt with a picture is written down as the model's processor does it")
    if asked.model is None and not asked.image:
        raise InputError("an answer needs a language model: --model ID|FOLDER")
    name = model_for("both" if asked.image else "text", asked.model)
    with working(asked) as bars:
        with bars.step(f"loading {name}"):
            from whyformer.explainer import Explainer
            from whyformer.inputs.pictures import open_picture
            from whyformer.models import load

            loaded = load(name, device=asked.options.device, dtype=asked.options.dtype)
        if asked.image and loaded.modality != "both":
            raise InputError(f"{loaded.name} reads no pictures: choose another --model, or leave --image out")
        made: Any = Explainer(loaded, **asked.options.named).explain_generation(
            [{"role": "user", "content": given.content}] if asked.chat else given.content,
            asked.continuation,
            method.name,
            images=[open_picture(path) for path in asked.image] if asked.image else None,
            max_new_tokens=asked.max_new_tokens,
            target=target,
            progress=bars.track,
            **settings,
        )
    from whyformer.show import speaking
    from whyformer.show.files import record_of, slug, write_all
    from whyformer.show.words import made_by

    facts = record_of("generate", [], made.model or name, given.title) | {"generation": made.to_dict()}
    stem = slug(given.name[:40], made_by(made[0]), "generated")
    contents = {f"{stem}.{kind}": _content(made, kind, given.title, facts, look) for kind in formats}
    tell(asked, facts, speaking.render(made), write_all(asked.out, contents))


def _content(g: Generation, kind: str, title: str, facts: dict[str, Any], look: dict[str, Any]) -> bytes:
    """An answer as a file: as a figure, the map of each word over the picture, or the matrix of tokens."""
    from whyformer.explanation import kept
    from whyformer.show import encode, film, grid
    from whyformer.show.html.answer import page

    if kind == "html":
        return page(g, title).encode()
    if kind == "json":
        return (json.dumps(facts) + "\n").encode()
    if kind == "safetensors":
        return kept.content(g)
    return encode(film(g, **look) if g.seen else grid.figure(g), kind)

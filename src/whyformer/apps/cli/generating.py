"""``whyformer explain PROMPT --image PICTURE --generate N``: why each word of an answer about a picture was written."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from whyformer.apps import model_for
from whyformer.apps.cli import options as opt
from whyformer.apps.cli.answering import rather
from whyformer.apps.cli.telling import tell, working
from whyformer.defaults import DEFAULT_METHOD
from whyformer.errors import InputError

if TYPE_CHECKING:
    from whyformer.apps.cli.explaining import Explain

_FORMATS = ("png", "svg", "pdf", "html", "json", "safetensors")


def generate(asked: Explain) -> None:
    """Explain each word of what the model answers: printed, and as a film strip."""
    from whyformer.inputs.argument import read_argument

    look = asked.look()
    given = read_argument(asked.source)
    if given.kind != "text":
        raise InputError("the prompt is a text; its picture is given with --image")
    if asked.check or asked.more or len(asked.target or ()) > 1:
        raise InputError("--check, several inputs and several targets are for one prediction, not for an answer")
    if asked.chat:
        raise InputError("leave --chat out: a prompt with a picture is written down as the model's processor does it")
    formats = opt.chosen_formats("png" if asked.format is None else asked.format, _FORMATS)
    methods = opt.chosen_methods(asked.method or DEFAULT_METHOD, asked.setting, "text")
    if len(methods) != 1:
        raise InputError("one method at a time explains a text that is generated")
    ((method, settings),) = methods
    targets: list[Any] = asked.target or [None] if asked.contrast is None else rather(asked.target, asked.contrast)
    name = model_for("both", asked.model)
    with working(asked) as bars:
        with bars.step(f"loading {name}"):
            from whyformer.explainer import Explainer
            from whyformer.inputs.pictures import open_picture
            from whyformer.models import load

            loaded = load(name, device=asked.options.device, dtype=asked.options.dtype)
        if loaded.modality != "both":
            raise InputError(f"{loaded.name} reads no pictures: choose another --model, or leave --image out")
        g = Explainer(loaded, **asked.options.named).explain_generation(
            given.content, asked.continuation, method.name,
            images=[open_picture(p) for p in asked.image or ()],
            max_new_tokens=asked.generate or 32, target=targets[0],
            progress=bars.track, **settings,
        )  # fmt: skip
    assert not isinstance(g, list)
    from whyformer.explanation import kept
    from whyformer.show import encode, film, speaking
    from whyformer.show.files import record_of, slug, write_all
    from whyformer.show.html.answer import page
    from whyformer.show.words import made_by

    facts = record_of("explain", [], loaded.name, given.title)
    facts["generation"] = g.to_dict()
    stem = slug(given.name[:40], made_by(g[0]), "generated")
    contents = {f"{stem}.json": json.dumps(facts).encode()} if "json" in formats else {}
    if "html" in formats:
        contents[f"{stem}.html"] = page(g, given.title).encode()
    if "safetensors" in formats:
        contents[f"{stem}.safetensors"] = kept.content(g)
    drawn = [kind for kind in formats if kind not in ("html", "json", "safetensors")]
    if drawn:
        strip = film(g, **look)
        contents |= {f"{stem}.{kind}": encode(strip, kind) for kind in drawn}
    tell(asked, facts, speaking.render(g), write_all(asked.out, contents))

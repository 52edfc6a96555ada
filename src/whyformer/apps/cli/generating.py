"""``whyformer explain PROMPT --generate N``: why each word of an answer was written, also about a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whyformer.apps import DEFAULT_MODEL
from whyformer.apps.cli import options as opt
from whyformer.apps.cli.telling import tell, working
from whyformer.errors import InputError

if TYPE_CHECKING:
    from whyformer.apps.cli.explaining import Explain

METHOD = "attnlrp"
_FORMATS = ("png", "svg", "pdf", "json")


def generate(asked: Explain) -> None:
    """Explain each word of what the model answers: printed, and as a film strip where the prompt has a picture."""
    from whyformer.inputs.argument import read_argument
    from whyformer.methods import find

    look = asked.look()
    given = read_argument(asked.source)
    if given.kind != "text":
        raise InputError("the prompt is a text; its picture is given with --image")
    if asked.check or len(asked.target or ()) > 1:
        raise InputError("--check and several targets are for one prediction, not for a text that is generated")
    seeing = asked.image is not None
    formats = opt.chosen_formats(("png" if seeing else "none") if asked.format is None else asked.format, _FORMATS)
    if not seeing and set(formats) - {"json"}:
        raise InputError("without a picture there is no film strip: use --format json, or none")
    names = [n.strip() for n in (asked.method or METHOD).split(",") if n.strip()]
    if len(names) != 1:
        raise InputError("one method at a time explains a text that is generated")
    settings = dict(map(opt.pair, asked.setting or []))
    find(names[0]).complete(settings)
    name = asked.model or (DEFAULT_MODEL["both"] if seeing else None)
    if name is None:
        raise InputError("name the model that answers: --model ID, or a folder")
    with working(asked) as bars:
        with bars.step(f"loading {name}"):
            from whyformer.generation import explain_generation
            from whyformer.models import load

            loaded = load(name, device=asked.device, dtype=asked.dtype)
        if seeing and loaded.modality != "both":
            raise InputError(f"{loaded.name} reads no pictures: choose another --model, or leave --image out")
        g = explain_generation(
            loaded.model, given.content, asked.continuation, names[0], loaded.processor,
            images=None if asked.image is None else [_existing(p) for p in asked.image],
            max_new_tokens=asked.generate or 32, target=None if asked.target is None else asked.target[0],
            progress=bars.track, verify=asked.verify or 0, **settings,
        )  # fmt: skip
    assert not isinstance(g, list)
    from whyformer.explanation.versions import record, versions
    from whyformer.show import encode, film, generated
    from whyformer.show.files import slug, write_all

    facts = record(
        "explain", versions=versions(), model=loaded.name, input=given.title, explanations=[], generation=g.to_dict()
    )  # fmt: skip
    stem = slug(given.name[:40], g.method, "generated")
    contents = {f"{stem}.json": json.dumps(facts).encode()} if "json" in formats else {}
    drawn = [kind for kind in formats if kind != "json"]
    if drawn:
        strip = film(g, **look)
        contents |= {f"{stem}.{kind}": encode(strip, kind) for kind in drawn}
    tell(asked, facts, generated(g), write_all(asked.out, contents))


def _existing(path: Path) -> Any:
    from whyformer.inputs.pictures import open_picture

    return open_picture(path)

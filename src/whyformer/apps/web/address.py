"""The view in the fragment of the page's address, for reloads and bookmarks. Browsers send it to no server."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode

from whyformer.apps.web.examples import START_MODEL
from whyformer.apps.web.limits import uploaded
from whyformer.apps.web.page_input import FLAGS, KINDS
from whyformer.errors import InputError
from whyformer.show.look import OPACITY


def written(asked: Any, settings: dict[str, dict[str, Any]], uploads: Path) -> str:
    """Return the fragment for an input (:class:`~whyformer.apps.web.page_input.PageInput`).

    Args:
        asked: the input; a picture is named by its path inside the uploads.
        settings: method -> settings that differ from the defaults.
        uploads: the folder of uploads.
    """
    facts: dict[str, Any] = {"kind": asked.kind}
    if asked.picture is not None and asked.kind != "text":
        facts["picture"] = Path(asked.picture).resolve().relative_to(uploads.resolve()).as_posix()
    if asked.kind == "answer":
        facts |= {"sentence": asked.sentence, "length": asked.length} | ({"chat": 1} if asked.chat else {})
    elif asked.kind == "image":
        facts |= {"style": "kept" if "keep" in asked.look else "contours" if "contours" in asked.look else "colours"}
        facts |= {name: asked.look[name] for name in ("opacity", "keep") if name in asked.look}
    else:
        facts |= {"sentence": asked.sentence} | ({"pair": asked.pair} if asked.pair else {})
    facts |= {name: 1 for name in FLAGS if getattr(asked.options, name)}
    facts |= {"model": asked.model, "methods": ",".join(asked.methods), "classes": ",".join(asked.classes)}
    changed = {method: values for method, values in settings.items() if values}
    return urlencode(facts | ({"settings": json.dumps(changed)} if changed else {}))


def read(fragment: Any, uploads: Path) -> dict[str, Any] | None:
    """Return the values of controls (:data:`~whyformer.apps.web.page_input.CONTROLS`) that an address names, or None.

    Raises:
        InputError: the picture is no longer among the uploads.
    """
    if not isinstance(fragment, str):
        return None
    facts = {key: values[-1] for key, values in parse_qs(fragment.removeprefix("#")).items()}
    kind = facts.get("kind")
    if kind not in KINDS:
        return None
    picture = None
    if kind == "image" or (kind == "answer" and facts.get("picture")):
        try:
            picture = {"path": str(uploaded(uploads / facts.get("picture", ""), uploads))}
        except InputError as error:
            raise InputError("the picture of that view is no longer here: drop it again") from error
    names, classes = ([name for name in facts.get(key, "").split(",") if name] for key in ("methods", "classes"))
    style = facts.get("style") if facts.get("style") in ("contours", "kept") else "colours"
    return {
        "kind": kind, "picture": picture, "sentence": facts.get("sentence", ""), "pair": facts.get("pair", ""),
        "model": facts.get("model", START_MODEL[kind]), "methods": names, "classes": classes,
        **{name: name in facts for name in FLAGS}, "style": style, "opacity": _share(facts.get("opacity"), OPACITY),
        "keep": _share(facts.get("keep"), 0.2), "length": _number(facts.get("length"), 16), "chat": "chat" in facts,
        "number": 0, "settings": facts.get("settings", "{}"),
    }  # fmt: skip


def _number(text: str | None, default: int) -> int:
    return int(text) if text is not None and text.isdecimal() and len(text) < 6 else default


def _share(text: str | None, default: float) -> float:
    with suppress(ValueError):
        return min(1.0, max(0.0, float(text or "")))
    return default

"""The view in the fragment of the page's address, for reloads and bookmarks. Browsers send it to no server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode

from whyformer.apps.web.examples import START_MODEL
from whyformer.apps.web.limits import uploaded
from whyformer.apps.web.page_input import CONTROLS, FIELDS, OPTIONS, PageInput
from whyformer.apps.web.visitor_session import View
from whyformer.errors import InputError

_DRAWING = ("style", "opacity", "keep")


def fragment(view: View, uploads: Path) -> str:
    """Return the fragment for a view, with the controls that differ from the defaults; a picture is named by its path
    inside the folder of uploads."""
    page_input = view.page_input
    names = {*FIELDS[page_input.kind], *(_DRAWING if page_input.kind == "image" else ()), *OPTIONS} - {"classes"}
    values, defaults = page_input.controls, PageInput(page_input.kind).controls
    facts = {name: values[name] for name in CONTROLS if name in names and values[name] != defaults[name]}
    facts |= {name: 1 for name, value in facts.items() if value is True}
    if "picture" in facts:
        facts["picture"] = Path(facts["picture"]).resolve().relative_to(uploads.resolve()).as_posix()
    lists = {name: ",".join(values[name]) for name in ("methods", "classes")}
    changed = {method: settings for method, settings in view.methods if settings}
    facts = {"kind": page_input.kind, **facts, "model": page_input.model, **lists}
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
    if kind not in FIELDS:
        return None
    picture = facts.pop("picture", "")
    values = PageInput(kind, model=START_MODEL[kind]).controls
    values |= {name: _read(facts[name], default) for name, default in values.items() if name in facts}
    if kind == "image" or (kind == "answer" and picture):
        try:
            values["picture"] = {"path": str(uploaded(uploads / picture, uploads))}
        except InputError as error:
            raise InputError("the picture of that view is no longer here: drop it again") from error
    return values | {"number": 0}


def _read(text: str, default: Any) -> Any:
    """Return the value of a control with this default; the default if the text is not a value of its type."""
    if isinstance(default, bool):
        return True
    if isinstance(default, list):
        return [name for name in text.split(",") if name]
    try:
        return type(default)(text) if isinstance(default, int | float) else text
    except ValueError:
        return default

"""The form of the methods' settings. Defaults, choices and bounds come from the registry."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from whyformer.apps.web.page_input import PageInput
from whyformer.errors import InputError, WhyformerError
from whyformer.methods import Method, find
from whyformer.methods.maps.aggregation import AGGREGATION, HEADS, LAYERS, ROWS
from whyformer.methods.registry import BLOCK, OPTIONAL_BLOCK, Bounds, OneOf
from whyformer.models import Loaded
from whyformer.models.structure import find_blocks
from whyformer.show.html import render

Settings = Mapping[str, Mapping[str, Any]]


def form(methods: Sequence[str], values: Settings, blocks: int) -> str:
    """Return the form as HTML, with a group of fields for each method.

    Args:
        methods: names of methods.
        values: method -> settings that were changed.
        blocks: number of the model's blocks; 0 if unknown.
    """
    groups = []
    for name in methods:
        method, changed = find(name), dict(values.get(name, {}))
        fields = [_field(method, key, changed.get(key, default), blocks) for key, default in method.settings.items()]
        groups.append((method, fields, bool(changed)))
    return render("web/form.html", groups=groups)


def _field(method: Method, key: str, value: Any, blocks: int) -> dict[str, Any]:
    """Return the kind of field and its values for the template."""
    check, default = method.checks.get(key), method.settings[key]
    named = {"key": key, "name": key.replace("_", " "), "hint": check[0] if check else "", "value": value}
    if check is AGGREGATION:
        selected = value if isinstance(value, Mapping) else {}
        parts = {"heads": HEADS, "layers": LAYERS, "rows": ROWS}
        choices = {part: _choices([None, *valid], selected.get(part), "as published") for part, valid in parts.items()}
        return {**named, "kind": "parts", "parts": choices}
    if isinstance(default, bool):
        return {**named, "kind": "flag"}
    at = value % blocks if blocks and isinstance(value, int) else None
    if check is BLOCK and blocks:
        return {**named, "kind": "block", "last": blocks - 1, "value": at or 0}
    if check is OPTIONAL_BLOCK and blocks:
        return {**named, "kind": "choice", "choices": _choices([None, *range(blocks)], at)}
    if check is not None and isinstance(check[1], OneOf):
        return {**named, "kind": "choice", "choices": _choices(check[1].values, value)}
    if isinstance(default, int | float):
        bounds = check[1] if check is not None and isinstance(check[1], Bounds) else None
        low, high = (None, None) if bounds is None else (bounds.low, bounds.high)
        step = "1" if isinstance(default, int) else "any"
        return {**named, "kind": "number", "low": low, "high": high, "step": step, "value": repr(value)}
    return {**named, "kind": "text", "value": "" if value is None else json.dumps(value)}


def _choices(values: Sequence[Any], selected: Any, first: str = "none") -> list[tuple[str, str, bool]]:
    """Return (value as JSON, name, True if selected) of each choice."""
    names = [first if v is None else str(v).replace("_", " ") for v in values]
    same = [v == selected and type(v) is type(selected) for v in values]
    return list(zip(map(json.dumps, values), names, same, strict=True))


def blocks_of(loaded: Loaded | None) -> int:
    """Return the number of a model's blocks, or 0 if unknown; then their indices are typed."""
    with suppress(WhyformerError):
        return 0 if loaded is None else len(find_blocks(loaded.model))
    return 0


def read_form(raw: Any) -> dict[str, dict[str, Any]]:
    """Read {method: settings} from a JSON object or its text."""
    try:
        settings = json.loads(raw) if isinstance(raw, str) and raw.strip() else raw or {}
    except ValueError as error:
        raise InputError("the settings are not JSON") from error
    if not isinstance(settings, dict) or not all(isinstance(v, dict) for v in settings.values()):
        raise InputError('settings are an object for each method, such as {"rollout": {"start_layer": 1}}')
    return settings


def methods_of(page_input: PageInput, blocks: int) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Return (name, settings that differ from the defaults) of each chosen method, checked."""
    settings = read_form(page_input.settings)
    names = dict.fromkeys(find(name).name for name in page_input.methods)
    return tuple((name, changed(name, settings.get(name, {}), blocks)) for name in names)


def changed(name: str, values: Mapping[str, Any], blocks: int) -> dict[str, Any]:
    """Return the settings that differ from the method's defaults, checked. Block -1 of four equals block 3."""
    method = find(name)
    full = method.complete(dict(values))
    different = {}
    for key, value in full.items():
        default = method.settings[key]
        if method.checks.get(key) in (BLOCK, OPTIONAL_BLOCK) and blocks and isinstance(value, int):
            inside = -blocks <= value < blocks  # the method refuses an index outside the model
            same = isinstance(default, int) and inside and value % blocks == default % blocks
        else:
            same = value == default and isinstance(value, bool) == isinstance(default, bool)
        if not same:
            different[key] = value
    return different

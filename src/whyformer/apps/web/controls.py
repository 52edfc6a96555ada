"""The settings of methods as a form, made from the registry alone: defaults, choices and bounds are read off it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from whyformer.errors import InputError
from whyformer.methods import Method, find
from whyformer.methods.maps.aggregation import AGGREGATION, HEADS, LAYERS, ROWS
from whyformer.methods.registry import BLOCK, OPTIONAL_BLOCK, AtLeast, OneOf
from whyformer.show.html import text

Given = Mapping[str, Mapping[str, Any]]


def form(methods: Sequence[str], given: Given, blocks: int) -> str:
    """One group a method; ``given`` are settings chosen before, ``blocks`` the number of the model's blocks (or 0)."""
    groups = [_group(find(name), dict(given.get(name, {})), blocks) for name in methods]
    return f'<div class="wf-form">{"".join(groups)}</div>' if groups else '<p class="wf-note">Choose a method.</p>'


def _group(method: Method, given: dict[str, Any], blocks: int) -> str:
    fields = [_field(method, key, given.get(key, default), blocks) for key, default in method.settings.items()]
    body = f'<div class="wf-fields">{"".join(fields)}</div>' if fields else '<p class="wf-note">It has no settings.</p>'
    changed = " open" if given else ""
    head = f"<summary><b>{text(method.name)}</b></summary>"
    return f'<details{changed}>{head}<p class="wf-note">{text(method.summary)}</p>{body}</details>'


def _field(method: Method, key: str, value: Any, blocks: int) -> str:
    check = method.checks.get(key)
    default = method.settings[key]
    what = f'data-method="{text(method.name)}" data-key="{text(key)}"'
    name = f"<span>{text(key.replace('_', ' '))}</span>"
    hint = f"<small>{text(check[0] if check else '')}</small>"
    if check is AGGREGATION:
        return _aggregation(what, value)
    if isinstance(default, bool):
        return f'<label class="wf-flag"><input type="checkbox" {what}{" checked" if value else ""}>{name}</label>'
    if check is BLOCK and blocks:
        at = value % blocks if isinstance(value, int) else 0
        shown = f"<output>{at}</output>"
        slider = f'<input type="range" min="0" max="{blocks - 1}" step="1" value="{at}" {what}>'
        return f"<label>{name}{slider}{shown}<small>blocks count from 0 at the input</small></label>"
    if check is OPTIONAL_BLOCK and blocks:
        one = value % blocks if isinstance(value, int) else None
        return f"<label>{name}{_select(what, [None, *range(blocks)], one)}</label>"
    if check is not None and isinstance(check[1], OneOf):
        return f"<label>{name}{_select(what, check[1].values, value)}</label>"
    if isinstance(default, int | float):
        low = f' min="{check[1].low:g}"' if check is not None and isinstance(check[1], AtLeast) else ""
        step = "1" if isinstance(default, int) else "any"
        return f'<label>{name}<input type="number" step="{step}"{low} value="{text(repr(value))}" {what}>{hint}</label>'
    shown = "" if value is None else json.dumps(value)
    return f'<label>{name}<input type="text" value="{text(shown)}" placeholder="none" {what} data-json>{hint}</label>'


def _select(what: str, values: Sequence[Any], chosen: Any, first: str = "none") -> str:
    """Values travel as JSON, so that None, 0 and "0" stay apart."""
    options = [
        f'<option value="{text(json.dumps(v))}"{" selected" if v == chosen and type(v) is type(chosen) else ""}>'
        f"{text(first if v is None else str(v).replace('_', ' '))}</option>"
        for v in values
    ]
    return f"<select {what}>{''.join(options)}</select>"


def _aggregation(what: str, value: Any) -> str:
    given = value if isinstance(value, Mapping) else {}
    parts = []
    for part, choices in (("heads", HEADS), ("layers", LAYERS), ("rows", ROWS)):
        own = f'{what} data-part="{part}"'
        choice = _select(own, [None, *choices], given.get(part), "as published")
        parts.append(f"<label><span>{part}</span>{choice}</label>")
    return f'<fieldset><legend>aggregation</legend><div class="wf-fields">{"".join(parts)}</div></fieldset>'


def read_form(raw: Any) -> dict[str, dict[str, Any]]:
    """Method -> settings, from what a browser (or a client) sent: a JSON object, or its text."""
    try:
        given = json.loads(raw) if isinstance(raw, str) and raw.strip() else raw or {}
    except ValueError as error:
        raise InputError("the settings are not JSON") from error
    if not isinstance(given, dict) or not all(isinstance(v, dict) for v in given.values()):
        raise InputError('settings are an object for each method, such as {"rollout": {"start_layer": 1}}')
    return given


def changed(name: str, given: Mapping[str, Any], blocks: int) -> dict[str, Any]:
    """The settings that differ from the method's defaults, checked; the block −1 of four is 3."""
    method = find(name)
    full = method.complete(dict(given))
    found = {}
    for key, value in full.items():
        default = method.settings[key]
        if method.checks.get(key) in (BLOCK, OPTIONAL_BLOCK) and blocks and isinstance(value, int):
            inside = -blocks <= value < blocks  # a number outside the model is the method's to refuse
            same = isinstance(default, int) and inside and value % blocks == default % blocks
        else:
            same = value == default and isinstance(value, bool) == isinstance(default, bool)
        if not same:
            found[key] = value
    return found

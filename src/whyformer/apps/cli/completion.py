"""Completion of names of methods, settings, formats, models and benchmarks in the shell.

Functions return what may be typed, with descriptions; Typer offers what begins as typed. The registries need torch,
which takes seconds to import, so ``names.json`` holds their names; ``scripts/names`` writes it, and a test compares it
with the registries.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer

from whyformer.defaults import COMPARED, DEFAULT_METHOD

Offers = Iterable[tuple[str, str]]


@functools.cache
def names_file() -> dict[str, Any]:
    """The content of ``names.json``: {"bundled": [name], "methods": {name: {"summary", "facts": the JSON of
    ``whyformer methods``, "signed": whether its scores have a sign, "settings"}}, "benchmarks": {name: {"summary",
    "settings"}}}; settings map a name to the values worth offering, the default first."""
    names: dict[str, Any] = json.loads(Path(__file__).with_name("names.json").read_text(encoding="utf-8"))
    return names


def named(kind: str) -> Offers:
    """Return all "methods" or "benchmarks"."""
    return [(name, facts["summary"]) for name, facts in names_file()[kind].items()]


def models() -> Offers:
    """Return the bundled models."""
    return [(f"bundled:{name}", "comes with whyformer") for name in names_file()["bundled"]]


def benchmarks() -> Offers:
    """Return the benchmarks."""
    return named("benchmarks")


def settings_of(kind: str, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield ``key=value`` for each value of a setting that needs no quotes, else ``key=``; skip unknown names."""
    offered: dict[str, list[Any]] = {}
    for name in names:
        offered |= names_file()[kind].get(name.strip(), {}).get("settings", {})
    for key, values in offered.items():
        for i, value in enumerate(values):
            text = value if isinstance(value, str) else json.dumps(value)
            yield f"{key}={'' if any(c.isspace() for c in text) else text}", "default" if i == 0 else ""


def settings(context: typer.Context) -> Offers:
    """Return the settings of the methods on the command line."""
    typed = context.params.get("method")
    names = typed.split(",") if typed else COMPARED if context.info_name == "compare" else [DEFAULT_METHOD]
    return settings_of("methods", names)


# -- lists with commas -----------------------------------------------------------------------------------------------
def last(incomplete: str, offers: Offers) -> Offers:
    """Return offers for the last entry of a list, except entries that the list has."""
    before, comma, _ = incomplete.rpartition(",")
    earlier = before.split(",")
    return [(f"{before}{comma}{name}", about) for name, about in offers if name not in earlier]


def methods(incomplete: str) -> Offers:
    """Return names of methods."""
    return last(incomplete, named("methods"))


def configurations(incomplete: str) -> Offers:
    """Return names of methods, and after a colon the settings of that method: ``name:key=value,name``."""
    head, colon, last = incomplete.rpartition(":")
    if not colon or "," in last:
        return methods(incomplete)
    name = head.rpartition(",")[2].partition(":")[0]
    return [(f"{head}:{setting}", about) for setting, about in settings_of("methods", [name])]

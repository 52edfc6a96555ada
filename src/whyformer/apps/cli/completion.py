"""Completion of names of methods, settings, formats, models and benchmarks in the shell.

The registries need torch, which takes seconds to import, so ``names.json`` holds their names; ``scripts/names`` writes
it, and a test compares it with the registries.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import typer

from whyformer.baselines import BASELINES, names_for
from whyformer.defaults import COMPARED, DEFAULT_METHOD

Offers = list[tuple[str, str]]
FORMATS = ("png", "svg", "pdf", "html", "json")


@functools.cache
def known() -> dict[str, Any]:
    """The content of ``names.json``: {"bundled": [name], "methods": {name: {"summary", "facts": the JSON of
    ``whyformer methods``, "signed": whether its scores have a sign, "settings"}}, "benchmarks": {name: {"summary",
    "settings"}}}; settings map a name to the values worth offering, the default first."""
    names: dict[str, Any] = json.loads(Path(__file__).with_name("names.json").read_text(encoding="utf-8"))
    return names


# -- what begins as typed ------------------------------------------------------------------------------------------
def of(offers: Callable[[], Iterable[tuple[str, str]]]) -> Callable[[str], Offers]:
    """Return a function that offers the values that begin with the typed text, from (value, description)."""

    def complete(incomplete: str) -> Offers:
        return [(value, about) for value, about in offers() if value.startswith(incomplete)]

    return complete


def _named(kind: str) -> Callable[[], Iterable[tuple[str, str]]]:
    return lambda: ((name, facts["summary"]) for name, facts in known()[kind].items())


def _listed(complete: Callable[[str], Offers]) -> Callable[[str], Offers]:
    """Complete the last entry of a list with commas; entries of the list are not repeated."""

    def complete_last(incomplete: str) -> Offers:
        before, comma, last = incomplete.rpartition(",")
        listed = before.split(",")
        return [(f"{before}{comma}{name}", about) for name, about in complete(last) if name not in listed]

    return complete_last


def _assignments(settings: dict[str, list[Any]]) -> Iterator[tuple[str, str]]:
    """Return ``key=value`` for each value that needs no quotes, else ``key=``."""
    for key, values in settings.items():
        for i, value in enumerate(values):
            written = value if isinstance(value, str) else json.dumps(value)
            yield f"{key}={'' if any(c.isspace() for c in written) else written}", "default" if i == 0 else ""


def _colour_maps() -> tuple[str, ...]:
    """The default maps, perceptually uniform ones that are safe for colour-blind readers, and that of the papers."""
    from whyformer.show.colours import DIVERGING, SEQUENTIAL

    return (SEQUENTIAL, DIVERGING, "inferno", "viridis", "cividis", "magma", "plasma", "jet")


# -- for each option -----------------------------------------------------------------------------------------------
purposes = of(lambda: [("faithful", "what the prediction depends on"), ("localise", "where the object or the word is")])
devices = of(lambda: [("cpu", ""), ("cuda", "")])
dtypes = of(lambda: [(name, "") for name in ("float32", "float64", "bfloat16", "float16")])
cmaps = of(lambda: [(c, "") for c in _colour_maps()])
baselines = of(lambda: [(name, BASELINES[name].kinds["image"]) for name in names_for("image")])
formats = _listed(of(lambda: [(name, "") for name in (*FORMATS, "none")]))
models = of(lambda: [(f"bundled:{name}", "comes with whyformer") for name in known()["bundled"]])
benchmarks = of(_named("benchmarks"))
# of all benchmarks: which of them was named, an unfinished line does not tell
options = of(lambda: [offer for facts in known()["benchmarks"].values() for offer in _assignments(facts["settings"])])
method = of(_named("methods"))
methods = _listed(method)


def configurations(incomplete: str) -> Offers:
    """Complete ``name:key=value,name``: names of methods, and after a colon the settings of that method."""
    before, comma, last = incomplete.rpartition(",")
    head, colon, setting = last.rpartition(":")
    if not colon:
        return methods(incomplete)
    offered = known()["methods"].get(head.partition(":")[0], {}).get("settings", {})
    return [(f"{before}{comma}{head}:{value}", about) for value, about in of(lambda: _assignments(offered))(setting)]


def settings(context: typer.Context, incomplete: str) -> Offers:
    """Complete ``key=value`` with the settings of the methods on the command line."""
    typed = context.params.get("method")
    names = typed.split(",") if typed else COMPARED if context.info_name == "compare" else [DEFAULT_METHOD]
    offered: dict[str, list[Any]] = {}
    for name in names:
        offered |= known()["methods"].get(name.strip(), {}).get("settings", {})
    return of(lambda: _assignments(offered))(incomplete)


def commands(context: typer.Context, incomplete: str) -> Offers:
    """Complete the names of commands that print JSON: all but ``schema`` itself."""
    names = context.find_root().command.list_commands(context)  # type: ignore[attr-defined]
    return of(lambda: [(name, "") for name in names if name != context.info_name])(incomplete)

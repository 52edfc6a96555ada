"""What the shell offers after a Tab: names of methods, settings, formats, models and benchmarks.

The registries need torch, which takes seconds to import, so their names lie in ``known.json``; ``scripts/known_names``
writes it and a test compares it with the registries.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator
from importlib import resources
from typing import Any

import typer

Offers = list[tuple[str, str]]

_BASH = "complete_bash"
_CMAPS = ("inferno", "blue-orange", "viridis", "cividis", "magma", "plasma")
_DTYPES = ("float32", "float64", "bfloat16", "float16")


def known() -> dict[str, Any]:
    """{"bundled": [name], "methods": {name: {"summary", "modality", "settings"}}, "benchmarks": {name: {"summary",
    "options"}}}; settings and options map a name to the values worth offering, the default first."""
    text = (resources.files("whyformer.apps.cli") / "known.json").read_text(encoding="utf-8")
    made: dict[str, Any] = json.loads(text)
    return made


# -- for each option ---------------------------------------------------------------------------------------------
def complete_method(incomplete: str) -> Offers:
    """One name of a method."""
    return _beginning(incomplete, ((name, facts["summary"]) for name, facts in known()["methods"].items()))


def complete_methods(incomplete: str) -> Offers:
    """The last name of a list with commas; what is in the list already is not offered again."""
    before, comma, last = incomplete.rpartition(",")
    given = before.split(",")
    return [(f"{before}{comma}{name}", about) for name, about in complete_method(last) if name not in given]


def complete_configurations(incomplete: str) -> Offers:
    """``name:key=value,name``: names, and after a colon the settings of that method."""
    before, comma, last = incomplete.rpartition(",")
    head, colon, setting = last.rpartition(":")
    if not colon:
        return complete_methods(incomplete)
    settings = known()["methods"].get(head.partition(":")[0], {}).get("settings", {})
    return [(f"{before}{comma}{head}:{one}", about) for one, about in _beginning(setting, _assignments(settings))]


def complete_setting(context: typer.Context, incomplete: str) -> Offers:
    """``key=value`` for the settings of the methods that stand on the line before."""
    from whyformer.apps.cli.options import COMPARED

    given = context.params.get("method")
    default = COMPARED if context.info_name == "compare" else ("transformer_attribution",)
    names = given.split(",") if given else default
    settings: dict[str, list[Any]] = {}
    for name in names:
        settings.update(known()["methods"].get(name.strip(), {}).get("settings", {}))
    return _beginning(incomplete, _assignments(settings))


def complete_format(incomplete: str) -> Offers:
    """The last of a list of formats."""
    from whyformer.apps.cli.options import FORMATS

    before, comma, last = incomplete.rpartition(",")
    offered = FORMATS if comma else (*FORMATS, "none")
    return [(f"{before}{comma}{f}", "") for f in offered if f.startswith(last) and f not in before.split(",")]


def complete_model(incomplete: str) -> Offers:
    """Bundled models; for the rest the shell offers folders."""
    return _beginning(incomplete, ((f"bundled:{name}", "comes with whyformer") for name in known()["bundled"]))


def complete_benchmark(incomplete: str) -> Offers:
    """Names of benchmarks."""
    return _beginning(incomplete, ((name, facts["summary"]) for name, facts in known()["benchmarks"].items()))


def complete_option(incomplete: str) -> Offers:
    """``key=value`` for the options of the benchmarks; which of them was named, an unfinished line does not tell."""
    options: dict[str, list[Any]] = {}
    for facts in known()["benchmarks"].values():
        options.update(facts["options"])
    return _beginning(incomplete, _assignments(options))


def complete_command(incomplete: str) -> Offers:
    """Commands that print JSON."""
    from whyformer.apps.cli.schema import commands_with_json

    return _beginning(incomplete, ((name, "") for name in commands_with_json()))


def complete_cmap(incomplete: str) -> Offers:
    """Colour maps that even steps and the colour-blind can do with, and the one of the papers."""
    return _beginning(incomplete, ((name, "") for name in (*_CMAPS, "jet")))


def complete_device(incomplete: str) -> Offers:
    return _beginning(incomplete, (("cpu", ""), ("cuda", "")))


def complete_dtype(incomplete: str) -> Offers:
    return _beginning(incomplete, ((name, "") for name in _DTYPES))


def _beginning(incomplete: str, offers: Iterable[tuple[str, str]]) -> Offers:
    return [(value, about) for value, about in offers if value.startswith(incomplete)]


def _assignments(settings: dict[str, list[Any]]) -> Iterator[tuple[str, str]]:
    """``key=value`` for each value that needs no quotes, else ``key=``."""
    for key, values in settings.items():
        for i, value in enumerate(values):
            written = value if isinstance(value, str) else json.dumps(value)
            yield f"{key}={'' if any(c.isspace() for c in written) else written}", "default" if i == 0 else ""


# -- bash --------------------------------------------------------------------------------------------------------
def run(command: Callable[[], None]) -> None:
    """Run the command; where bash asks for completion, mend what bash did to the line first.

    Bash takes ``:`` and ``=`` for ends of words: ``bundled:d`` arrives as three words, and only the last of them is
    replaced by what is offered. So the words are put together again, and what stands before is taken off each offer.
    """
    if os.environ.get("_WHYFORMER_COMPLETE") != _BASH:
        command()
        return
    words, place = _rejoined(os.environ.get("COMP_WORDS", "").split("\n"), int(os.environ.get("COMP_CWORD", "0")))
    os.environ["COMP_WORDS"], os.environ["COMP_CWORD"] = "\n".join(words), str(place)
    current = words[place] if place < len(words) else ""
    cut = max(current.rfind(":"), current.rfind("=")) + 1
    answer, status = io.StringIO(), 0
    with contextlib.redirect_stdout(answer):
        try:
            command()
        except SystemExit as leaving:
            status = int(leaving.code or 0)
    for line in answer.getvalue().splitlines():
        typer.echo(line[cut:] if line.startswith(current[:cut]) else line)
    raise SystemExit(status)


def _rejoined(words: list[str], place: int) -> tuple[list[str], int]:
    """The words as they were typed, and which of them is at the cursor; an empty word, after a space, stays apart."""
    made: list[str] = []
    where = place
    for i, word in enumerate(words):
        if made and word and (set(word) <= {":", "="} or made[-1][-1:] in (":", "=")):
            made[-1] += word
        else:
            made.append(word)
        if i == place:
            where = len(made) - 1
    return made, where

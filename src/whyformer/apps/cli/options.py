"""Commands and their options: groups that several commands share, what typer is told of them, what they mean.

What a command takes is a dataclass, its fields the options; their words stand in ``options.toml``.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import tomllib
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from whyformer import options
from whyformer.apps.cli import completion
from whyformer.apps.cli.telling import errors_as_sentences
from whyformer.defaults import COMPARED
from whyformer.errors import InputError
from whyformer.options import DEFAULTS, Options, split

if TYPE_CHECKING:
    from whyformer.methods import Method

WORDS = tomllib.loads(Path(__file__).with_name("options.toml").read_text(encoding="utf-8"))


@dataclass(kw_only=True)
class Common:
    quiet: bool = False
    as_json: bool = False
    debug: bool = False


@dataclass(kw_only=True)
class InputOptions(Common):
    """One input, one model, and where files go."""

    source: str
    model: str | None = None
    out: Path = Path("whyformer-out")
    options: Options = DEFAULTS


@dataclass(kw_only=True)
class Drawing(Common):
    """How a map is laid over a picture."""

    opacity: float | None = None
    cmap: str | None = None
    cover: bool = False
    contours: int | None = None
    keep: str | None = None
    above: float | None = None
    smooth: float | None = None

    def look(self) -> dict[str, Any]:
        """What was asked for, checked before any work."""
        from whyformer.show.colours import lookup
        from whyformer.show.look import Look

        given = {"opacity": self.opacity, "cmap": self.cmap, "contours": self.contours, "keep": _share(self.keep),
                 "above": self.above, "fade": False if self.cover else None, "smooth": self.smooth}  # fmt: skip
        look = {name: value for name, value in given.items() if value is not None}
        Look.of(look)
        if self.cmap is not None:
            lookup(self.cmap)
        return look


def command(function: Callable[[Any], None]) -> Callable[..., None]:
    """A function of one group of options as typer reads it: a parameter for each, the command's own first.

    A group that ``resumes`` is of a command that, given again, goes on where it was interrupted.
    """
    group = get_type_hints(function)["asked"]
    hints, parameters = get_type_hints(group), []
    defaults = {f.name: inspect.Parameter.empty if f.default is MISSING else f.default for f in fields(group)}
    for part in group.__mro__:
        for name in (n for n in inspect.get_annotations(part) if n in defaults):
            if name == "options":
                parameters += _offered()
                continue
            made = Annotated[hints[name], _described(**WORDS[part.__name__][name])]  # type: ignore[valid-type]
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(name, kind, default=defaults[name], annotation=made))
    parameters.sort(key=lambda p: p.name == "more")  # an argument that takes all that is left comes last

    def run(**given: Any) -> None:
        with errors_as_sentences(given["debug"], getattr(group, "resumes", False)):
            said, own = split(given)
            function(group(**own, options=Options(**said)) if "options" in defaults else group(**own))

    run.__name__, run.__doc__ = function.__name__, function.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _offered() -> list[inspect.Parameter]:
    """The options of :class:`Options` that have words for the command line."""
    made = []
    for one in (f for f in fields(Options) if f.name in options.WORDS):
        kind: Any = options.kind_of(one.name)
        words = {key: word for key, word in options.WORDS[one.name].items() if key != "type"}
        kind = Annotated[kind if kind is bool else kind | None, _described(**words)]
        made.append(inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=kind))
    return made


def _described(
    flags: tuple[str, ...] = (),
    argument: bool = False,
    autocompletion: str | None = None,
    choices: bool = False,
    **words: Any,
) -> Any:
    """``choices``: what the shell offers is all that there is, so the help lists it."""
    complete = getattr(completion, autocompletion) if autocompletion else None
    if complete and choices:
        words["metavar"] = "|".join(name for name, _ in complete(""))
    return (typer.Argument if argument else typer.Option)(*flags, autocompletion=complete, **words)


# -- what values mean ----------------------------------------------------------------------------------------------
def _share(given: str | None) -> float | None:
    if given is None:
        return None
    number, percent, rest = given.strip().partition("%")
    try:
        return float(number) / (100 if percent and not rest else 1)
    except ValueError as error:
        raise InputError(f"a share is written like 0.2 or 20%, not '{given}'") from error


def chosen_formats(given: str, allowed: tuple[str, ...] = completion.FORMATS) -> list[str]:
    """What ``--format`` names, each once."""
    wanted = [f.strip().lower() for f in given.split(",") if f.strip()]
    for one in wanted:
        if one not in (*completion.FORMATS, *allowed, "none"):
            raise InputError(f"unknown format '{one}': use {', '.join(allowed)}, or none")
        if one not in (*allowed, "none"):
            raise InputError(f"this is a figure: it is written as {', '.join(allowed)}, not {one}")
    return [f for f in dict.fromkeys(wanted) if f != "none"]


def chosen_methods(names: str | None, setting: list[str] | None, kind: str) -> list[tuple[Method, dict[str, Any]]]:
    """The methods asked for, each with those settings it knows; all checked before a model is loaded."""
    import whyformer
    from whyformer.methods import find

    given = dict(map(pair, setting or []))
    if names is None:
        known = {m.name: m for m in whyformer.list_methods()}
        chosen = [known[n] for n in COMPARED if n in known and known[n].modality in ("both", kind)]
    else:
        chosen = [find(n.strip()) for n in dict.fromkeys(names.split(",")) if n.strip()]
    if not chosen:
        raise InputError("no method was named; whyformer methods lists them")
    for key in given:
        if not any(key in m.settings for m in chosen):
            chosen[0].complete({key: given[key]})
    pairs = [(m, {k: v for k, v in given.items() if k in m.settings}) for m in chosen]
    for one, own in pairs:
        one.complete(own)
    return pairs


def chosen_method(name: str, setting: list[str] | None, kind: str) -> tuple[Method, dict[str, Any]]:
    """The one method that is asked for, with its settings."""
    chosen = chosen_methods(name, setting, kind)
    if len(chosen) > 1:
        raise InputError("this takes one method: name one")
    return chosen[0]


def rather(target: str | None, other: str) -> Any:
    """A target rather than another."""
    if target is None:
        raise InputError("--contrast says what the target is compared with: give --target too")
    from whyformer.targets import Contrast

    return Contrast(target, other)


def pair(given: str, what: str = "a setting") -> tuple[str, Any]:
    """``key=value`` as a key and a value: JSON or a Python literal where it is one, otherwise the text itself."""
    key, sign, value = given.partition("=")
    if not sign or not key.strip():
        raise InputError(f"{what} is written key=value, not '{given}'")
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return key.strip(), read(value.strip())
    return key.strip(), {"true": True, "false": False, "none": None}.get(value.strip().casefold(), value)

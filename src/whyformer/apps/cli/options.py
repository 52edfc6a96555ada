"""Options of several commands, and parsers of their values.

A command is a function whose parameters are its options: ``Annotated`` with :func:`typer.Option`. A parameter whose
type is a dataclass is replaced with the fields of the dataclass.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from typer import Argument, Option

from whyformer.apps.cli import completion
from whyformer.apps.cli.completion import FORMATS
from whyformer.apps.cli.printing import errors_as_sentences
from whyformer.errors import InputError
from whyformer.options import WORDS, Options, kind_of

# -- inputs, models and files --------------------------------------------------------------------------------------
_SOURCE = "A picture, .wav or .txt file, a sentence, or - for standard input."
_MODEL = "A hub id, a local folder or a bundled model (bundled:sst2, bundled:digits, bundled:reader)."
_DEFAULT = "Default: the predicted class."


def model_option(help: str) -> Any:
    """Return the option ``--model``."""
    return Option("--model", "-m", metavar="ID|FOLDER", autocompletion=completion.models, help=help)


def setting_option(help: str, **words: Any) -> Any:
    """Return the option ``--setting``."""
    return Option("--setting", "-s", metavar="KEY=VALUE", help=f"{help}; can be repeated.", **words)


def format_option(help: str, **words: Any) -> Any:
    """Return the option ``--format``."""
    return Option("--format", "-f", metavar="LIST", help=help, **words)


def methods_option(help: str) -> Any:
    """Return the option ``--method`` of a job or a benchmark."""
    flags = ("--method", "--methods")
    return Option(*flags, metavar="LIST", autocompletion=completion.configurations, help=help)


def target_option(help: str, metavar: str = "CLASS|ID") -> Any:
    """Return the option ``--target``."""
    return Option("--target", "-t", metavar=metavar, help=help)


Source = Annotated[str, Argument(metavar="PICTURE_OR_TEXT", help=_SOURCE)]
Input = Annotated[str | None, Option(
    "--input", "-i", metavar="PICTURE_OR_TEXT", help=f"{_SOURCE} Default: noise, or a short sentence."
)]
Model = Annotated[str | None, model_option(f"{_MODEL} Default for texts: bundled:sst2.")]
NamedModel = Annotated[str, model_option(_MODEL)]
ModelOfJob = Annotated[str | None, model_option(_MODEL)]
ModelArgument = Annotated[str, Argument(metavar="ID|FOLDER", autocompletion=completion.models, help=_MODEL)]
Out = Annotated[Path, Option("--out", "-o", metavar="DIR", help="Folder for the files.")]
Device = Annotated[str | None, Option(
    metavar="cpu|cuda", autocompletion=completion.devices, help="Device on which the model runs."
)]
Address = Annotated[str | None, Option(
    metavar="ADDRESS", help="Address of the Ray cluster. Default: a new one on this machine."
)]

# -- what is explained, and how ------------------------------------------------------------------------------------
Target = Annotated[str | None, target_option(f"Name or index of a class. {_DEFAULT}")]
Targets = Annotated[list[str] | None, target_option(
    "Name or index of a class, or a target such as \"Token(5, 'blue')\"; can be repeated. Default: the predicted "
    "class; in compare, the two likeliest classes of a picture."
)]
WrittenTarget = Annotated[str | None, target_option(f"Class, or a target such as \"Token(5, 'blue')\". {_DEFAULT}")]
Method = Annotated[str, Option(
    metavar="NAME", autocompletion=completion.method, help="Name of a method; `whyformer methods` lists them."
)]
Setting = Annotated[list[str] | None, setting_option(
    "A setting of the method (see `whyformer methods NAME`)", autocompletion=completion.settings
)]
Formats = Annotated[str | None, format_option(
    "Files to write, separated by commas: png, svg, pdf, html, json; or none.", autocompletion=completion.formats
)]
Top = Annotated[int, Option(min=1, help="Number of likeliest classes to list.")]
Check = Annotated[bool, Option(
    "--check", help="Measure the faithfulness of each map, compared with random maps (needs forward passes)."
)]

# -- groups --------------------------------------------------------------------------------------------------------
def _of_map(*flags: str, **words: Any) -> Any:
    return Option(*flags, rich_help_panel="Drawing of maps on pictures", **words)


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """How maps are drawn on pictures."""

    opacity: Annotated[float | None, _of_map(metavar="0..1", help="Opacity of the map. Default: 1.")] = None
    cmap: Annotated[str | None, _of_map(
        metavar="NAME", autocompletion=completion.cmaps,
        help="A matplotlib colour map, such as viridis, or jet as in the papers. Default: one hue, and two for signed "
        "scores."
    )] = None
    cover: Annotated[bool, _of_map("--cover", help="Cover the picture evenly, also where scores are near 0.")] = False
    contours: Annotated[int | None, _of_map(metavar="N", help="Draw N contour lines (0 to 9).")] = None
    keep: Annotated[str | None, _of_map(
        metavar="SHARE", help="Show only the part with the highest scores: 0.2 or 20%."
    )] = None
    above: Annotated[float | None, _of_map(
        metavar="0..1", help="Show only the part with at least this share of the highest score."
    )] = None
    smooth: Annotated[float | None, _of_map(
        metavar="PIXELS",
        help="σ of the smoothing of signed maps of pixels; 0 turns it off. Default: 1/64 of the shorter "
        "side."
    )] = None

    def look(self) -> dict[str, Any]:
        """Return the options of :class:`~whyformer.show.look.Look` that differ from the defaults, checked."""
        from whyformer.show.colours import lookup
        from whyformer.show.look import Look

        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "cover"}
        values |= {"keep": _share(self.keep), "fade": False if self.cover else None}
        look = {name: value for name, value in values.items() if value is not None}
        Look.of(look)
        if self.cmap is not None:
            lookup(self.cmap)
        return look


def _annotations() -> dict[str, Any]:
    """Return the annotations of the options in :class:`~whyformer.options.Options` that commands accept."""
    annotations: dict[str, Any] = {}
    for name, words in WORDS.items():
        flags, complete = words.get("flags", ()), words.get("autocompletion")
        rest = {key: word for key, word in words.items() if key not in ("flags", "autocompletion", "type")}
        option = Option(*flags, autocompletion=complete and getattr(completion, complete), **rest)
        kind: Any = kind_of(name)
        annotations[name] = Annotated[kind if kind is bool else kind | None, option]
    return annotations


def command(*, resumes: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn a function into a command: parameters for the fields of its dataclasses, and errors as messages.

    Args:
        resumes: True if the command continues when it is run again.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        parameters: list[inspect.Parameter] = []
        groups: dict[str, tuple[Any, list[str]]] = {}
        for parameter in inspect.signature(function, eval_str=True).parameters.values():
            kind: Any = parameter.annotation
            if not is_dataclass(kind):
                parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))
                continue
            hints = _annotations() if kind is Options else get_type_hints(kind, include_extras=True)
            groups[parameter.name] = kind, list(hints)
            for name, hint in hints.items():
                default = getattr(kind, name)
                parameters.append(parameter.replace(name=name, annotation=hint, default=default))

        def run(**values: Any) -> None:
            with errors_as_sentences(values["debug"], resumes):
                for group, (kind, names) in groups.items():
                    values[group] = kind(**{name: values.pop(name) for name in names})
                function(**values)

        run.__name__ = function.__name__
        run.__doc__ = re.sub(r"(\S)\n(\S)", r"\1 \2", inspect.getdoc(function) or "")  # the help keeps line breaks
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


# -- parsers of values ---------------------------------------------------------------------------------------------
def _share(text: str | None) -> float | None:
    if text is None:
        return None
    number, percent, rest = text.strip().partition("%")
    try:
        return float(number) / (100 if percent and not rest else 1)
    except ValueError as error:
        raise InputError(f"a share is written like 0.2 or 20%, not '{text}'") from error


def parts(text: str) -> list[str]:
    """Split a text at commas outside of brackets."""
    pieces, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth <= 0:
            pieces.append("")
        else:
            pieces[-1] += character
    return [piece.strip() for piece in pieces if piece.strip()]


def formats_in(text: str, allowed: tuple[str, ...] = FORMATS) -> list[str]:
    """Parse ``--format``."""
    formats = list(dict.fromkeys(parts(text.lower())))
    for name in formats:
        if name not in (*FORMATS, *allowed, "none"):
            raise InputError(f"unknown format '{name}': use {', '.join(allowed)}, or none")
        if name not in (*allowed, "none"):
            raise InputError(f"this is a figure: it is written as {', '.join(allowed)}, not {name}")
    return [name for name in formats if name != "none"]


def settings_in(texts: list[str] | None) -> dict[str, Any]:
    """Parse ``--setting``."""
    return dict(map(assignment, texts or []))


def assignment(text: str, subject: str = "a setting") -> tuple[str, Any]:
    """Parse ``key=value``. The value is JSON, a Python literal or text."""
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise InputError(f"{subject} is written key=value, not '{text}'")
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return key.strip(), read(value.strip())
    return key.strip(), {"true": True, "false": False, "none": None}.get(value.strip().casefold(), value)


def one_method(name: str, setting: list[str] | None) -> tuple[str, dict[str, Any]]:
    """Return the name and the settings of a method."""
    from whyformer.comparing import read_methods

    chosen = read_methods(parts(name), settings_in(setting))
    if len(chosen) > 1:
        raise InputError("this takes one method: name one")
    return chosen[0][0].name, chosen[0][1]


def contrasted(target: str | None, other: str) -> Any:
    """Return the contrast between a target and another."""
    if target is None:
        raise InputError("--contrast says what the target is compared with: give --target too")
    from whyformer.targets import Contrast

    return Contrast(target, other)

"""Options of several commands, and parsers of their values.

A command is a function whose parameters are its options: ``Annotated`` with :func:`typer.Option`. A parameter whose
type is a dataclass is replaced with the fields of the dataclass.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from typer import Argument, Option

from whyformer.apps.cli import completion
from whyformer.apps.cli.printing import errors_as_sentences
from whyformer.errors import InputError
from whyformer.notation import parts, settings_in
from whyformer.options import WORDS, Options, kind_of

# -- options of several commands -----------------------------------------------------------------------------------
SOURCE = "A picture, .wav or .txt file, a sentence, or - for standard input."
MODEL = "A hub id, a local folder or a bundled model (bundled:sst2, bundled:digits, bundled:reader)."


def model_option(help: str = MODEL) -> Any:
    """Return the option ``--model``."""
    return Option("--model", "-m", metavar="ID|FOLDER", autocompletion=completion.models, help=help)


def target_option(help: str, metavar: str = "CLASS|ID") -> Any:
    """Return the option ``--target``."""
    return Option("--target", "-t", metavar=metavar, help=help)


def format_option(allowed: Sequence[str], about: str = "") -> Any:
    """Return the option ``--format`` of a command that writes these files; ``about`` describes the last."""
    return Option(
        "--format", "-f", metavar="LIST",
        help=f"Files to write, separated by commas: {', '.join(allowed)}{about}; or none.",
        autocompletion=lambda incomplete: completion.last(incomplete, [(name, "") for name in (*allowed, "none")]),
    )


def methods_option(default: str) -> Any:
    """Return the option ``--method`` of a job or a benchmark."""
    words = f"name:key=value:key=value,name ... Default: {default}."
    return Option("--method", "--methods", metavar="LIST", autocompletion=completion.configurations, help=words)


Source = Annotated[str, Argument(metavar="PICTURE_OR_TEXT", help=SOURCE)]
Model = Annotated[str | None, model_option(f"{MODEL} Default for texts: bundled:sst2.")]
ModelArgument = Annotated[str, Argument(metavar="ID|FOLDER", autocompletion=completion.models, help=MODEL)]
Out = Annotated[Path, Option("--out", "-o", metavar="DIR", help="Folder for the files.")]
Device = Annotated[str | None, Option(**WORDS["device"])]
Target = Annotated[str | None, target_option(
    "Name or index of a class, or a target such as \"Token(5, 'blue')\". Default: the predicted class."
)]
Method = Annotated[str, Option(
    metavar="NAME", autocompletion=lambda: completion.named("methods"),
    help="Name of a method; `whyformer methods` lists them."
)]
Setting = Annotated[list[str] | None, Option(
    "--setting", "-s", metavar="KEY=VALUE", autocompletion=completion.settings,
    help="A setting of the method (see `whyformer methods NAME`); can be repeated."
)]
Images = Annotated[list[Path] | None, Option(
    metavar="PICTURE", help="A picture that belongs to the text; can be repeated."
)]
Contrast = Annotated[str | None, Option(
    metavar="CLASS|TEXT", help='Explain why the target rather than this: --target " are" --contrast " is".'
)]


# -- groups --------------------------------------------------------------------------------------------------------
def _of_map(*flags: str, **words: Any) -> Any:
    return Option(*flags, rich_help_panel="Drawing of maps on pictures", **words)


def _cmaps() -> list[str]:
    """Return the default maps, perceptually uniform ones that are safe for colour-blind readers, and the papers'."""
    from whyformer.show.colours import DIVERGING, SEQUENTIAL

    return [SEQUENTIAL, DIVERGING, "inferno", "viridis", "cividis", "magma", "plasma", "jet"]


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """How maps are drawn on pictures."""

    opacity: Annotated[float | None, _of_map(metavar="0..1", help="Opacity of the map. Default: 1.")] = None
    cmap: Annotated[str | None, _of_map(
        metavar="NAME", autocompletion=_cmaps,
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

        look = {name: value for name, value in specified(self).items() if name != "cover"}
        if self.cover:
            look["fade"] = False
        if self.keep is not None:
            look["keep"] = _share(self.keep)
        Look.of(look)
        if self.cmap is not None:
            lookup(self.cmap)
        return look


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a job or a benchmark runs."""

    engine: Annotated[str | None, Option(metavar="local|ray", help="Engine that runs it. Default: local.")] = None
    workers: Annotated[int | None, Option(min=1, help="Threads that read the input. Default: 2.")] = None
    address: Annotated[str | None, Option(
        metavar="ADDRESS", help="Address of the Ray cluster. Default: a new one on this machine."
    )] = None
    actors: Annotated[int | None, Option(
        min=1, help="Number of Ray actors; each holds a copy of the model. Default: 1."
    )] = None


def specified(group: Any) -> dict[str, Any]:
    """Return the options of a group that were passed, by name."""
    return {name: value for name, value in vars(group).items() if value is not None}


def _hints(kind: Any) -> dict[str, Any]:
    """Return the annotations of a group; of :class:`~whyformer.options.Options` those of the options in WORDS."""
    if kind is not Options:
        return get_type_hints(kind, include_extras=True)
    hints: dict[str, Any] = {}
    for name, words in WORDS.items():
        kind = kind_of(name)
        option = Option(*words.get("flags", ()), **{key: w for key, w in words.items() if key not in ("flags", "type")})
        hints[name] = Annotated[kind if kind is bool else kind | None, option]
    return hints


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
            hints = _hints(kind)
            groups[parameter.name] = kind, list(hints)
            if clash := hints.keys() & {p.name for p in parameters}:
                raise TypeError(f"two options of the command {function.__name__} have the name {', '.join(clash)}")
            for name, hint in hints.items():
                default = getattr(kind, name, parameter.empty)
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
def _share(text: str) -> float:
    number, percent, rest = text.strip().partition("%")
    try:
        return float(number) / (100 if percent and not rest else 1)
    except ValueError as error:
        raise InputError(f"a share is written like 0.2 or 20%, not '{text}'") from error


def formats_in(text: str, allowed: Sequence[str]) -> list[str]:
    """Parse ``--format``."""
    formats = list(dict.fromkeys(parts(text.lower())))
    for name in formats:
        if name not in (*allowed, "none"):
            raise InputError(f"--format takes {', '.join(allowed)} or none, not '{name}'")
    return [name for name in formats if name != "none"]


def one_method(name: str, setting: list[str] | None) -> tuple[str, dict[str, Any]]:
    """Return the name and the settings of a method."""
    from whyformer.comparing import read_methods

    (method, settings), *others = read_methods(parts(name), settings_in(setting))
    if others:
        raise InputError("this takes one method: name one")
    return method.name, settings


def contrasted(target: str | None, other: str | None) -> Any:
    """Return a target, or its contrast with another."""
    if other is None:
        return target
    if target is None:
        raise InputError("--contrast says what the target is compared with: give --target too")
    from whyformer.targets import Contrast

    return Contrast(target, other)

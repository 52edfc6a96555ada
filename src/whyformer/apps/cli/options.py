"""Options that several commands share, and what their values mean."""

from __future__ import annotations

import ast
import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whyformer.apps.cli import completion
from whyformer.apps.cli.completion import COMPARED, FORMATS
from whyformer.errors import InputError

if TYPE_CHECKING:
    from whyformer.methods import Method


Source = Annotated[
    str,
    typer.Argument(metavar="PICTURE_OR_TEXT", help="A picture file, a .txt file, a sentence, or - for standard input."),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", metavar="ID|FOLDER",
        help="Hub id, local folder, bundled:digits or bundled:sst2. Default: the bundled one for the kind of input.",
        autocompletion=completion.complete_model,
    ),
]  # fmt: skip
Targets = Annotated[
    list[str] | None,
    typer.Option(
        "--target", "-t", metavar="CLASS|ID",
        help="Class to explain, by name or number; repeat for several. Default: what the model predicts.",
    ),
]  # fmt: skip
Target = Annotated[
    str | None,
    typer.Option(
        "--target", "-t", metavar="CLASS|ID", help="Class, by name or number. Default: what the model predicts."
    ),
]
Name = Annotated[
    str,
    typer.Option(
        "--method", metavar="NAME", help="A method; see: whyformer methods.", autocompletion=completion.complete_method
    ),
]
Names = Annotated[
    str,
    typer.Option(
        "--method", metavar="NAMES", help="A method, or several with commas between; see: whyformer methods.",
        autocompletion=completion.complete_methods,
    ),
]  # fmt: skip
SomeNames = Annotated[
    str | None,
    typer.Option(
        "--method", metavar="NAMES", help="Methods, separated by commas. Default: a choice that applies.",
        autocompletion=completion.complete_methods,
    ),
]  # fmt: skip
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--setting", "-s", metavar="KEY=VALUE",
        help="A setting of the method (see: whyformer methods NAME); repeat for several.",
        autocompletion=completion.complete_setting,
    ),
]  # fmt: skip
Formats = Annotated[
    str | None,
    typer.Option(
        "--format", "-f", metavar="LIST", help=f"Files to write, separated by commas: {', '.join(FORMATS)}; or none.",
        autocompletion=completion.complete_format,
    ),
]  # fmt: skip
Top = Annotated[int, typer.Option("--top", min=1, help="How many of the likeliest classes to list.")]
Out = Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder for the files.")]
Device = Annotated[
    str | None,
    typer.Option(
        "--device", metavar="cpu|cuda", help="Where the model runs.", autocompletion=completion.complete_device
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype", metavar="TYPE", help="float32 (default), float64 or bfloat16.",
        autocompletion=completion.complete_dtype,
    ),
]  # fmt: skip
Truncate = Annotated[bool, typer.Option("--truncate", help="Cut off text that is longer than the model takes.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors (and what --json prints).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, nothing else.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


# how a map is laid over a picture
_PANEL = "How maps lie on a picture"

Opacity = Annotated[
    float | None,
    typer.Option("--opacity", metavar="0..1", help="Of the map. Default: 0.8.", rich_help_panel=_PANEL),
]
Cmap = Annotated[
    str | None,
    typer.Option(
        "--cmap", metavar="NAME", help="A matplotlib colour map: viridis, the papers' jet ...; default: inferno, and "
        "blue to orange for signed maps.", rich_help_panel=_PANEL, autocompletion=completion.complete_cmap,
    ),
]  # fmt: skip
Cover = Annotated[
    bool,
    typer.Option("--cover", help="Cover the picture evenly, also where scores are near 0.", rich_help_panel=_PANEL),
]
Contours = Annotated[
    int | None,
    typer.Option("--contours", metavar="N", help="Draw N contour lines (0 to 9).", rich_help_panel=_PANEL),
]
Keep = Annotated[
    str | None,
    typer.Option(
        "--keep", metavar="SHARE", help="Show only the part with the highest scores: 0.2 or 20%.",
        rich_help_panel=_PANEL,
    ),
]  # fmt: skip
Above = Annotated[
    float | None,
    typer.Option(
        "--above", metavar="0..1", help="Show only the part with at least this share of the highest score.",
        rich_help_panel=_PANEL,
    ),
]  # fmt: skip


def chosen_look(
    opacity: float | None, cmap: str | None, cover: bool, contours: int | None, keep: str | None, above: float | None
) -> dict[str, Any]:
    """What was asked for, checked before any work."""
    from whyformer.show.colours import lookup
    from whyformer.show.look import Look

    given = {"opacity": opacity, "cmap": cmap, "contours": contours, "keep": _share(keep), "above": above}
    look = {name: value for name, value in given.items() if value is not None}
    look |= {"fade": False} if cover else {}
    Look.of(look)
    if cmap is not None:
        lookup(cmap)
    return look


def _share(given: str | None) -> float | None:
    if given is None:
        return None
    number, percent, rest = given.strip().partition("%")
    try:
        return float(number) / (100 if percent and not rest else 1)
    except ValueError as error:
        raise InputError(f"a share is written like 0.2 or 20%, not '{given}'") from error


def chosen_formats(given: str | None, default: str) -> list[str]:
    """What ``--format`` names, each once."""
    wanted = [f.strip().lower() for f in (default if given is None else given).split(",") if f.strip()]
    for one in wanted:
        if one not in (*FORMATS, "none"):
            raise InputError(f"unknown format '{one}': use {', '.join(FORMATS)}, or none")
    return [f for f in dict.fromkeys(wanted) if f != "none"]


def chosen_methods(names: str | None, setting: list[str] | None, kind: str) -> list[tuple[Method, dict[str, Any]]]:
    """The methods asked for, each with those settings it knows; all checked before a model is loaded."""
    import whyformer
    from whyformer.methods import find

    given = dict(map(pair, setting or []))
    if names is None:
        known = {m.name: m for m in whyformer.methods()}
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


def pair(given: str, what: str = "a setting") -> tuple[str, Any]:
    """``key=value`` as a key and a value: JSON or a Python literal where it is one, otherwise the text itself."""
    key, sign, value = given.partition("=")
    if not sign or not key.strip():
        raise InputError(f"{what} is written key=value, not '{given}'")
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return key.strip(), read(value.strip())
    return key.strip(), {"true": True, "false": False, "none": None}.get(value.strip().casefold(), value)

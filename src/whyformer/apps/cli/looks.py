"""Options that say how a map is laid over a picture, shared by the commands that draw."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from whyformer.apps.cli import completion
from whyformer.errors import InputError

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

"""Progress of long work: a progress bar, or the caller's function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from whyformer.errors import check_type

Track = Callable[..., Iterable[Any]]


def tracking(progress: bool | Track) -> Track:
    """Return ``progress`` if it is a function (iterable, description, total) -> iterable, else one that draws a bar
    if ``progress`` is True."""
    if callable(progress):
        return progress
    check_type("progress", progress, bool, "True, False or a function")

    def track(work: Iterable[Any], description: str = "working", total: int | None = None) -> Iterable[Any]:
        if not progress:
            return work
        from rich.console import Console
        from rich.progress import track as rich_track

        return rich_track(work, description=description, total=total, console=Console(stderr=True))

    return track

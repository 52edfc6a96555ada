"""Progress of long work: a progress bar, or the caller's function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

Track = Callable[..., Iterable[Any]]


def tracking(wanted: bool | Track) -> Track:
    """Return ``wanted`` if it is a function (iterable, description, total) -> iterable, else one that draws a bar
    if ``wanted`` is True."""
    if not isinstance(wanted, bool):
        return wanted

    def track(work: Iterable[Any], description: str = "working", total: int | None = None) -> Iterable[Any]:
        if not wanted:
            return work
        from rich.console import Console
        from rich.progress import track as rich_track

        return rich_track(work, description=description, total=total, console=Console(stderr=True))

    return track

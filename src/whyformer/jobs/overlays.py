"""Write a picture of each explanation of a part: a PNG for a picture, an HTML page for a text."""

from __future__ import annotations

from pathlib import Path

from whyformer.jobs.batching import RowResult
from whyformer.jobs.ownership import OVERLAYS
from whyformer.show import encode, figure, html
from whyformer.show.files import slug, write_all
from whyformer.show.words import target_name


def write_overlays(out: Path, explained: RowResult) -> None:
    """Write the overlays of one row atomically; names consist of the row's index, the method and the class.

    Raises:
        LoadError: the disk is full or not writable.
    """
    contents = {}
    for number, e in enumerate(explained.explanations):
        name = f"{explained.row.index:08d}-{number}-{slug(e.method, target_name(e), limit=60)}"
        if e.level == "token":
            contents[f"{name}.html"] = html.page([e], explained.row.id).encode()
        else:
            contents[f"{name}.png"] = encode(figure(e), "png")
    write_all(out / OVERLAYS, contents)

"""A picture of each explanation of a part: a PNG where it is of a picture, a page where it is of a text."""

from __future__ import annotations

from pathlib import Path

from whyformer.jobs.batching import Explained
from whyformer.jobs.ownership import OVERLAYS
from whyformer.show import encode, figure, html
from whyformer.show.files import slug, write_all
from whyformer.show.words import target_name


def write_overlays(out: Path, explained: Explained) -> None:
    """Write those of one row, under names of its number, the method and the class; each appears whole.

    Raises:
        LoadError: the disk is full, or may not be written to.
    """
    contents = {}
    for number, e in enumerate(explained.explanations):
        name = f"{explained.row.index:08d}-{number}-{slug(e.method, target_name(e), limit=60)}"
        if e.level == "token":
            contents[f"{name}.html"] = html.page([e], explained.row.id).encode()
        else:
            contents[f"{name}.png"] = encode(figure(e), "png")
    write_all(out / OVERLAYS, contents)

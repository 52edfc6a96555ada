"""What a visitor can try at once: pictures that come with the page, and sentences."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whyformer.show.html import data_uri, render

# scenes 1, 6 and 10 of ``digit_scenes(14, seed=11, max_digits=3)``, of digits that the bundled model never saw
PICTURES = tuple(sorted((Path(__file__).parent / "examples").glob("*.png")))
SENTENCES = (
    "An utterly charming film, though it drags.",
    "Warm, funny, and full of life.",
    "It is a masterpiece of boredom.",  # which the bundled model takes for praise
)


def offered(kind: str) -> str:
    """Buttons, one an example of this kind."""
    shown: Sequence[Any] = [(p.stem, data_uri(p.read_bytes())) for p in PICTURES] if kind == "image" else SENTENCES
    return render("web/examples.html", kind=kind, shown=shown)


def put(number: Any, uploads: Path) -> Path | None:
    """A copy of a picture among the uploads, from where alone pictures are read; None if there is no such one."""
    if not isinstance(number, int) or not 0 <= number < len(PICTURES):
        return None
    folder = uploads / "examples"
    folder.mkdir(exist_ok=True)
    place = folder / PICTURES[number].name
    if not place.exists():
        partial = place.with_suffix(".partial")
        shutil.copyfile(PICTURES[number], partial)
        partial.replace(place)
    return place


def sentence(number: Any) -> str | None:
    """The sentence of that number, if there is one."""
    return SENTENCES[number] if isinstance(number, int) and 0 <= number < len(SENTENCES) else None

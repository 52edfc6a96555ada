"""What a visitor can try at once: pictures that come with the page, and sentences."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whyformer.show.html import data_uri, render

# scenes 1, 6 and 10 of ``digit_scenes(14, seed=11, max_digits=3)``, of digits that the bundled model never saw
START_MODEL = {"image": "bundled:digits", "text": "bundled:sst2", "answer": "bundled:reader"}
"""The model that knows the examples of a kind, which stands in the page's field until another is chosen."""
ABOUT = {
    "bundled:digits": "demo: handwritten digits only",
    "bundled:sst2": "demo: film reviews",
    "bundled:reader": "demo: reads handwritten digits only",
}
PICTURES = tuple(sorted((Path(__file__).parent / "examples").glob("*.png")))
SENTENCES = (
    "An utterly charming film, though it drags.",
    "Warm, funny, and full of life.",
    "It is a masterpiece of boredom.",  # which the bundled model takes for praise
)

PROMPTS = ("what is on the left ?", "read from left to right :", "read from right to left :")  # one to each picture


def offered(kind: str) -> str:
    """Buttons, one an example of this kind."""
    pictures = [(p.stem, data_uri(p.read_bytes())) for p in PICTURES]
    asked = [(*picture, prompt) for picture, prompt in zip(pictures, PROMPTS, strict=True)]
    shown: Sequence[Any] = {"image": pictures, "text": SENTENCES, "answer": asked}[kind]
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


def sentence(number: Any, among: Sequence[str] = SENTENCES) -> str | None:
    """The sentence (or the prompt) of that number, if there is one."""
    return among[number] if isinstance(number, int) and 0 <= number < len(among) else None

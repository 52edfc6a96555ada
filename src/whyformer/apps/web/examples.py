"""Examples of the page: pictures, sentences and prompts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from whyformer.apps.web.page_input import PageInput
from whyformer.explanation.result import Explanation
from whyformer.explanation.serialization import written_whole
from whyformer.inputs.pictures import open_picture
from whyformer.show.html import data_uri, render

# scenes 1, 6 and 10 of ``digit_scenes(14, seed=11, max_digits=3)``, of digits that the bundled model never saw
START_MODEL = {"image": "bundled:digits", "text": "bundled:sst2", "answer": "bundled:reader"}
"""Default models by kind of input; the examples are made for them."""
ABOUT = {
    "bundled:digits": "demo: handwritten digits only",
    "bundled:sst2": "demo: film reviews",
    "bundled:reader": "demo: reads handwritten digits only",
}
FOLDER = "examples"
"""Name of the folder, inside the uploads, with copies of the examples."""
PHOTOGRAPH = Path(__file__).parent / "examples" / "coffee.jpg"
STORED_MODEL = "facebook/deit-tiny-patch16-224"
"""The model of the stored result of the photograph."""
PICTURES = tuple(sorted((Path(__file__).parent / "examples").glob("*.png")))
SENTENCES = (
    "An utterly charming film, though it drags.",
    "Warm, funny, and full of life.",
    "It is a masterpiece of boredom.",  # the bundled model predicts "positive"
)
PROMPTS = ("what is on the left ?", "read from left to right :", "read from right to left :")  # one for each picture


def offered(kind: str) -> str:
    """Return the buttons of the examples of a kind as HTML."""
    pictures = [(p.stem, data_uri(p.read_bytes())) for p in PICTURES]
    prompts = [(*picture, prompt) for picture, prompt in zip(pictures, PROMPTS, strict=True)]
    items: Sequence[Any] = {"image": pictures, "text": SENTENCES, "answer": prompts}[kind]
    return render("web/examples.html", kind=kind, items=items)


def entered(kind: str, number: Any, uploads: Path) -> dict[str, Any]:
    """Return the values of the fields for an example, by name; none if there is no such example."""
    if not isinstance(number, int) or not 0 <= number < len(PICTURES):
        return {}
    if kind == "text":
        return {"sentence": SENTENCES[number], "pair": ""}
    picture = {"picture": str(copied(PICTURES[number], uploads))}
    return picture if kind == "image" else picture | {"sentence": PROMPTS[number]}


def copied(picture: Path, uploads: Path) -> Path:
    """Copy a picture to the uploads, the only folder from which pictures are read, and return its path."""
    folder = uploads / FOLDER
    folder.mkdir(exist_ok=True)
    place = folder / picture.name
    if not place.exists():
        with written_whole(place) as partial:
            shutil.copyfile(picture, partial)
    return place


def untouched(page_input: PageInput, uploads: Path) -> bool:
    """Return True if the fields are empty or hold an example."""
    entered = page_input.picture is not None and not is_example(page_input.picture, uploads)
    typed = page_input.pair or page_input.sentence.strip() not in ("", *SENTENCES, *PROMPTS)
    return not (entered and page_input.kind != "text") and not (typed and page_input.kind != "image")


def is_example(picture: Any, uploads: Path) -> bool:
    """Return True if a picture is one of the page's, not the visitor's."""
    return picture is not None and Path(str(picture)).parent == uploads / FOLDER


@cache
def stored() -> Explanation:
    """Return the result with which the page opens. Written by ``scripts/pictures --deit``; the model is not bundled."""
    facts = json.loads(PHOTOGRAPH.with_suffix(".json").read_text(encoding="utf-8"))
    return Explanation.from_dict(facts).with_features(originals=[open_picture(PHOTOGRAPH)])

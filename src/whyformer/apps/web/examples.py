"""What a visitor can try at once: pictures that come with the page, and sentences."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from whyformer.apps.web.page_input import PageInput
from whyformer.explanation.result import Explanation
from whyformer.inputs.pictures import open_picture
from whyformer.show.html import data_uri, render

# scenes 1, 6 and 10 of ``digit_scenes(14, seed=11, max_digits=3)``, of digits that the bundled model never saw
START_MODEL = {"image": "bundled:digits", "text": "bundled:sst2", "answer": "bundled:reader"}
"""The model that knows the examples of a kind, which stands in the page's field until another is chosen."""
ABOUT = {
    "bundled:digits": "demo: handwritten digits only",
    "bundled:sst2": "demo: film reviews",
    "bundled:reader": "demo: reads handwritten digits only",
}
FOLDER = "examples"
"""Of the copies of examples, among the uploads."""
PHOTOGRAPH = Path(__file__).parent / "examples" / "coffee.jpg"
STORED_MODEL = "facebook/deit-tiny-patch16-224"
"""The model that made the stored result of the photograph."""
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


def entered(kind: str, number: Any, uploads: Path) -> dict[str, Any]:
    """Values of the fields that hold the example of that number, by name; none if there is no such example."""
    if not isinstance(number, int) or not 0 <= number < len(PICTURES):
        return {}
    if kind == "text":
        return {"sentence": SENTENCES[number]}
    picture = {"picture": str(copied(PICTURES[number], uploads))}
    return picture if kind == "image" else picture | {"sentence": PROMPTS[number]}


def copied(picture: Path, uploads: Path) -> Path:
    """A copy of a picture among the uploads, from where alone pictures are read."""
    folder = uploads / FOLDER
    folder.mkdir(exist_ok=True)
    place = folder / picture.name
    if not place.exists():
        partial = place.with_suffix(".partial")
        shutil.copyfile(picture, partial)
        partial.replace(place)
    return place


def untouched(asked: PageInput, uploads: Path) -> bool:
    """Whether the fields hold nothing that the visitor entered: they are empty, or hold an example."""
    entered = asked.picture is not None and Path(str(asked.picture)).parent != uploads / FOLDER
    typed = asked.sentence.strip() not in ("", *SENTENCES, *PROMPTS)
    return not (entered and asked.kind != "text") and not (typed and asked.kind != "image")


@cache
def stored() -> Explanation:
    """The result with which the page opens, of a model that is not bundled; ``scripts/pictures --deit`` makes it."""
    facts = json.loads(PHOTOGRAPH.with_suffix(".json").read_text(encoding="utf-8"))
    return Explanation.from_dict(facts).with_features(originals=[open_picture(PHOTOGRAPH)])

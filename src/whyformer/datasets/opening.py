"""Tell from a folder's layout which reader fits, for ``whyformer benchmark --data``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from whyformer.datasets.imagenet import class_folders, imagenet_samples, imagenet_validation
from whyformer.datasets.masks import imagenet_segmentation, indexed_masks, oxford_pets, scene_objects
from whyformer.datasets.mnist import mnist
from whyformer.datasets.samples import LayoutError, Picture, Texts, listing, pictures_in
from whyformer.datasets.saved import is_saved, saved_pictures, saved_texts
from whyformer.datasets.texts import bace, eraser, imdb, meld, sst2, tweeteval
from whyformer.errors import InputError

PICTURE_READERS: dict[str, Callable[..., Sequence[Picture]]] = {
    "imagenet_samples": imagenet_samples,
    "imagenet_validation": imagenet_validation,
    "class_folders": class_folders,
    "index": indexed_masks,
    "gtsegs": imagenet_segmentation,
    "pets": oxford_pets,
    "mnist": mnist,
    "saved": saved_pictures,
}
TEXT_READERS: dict[str, Callable[..., Texts]] = {
    "sst2": sst2,
    "imdb": imdb,
    "bace": bace,
    "tweeteval": tweeteval,
    "meld": meld,
    "eraser": eraser,
    "saved": saved_texts,
}
_KINDS = {
    "pictures": "a folder named like imagenet_samples, class folders, ImageNet's validation folder with its "
    "devkit, index.json "
    "with masks, gtsegs_ijcv.mat, Oxford pets, MNIST idx files, a saved Hugging Face data set, or scenes:COUNT",
    "texts": "SST-2 tsv, IMDB neg/ and pos/, bace.csv, a TweetEval task, MELD csv, ERASER jsonl + docs, or a "
    "saved Hugging Face data set",
}


def open_pictures(place: str | Path, kind: str | None = None, **options: Any) -> tuple[str, Sequence[Picture]]:
    """(reader's name, pictures) of a folder or file; ``scenes:100`` draws 100 digit scenes."""
    name = str(place)
    if name == "scenes" or name.startswith("scenes:"):
        count = name.partition(":")[2] or "100"
        if not count.isdigit() or int(count) < 1:
            raise InputError(f"scenes:COUNT needs a number of scenes, not {count!r}")
        return "scenes", scene_objects(int(count), **_fitting(scene_objects, options))
    chosen = kind or _picture_kind(Path(place))
    read = _reader(PICTURE_READERS, chosen)
    return chosen, read(place, **_fitting(read, options))


def open_texts(place: str | Path, kind: str | None = None, **options: Any) -> tuple[str, Texts]:
    """(reader's name, texts) of a folder or file."""
    chosen = kind or _text_kind(Path(place))
    read = _reader(TEXT_READERS, chosen)
    return chosen, read(place, **_fitting(read, options))


def modality_of(place: str | Path) -> str:
    """ "image" or "text", by which kind of reader fits."""
    if str(place).partition(":")[0] == "scenes":
        return "image"
    try:
        _text_kind(Path(place))
    except LayoutError:
        return "image"
    return "text" if not (is_saved(place) and _has_pictures(place)) else "image"


def _has_pictures(place: str | Path) -> bool:
    info = Path(place) / "dataset_info.json"
    return info.is_file() and '"Image"' in info.read_text()


def _fitting(read: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given; one that the reader does not know is refused."""
    given = {k: v for k, v in options.items() if v is not None}
    known = inspect.signature(read).parameters
    for name in given:
        if name not in known:
            raise InputError(f"{read.__name__} data have no {name} to choose")
    return given


def _reader(readers: dict[str, Any], kind: str) -> Any:
    if kind not in readers:
        raise InputError(f"there is no reader '{kind}'; readers: {', '.join(readers)}")
    return readers[kind]


def _picture_kind(place: Path) -> str:
    if (place.is_file() and place.suffix == ".mat") or (place / "gtsegs_ijcv.mat").is_file():
        return "gtsegs"
    if not place.is_dir():
        raise LayoutError(f"no such folder: {place}. Expected {_KINDS['pictures']}")
    if (place / "index.json").is_file():
        return "index"
    if (place / "annotations").is_dir() and (place / "images").is_dir():
        return "pets"
    if any(place.glob("*-idx3-ubyte*")):
        return "mnist"
    if is_saved(place):
        return "saved"
    names = [f.name for f in pictures_in(place)[:20]]
    if names and all(re.match(r"^\d{4}_n\d{8}\.", n) for n in names):
        return "imagenet_samples"
    if names and all(n.startswith("ILSVRC2012_val_") for n in names):
        return "imagenet_validation"
    if names:
        raise LayoutError(f"{place}: expected {_KINDS['pictures']}; found pictures without labels ({listing(place)})")
    if any(p.is_dir() for p in place.iterdir()):
        return "class_folders"
    raise LayoutError(f"{place}: expected {_KINDS['pictures']}; found {listing(place)}")


def _text_kind(place: Path) -> str:
    if place.is_file():
        found = {"bace.csv": "bace"}.get(place.name) or (
            "sst2" if place.suffix == ".tsv" else "meld" if "sent_emo" in place.name else None
        )
        if found:
            return found
        raise LayoutError(f"{place}: expected {_KINDS['texts']}; found a file called {place.name}")
    if not place.is_dir():
        raise LayoutError(f"no such folder: {place}. Expected {_KINDS['texts']}")
    checks: list[tuple[str, bool]] = [
        ("eraser", (place / "docs").is_dir() and any(place.glob("*.jsonl"))),
        ("bace", (place / "bace.csv").is_file()),
        ("sst2", any(place.glob("*.tsv"))),
        ("tweeteval", (place / "mapping.txt").is_file()),
        ("meld", any(place.glob("*_sent_emo.csv"))),
        ("imdb", (place / "neg").is_dir() or (place / "test" / "neg").is_dir()),
        ("saved", is_saved(place)),
    ]
    for name, fits in checks:
        if fits:
            return name
    raise LayoutError(f"{place}: expected {_KINDS['texts']}; found {listing(place)}")

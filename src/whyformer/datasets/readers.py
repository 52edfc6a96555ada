"""Choose a reader by the layout of a folder, for ``whyformer benchmark --data``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from whyformer.datasets.labelled import class_folders, imagenet_samples, imagenet_validation, mnist
from whyformer.datasets.masks import imagenet_segmentation, indexed_masks, oxford_pets, scene_objects
from whyformer.datasets.samples import LayoutError, Picture, Texts, pictures_in, wrong_layout
from whyformer.datasets.saved import is_saved, saved_pictures, saved_texts
from whyformer.datasets.texts import bace, eraser, imdb, meld, sst2, tweeteval
from whyformer.errors import InputError


def _named(pattern: str) -> Callable[[Path], bool]:
    """Return a function that is True if the names of the first pictures of a folder match ``pattern``."""

    def fits(place: Path) -> bool:
        names = [f.name for f in pictures_in(place)[:20]]
        return bool(names) and all(re.match(pattern, name) for name in names)

    return fits


Fits = Callable[[Path], bool]
PICTURE_READERS: dict[str, tuple[Callable[..., Sequence[Picture]], Fits]] = {
    "gtsegs": (imagenet_segmentation, lambda p: p.suffix == ".mat" or (p / "gtsegs_ijcv.mat").is_file()),
    "index": (indexed_masks, lambda p: (p / "index.json").is_file()),
    "pets": (oxford_pets, lambda p: (p / "annotations").is_dir() and (p / "images").is_dir()),
    "mnist": (mnist, lambda p: any(p.glob("*-idx3-ubyte*"))),
    "saved": (saved_pictures, is_saved),
    "imagenet_samples": (imagenet_samples, _named(r"\d{4}_n\d{8}\.")),
    "imagenet_validation": (imagenet_validation, _named("ILSVRC2012_val_")),
    "class_folders": (class_folders, lambda p: not pictures_in(p) and any(p.glob("*/"))),
}
TEXT_READERS: dict[str, tuple[Callable[..., Texts], Fits]] = {
    "eraser": (eraser, lambda p: (p / "docs").is_dir() and any(p.glob("*.jsonl"))),
    "bace": (bace, lambda p: p.name == "bace.csv" or (p / "bace.csv").is_file()),
    "sst2": (sst2, lambda p: p.suffix == ".tsv" or any(p.glob("*.tsv"))),
    "tweeteval": (tweeteval, lambda p: (p / "mapping.txt").is_file()),
    "meld": (meld, lambda p: "sent_emo" in p.name or any(p.glob("*_sent_emo.csv"))),
    "imdb": (imdb, lambda p: (p / "neg").is_dir() or (p / "test" / "neg").is_dir()),
    "saved": (saved_texts, is_saved),
}
"""Name -> (reader, function that is True for a folder or file of its layout), the most specific first."""
_PICTURES = (
    "a folder named like imagenet_samples, class folders, ImageNet's validation folder with its devkit, index.json "
    "with masks, gtsegs_ijcv.mat, Oxford pets, MNIST idx files, a saved Hugging Face data set, or scenes:COUNT"
)
_TEXTS = (
    "SST-2 tsv, IMDB neg/ and pos/, bace.csv, a TweetEval task, MELD csv, ERASER jsonl + docs, or a saved Hugging Face "
    "data set"
)


def open_pictures(place: str | Path, kind: str | None = None, **options: Any) -> tuple[str, Sequence[Picture]]:
    """Return (name of the reader, pictures) of a folder or file; ``scenes:100`` generates 100 digit scenes."""
    name = str(place)
    if name == "scenes" or name.startswith("scenes:"):
        count = name.partition(":")[2] or "100"
        if not count.isdecimal() or int(count) < 1:
            raise InputError(f"scenes:COUNT needs a number of scenes, not {count!r}")
        return "scenes", scene_objects(int(count), **_fitting(scene_objects, options))
    return _open(PICTURE_READERS, place, kind, _PICTURES, options)


def open_texts(place: str | Path, kind: str | None = None, **options: Any) -> tuple[str, Texts]:
    """Return (name of the reader, texts) of a folder or file."""
    return _open(TEXT_READERS, place, kind, _TEXTS, options)


def modality_of(place: str | Path) -> str:
    """Return "image" or "text", according to the readers that fit."""
    info = Path(place) / "dataset_info.json"
    pictures = str(place).partition(":")[0] == "scenes" or (info.is_file() and '"Image"' in info.read_text())
    return "image" if pictures or _reader_name(TEXT_READERS, Path(place)) is None else "text"


def _open(
    readers: dict[str, tuple[Any, Fits]], place: str | Path, kind: str | None, expected: str, options: dict[str, Any]
) -> tuple[str, Any]:
    path = Path(place)
    name = kind or _reader_name(readers, path)
    if name is None and not path.exists():
        raise LayoutError(f"no such folder: {path}. Expected {expected}")
    if name is None:
        unlabelled = path.is_dir() and pictures_in(path)
        raise wrong_layout(path, expected, "pictures without labels" if unlabelled else None)
    if name not in readers:
        raise InputError(f"there is no reader '{name}'; readers: {', '.join(readers)}")
    read = readers[name][0]
    return name, read(place, **_fitting(read, options))


def _reader_name(readers: dict[str, tuple[Any, Fits]], place: Path) -> str | None:
    return next((name for name, (_, fits) in readers.items() if place.exists() and fits(place)), None)


def _fitting(read: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that are not None, after checking that the reader has them."""
    passed_options = {k: v for k, v in options.items() if v is not None}
    for name in passed_options:
        if name not in inspect.signature(read).parameters:
            raise InputError(f"{read.__name__} has no option {name}")
    return passed_options

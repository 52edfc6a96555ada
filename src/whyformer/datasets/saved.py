"""Readers of Hugging Face data sets on disk (``Dataset.save_to_disk``, or a folder of parquet files)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from whyformer.datasets.samples import Picture, Text, Texts, layout_errors, require_folder, wrong_layout
from whyformer.errors import InputError, MissingExtra, import_optional
from whyformer.inputs.pictures import as_rgb

_IMAGES = ("image", "img", "picture")
_TEXTS = ("text", "sentence", "review", "content")
_LABELS = ("label", "labels", "fine_label")


def is_saved(path: str | Path) -> bool:
    """Return True if a folder looks like a saved data set."""
    names = ("dataset_info.json", "dataset_dict.json", "state.json", "*.parquet")
    return any(any(Path(path).glob(name)) for name in names)


@layout_errors
def saved_pictures(path: str | Path, split: str | None = None) -> list[Picture]:
    """Read rows with an image column (image, img, picture) and an optional label column."""
    data, column, labels = _open(path, split, _IMAGES)
    return [Picture(f"row-{i}", partial(_image, data, i, column), label) for i, label in enumerate(labels)]


@layout_errors
def saved_texts(path: str | Path, split: str | None = None) -> Texts:
    """Read rows with a text column (text, sentence, review, content) and an optional label column."""
    data, column, labels = _open(path, split, _TEXTS)
    feature = next((data.features[n] for n in _LABELS if n in data.column_names), None)
    pairs = enumerate(zip(data[column], labels, strict=True))
    items = tuple(Text(f"row-{i}", str(text), label) for i, (text, label) in pairs if str(text).strip())
    return Texts(items, tuple(getattr(feature, "names", None) or ()))


def _open(path: str | Path, split: str | None, columns: tuple[str, ...]) -> tuple[Any, str, list[int | None]]:
    """Return the rows, the first existing of ``columns``, and the label of each row."""
    data = _rows(path, split)
    column, label = (next((n for n in names if n in data.column_names), None) for names in (columns, _LABELS))
    if column is None:
        raise wrong_layout(Path(path), f"a column named {' or '.join(columns)}", ", ".join(data.column_names))
    return data, column, [None] * len(data) if label is None else [_class(value, Path(path)) for value in data[label]]


def _class(value: Any, place: Path) -> int | None:
    """Return the index of a class; None for an unlabelled row, such as the label −1 of hidden test labels."""
    if value is None or value == -1:
        return None
    if int(value) != value or value < 0:
        raise wrong_layout(place, "indices of classes as labels", f"the label {value}")
    return int(value)


def _rows(path: str | Path, split: str | None) -> Any:
    expected = "a folder that Dataset.save_to_disk wrote, or parquet files"
    folder = require_folder(path, expected)
    if not is_saved(folder):
        raise wrong_layout(folder, expected)
    datasets = import_optional("datasets", "reading a Hugging Face data set", "data")
    if not hasattr(datasets, "load_from_disk"):  # an unrelated folder "datasets" on the path was imported
        raise MissingExtra("a folder named datasets on the Python path hides the package datasets: rename the folder")
    tables = sorted(map(str, folder.glob("*.parquet")))
    data = datasets.Dataset.from_parquet(tables) if tables else datasets.load_from_disk(str(folder))
    return one_split(data, split, str(folder), "split=")


def one_split(data: Any, split: str | None, name: str, way: str) -> Any:
    """Return a split of a Hugging Face data set, or the data set itself if it has no splits and none is named.

    Args:
        data: the data set.
        split: name of the split; may be omitted if there is only one.
        name: name of the data set, for error messages.
        way: how to choose a split, for error messages.

    Raises:
        InputError: there is no such split, or the choice among several is missing.
    """
    if not hasattr(data, "keys"):
        if split:
            raise InputError(f"{name} has no splits, so there is no '{split}'")
        return data
    if (split or len(data) > 1) and split not in data:
        raise InputError(f"{name} has the splits {', '.join(data)}: choose one with {way}")
    return data[split or next(iter(data))]


def _image(data: Any, index: int, column: str) -> Image.Image:
    value = data[index][column]
    if not isinstance(value, Image.Image):
        raise InputError(f"row {index}: column {column} must hold a picture, not {type(value).__name__}")
    return as_rgb(value)

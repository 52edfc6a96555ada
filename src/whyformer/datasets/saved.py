"""Any Hugging Face data set on disk (``Dataset.save_to_disk``, or a folder of parquet files)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from whyformer.datasets.samples import Picture, Text, Texts, needed, require_folder, told, wrong_layout
from whyformer.errors import InputError, MissingExtra
from whyformer.inputs.pictures import as_rgb

_IMAGES = ("image", "img", "picture")
_TEXTS = ("text", "sentence", "review", "content")
_LABELS = ("label", "labels", "fine_label")


def is_saved(path: str | Path) -> bool:
    """Whether a folder looks like one of these."""
    names = ("dataset_info.json", "dataset_dict.json", "state.json", "*.parquet")
    return any(any(Path(path).glob(name)) for name in names)


@told
def saved_pictures(path: str | Path, split: str | None = None) -> list[Picture]:
    """Rows with an image column (image, img) and, where present, a label column."""
    data, column, labels = _open(path, split, _IMAGES)
    return [Picture(f"row-{i}", partial(_image, data, i, column), label) for i, label in enumerate(labels)]


@told
def saved_texts(path: str | Path, split: str | None = None) -> Texts:
    """Rows with a text column (text, sentence, review) and, where present, a label column."""
    data, column, labels = _open(path, split, _TEXTS)
    named = next((data.features[n] for n in _LABELS if n in data.column_names), None)
    pairs = enumerate(zip(data[column], labels, strict=True))
    items = tuple(Text(f"row-{i}", str(text), label) for i, (text, label) in pairs if str(text).strip())
    return Texts(items, tuple(getattr(named, "names", None) or ()))


def _open(path: str | Path, split: str | None, columns: tuple[str, ...]) -> tuple[Any, str, list[int | None]]:
    """(the rows, the first of these columns that they have, the label of each row)."""
    data = _rows(path, split)
    column, label = (next((n for n in names if n in data.column_names), None) for names in (columns, _LABELS))
    if column is None:
        raise wrong_layout(Path(path), f"a column named {' or '.join(columns)}", ", ".join(data.column_names))
    return data, column, [None] * len(data) if label is None else [int(value) for value in data[label]]


def _rows(path: str | Path, split: str | None) -> Any:
    expected = "a folder that Dataset.save_to_disk wrote, or parquet files"
    folder = require_folder(path, expected)
    if not is_saved(folder):
        raise wrong_layout(folder, expected)
    datasets = needed("datasets", "reading a Hugging Face data set")
    if not hasattr(datasets, "load_from_disk"):  # a folder of that name on the path imports too, and is not it
        raise MissingExtra("the package datasets is hidden by a folder of that name beside the program")
    if any(folder.glob("*.parquet")):
        return datasets.Dataset.from_parquet([str(p) for p in sorted(folder.glob("*.parquet"))])
    data = datasets.load_from_disk(str(folder))
    if not hasattr(data, "keys"):
        return data
    if split is None and len(data) > 1:
        raise InputError(f"{folder} holds the splits {', '.join(data)}; say which")
    chosen = split or next(iter(data))
    if chosen not in data:
        raise wrong_layout(folder, f"the split {chosen}", ", ".join(data))
    return data[chosen]


def _image(data: Any, index: int, column: str) -> Image.Image:
    value = data[index][column]
    if not isinstance(value, Image.Image):
        raise InputError(f"row {index}: expected a picture in column {column}; found {type(value).__name__}")
    return as_rgb(value)

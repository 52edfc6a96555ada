"""Any Hugging Face data set on disk (``Dataset.save_to_disk``, or a folder of parquet files)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from whyformer.datasets.samples import Picture, Text, Texts, needed, require_folder, wrong_layout
from whyformer.errors import InputError, MissingExtra
from whyformer.inputs.pictures import as_rgb

_IMAGES = ("image", "img", "picture")
_TEXTS = ("text", "sentence", "review", "content")
_LABELS = ("label", "labels", "fine_label")


def is_saved(path: str | Path) -> bool:
    """Whether a folder looks like one of these."""
    names = ("dataset_info.json", "dataset_dict.json", "state.json", "*.parquet")
    return any(any(Path(path).glob(name)) for name in names)


def saved_pictures(path: str | Path, split: str | None = None) -> list[Picture]:
    """Rows with an image column (image, img) and, where present, a label column."""
    data, place = _open(path, split), Path(path)
    column, label = _column(data, _IMAGES, place), _optional(data, _LABELS)
    return [
        Picture(f"row-{i}", partial(_image, data, i, column), None if label is None else int(data[i][label]))
        for i in range(len(data))
    ]


def saved_texts(path: str | Path, split: str | None = None) -> Texts:
    """Rows with a text column (text, sentence, review) and, where present, a label column."""
    data, place = _open(path, split), Path(path)
    column, label = _column(data, _TEXTS, place), _optional(data, _LABELS)
    names = tuple(getattr(data.features[label], "names", None) or ()) if label else ()
    items = (
        Text(f"row-{i}", str(row[column]), None if label is None else int(row[label])) for i, row in enumerate(data)
    )
    return Texts(tuple(t for t in items if t.text.strip()), names)


def _open(path: str | Path, split: str | None) -> Any:
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


def _optional(data: Any, names: tuple[str, ...]) -> str | None:
    return next((n for n in names if n in data.column_names), None)


def _column(data: Any, names: tuple[str, ...], place: Path) -> str:
    found = _optional(data, names)
    if found is None:
        raise wrong_layout(place, f"a column named {' or '.join(names)}", ", ".join(data.column_names))
    return found


def _image(data: Any, index: int, column: str) -> Image.Image:
    value = data[index][column]
    if not isinstance(value, Image.Image):
        raise InputError(f"row {index}: expected a picture in column {column}; found {type(value).__name__}")
    return as_rgb(value)

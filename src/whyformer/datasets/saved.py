"""Any Hugging Face data set on disk (``Dataset.save_to_disk``, or a folder of parquet files)."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from whyformer.datasets.samples import LayoutError, Picture, Text, Texts, require_folder, wrong_layout
from whyformer.errors import MissingExtra
from whyformer.inputs.pictures import as_rgb

_IMAGES, _TEXTS, _LABELS = (
    ("image", "img", "picture"),
    ("text", "sentence", "review", "content"),
    ("label", "labels", "fine_label"),
)


def is_saved(path: str | Path) -> bool:
    """Whether a folder looks like one of these."""
    folder = Path(path)
    return (
        folder.is_dir()
        and any((folder / name).exists() for name in ("dataset_info.json", "dataset_dict.json", "state.json"))
    ) or (folder.is_dir() and any(folder.glob("*.parquet")))


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
    try:
        datasets: Any = importlib.import_module("datasets")
        datasets.load_from_disk  # noqa: B018 - a folder called datasets on the path imports too, and is not it
    except (ImportError, AttributeError) as error:
        raise MissingExtra(
            'reading a Hugging Face data set needs the package datasets: pip install "whyformer[data]"'
        ) from error
    if any(folder.glob("*.parquet")):
        return datasets.Dataset.from_parquet([str(p) for p in sorted(folder.glob("*.parquet"))])
    data = datasets.load_from_disk(str(folder))
    if not hasattr(data, "keys"):
        return data
    if split is None and len(data) > 1:
        raise LayoutError(f"{folder}: it holds the splits {', '.join(data)}; say which")
    chosen = split or next(iter(data))
    if chosen not in data:
        raise LayoutError(f"{folder}: expected the split {chosen}; found {', '.join(data)}")
    return data[chosen]


def _optional(data: Any, names: tuple[str, ...]) -> str | None:
    return next((n for n in names if n in data.column_names), None)


def _column(data: Any, names: tuple[str, ...], place: Path) -> str:
    found = _optional(data, names)
    if found is None:
        raise LayoutError(
            f"{place}: expected a column named {' or '.join(names)}; found {', '.join(data.column_names)}"
        )
    return found


def _image(data: Any, index: int, column: str) -> Image.Image:
    value = data[index][column]
    if not isinstance(value, Image.Image):
        raise LayoutError(f"row {index}: expected a picture in column {column}; found {type(value).__name__}")
    return as_rgb(value)

"""What the readers give: pictures and texts with their truth, and the error for a folder in the wrong layout."""

from __future__ import annotations

import csv
import importlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from whyformer.errors import InputError, MissingExtra, WhyformerError

PICTURE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")


class LayoutError(InputError):
    """The data are not laid out as the reader expects; the message says what was expected and what was found."""


@dataclass(frozen=True)
class Picture:
    """A picture, read when asked for.

    Attributes:
        id: the same for the same picture in every run.
        load: reads the picture (RGB).
        label: class index in the model's classes, None if the data say nothing about it.
        mask: reads the object's mask ``[H, W]`` (true = object), None if there is none.
    """

    id: str
    load: Callable[[], Image.Image] = field(repr=False)
    label: int | None = None
    mask: Callable[[], NDArray[np.bool_]] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Text:
    """A text.

    Attributes:
        label: class index in the order of the data set's own label list.
        words: its words, where the data set splits it; ``text`` is then the words joined by spaces.
        rationale: one flag a word, true where people marked it; None if there is none.
    """

    id: str
    text: str
    label: int | None = None
    words: tuple[str, ...] | None = None
    rationale: tuple[bool, ...] | None = None


@dataclass(frozen=True)
class Texts(Sequence[Text]):
    """Texts with the names of their labels, in order."""

    items: tuple[Text, ...]
    labels: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # int -> Text, slice -> tuple
        return self.items[index]


def require_folder(path: str | Path, expected: str) -> Path:
    """The folder, or an error that says what was expected there."""
    folder = Path(path)
    if not folder.is_dir():
        raise LayoutError(f"no such folder: {path}. Expected {expected}")
    return folder


def require_file(path: str | Path, expected: str) -> Path:
    """The file, or an error that says what was expected and what lies beside it."""
    file = Path(path)
    if not file.is_file():
        raise wrong_layout(file.parent, expected, f"no {file.name}")
    return file


def wrong_layout(place: Path, expected: str, found: str | None = None) -> LayoutError:
    """The error for data laid out otherwise; of a folder it lists what lies in it."""
    beside = "" if place.is_file() else f" ({listing(place)})"
    return LayoutError(f"{place}: expected {expected}; found {found + beside if found else listing(place)}")


def needed(package: str, what: str) -> Any:
    """An optional library, or an error that says how to install it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = package.partition(".")[0]
        raise MissingExtra(f'{what} needs the package {name}: pip install "whyformer[data]"') from error


Made = TypeVar("Made")
Given = ParamSpec("Given")


def told(reader: Callable[Given, Made]) -> Callable[Given, Made]:
    """A reader of damaged files: whatever it stumbles over is a LayoutError that names the place."""

    @wraps(reader)
    def read(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        try:
            return reader(*args, **kwargs)
        except WhyformerError:
            raise
        except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, EOFError,
                RecursionError, csv.Error, struct.error) as error:  # fmt: skip
            place = args[0] if args else kwargs.get("path")
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise LayoutError(f"{place} cannot be read as {reader.__name__} ({said})") from error

    return read


def listing(folder: Path, count: int = 5) -> str:
    if not folder.exists():
        return "no such folder"
    if folder.is_file():
        return f"a file of {folder.stat().st_size} bytes"
    names = sorted(p.name + ("/" if p.is_dir() else "") for p in folder.iterdir())
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more or "an empty folder"


def pictures_in(folder: Path) -> list[Path]:
    """The pictures directly in a folder, by name; none of a file."""
    return sorted(p for p in folder.glob("*") if p.suffix.lower() in PICTURE_SUFFIXES)

"""Samples that readers return: pictures and texts with labels, masks and rationales."""

from __future__ import annotations

import csv
import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from whyformer.errors import InputError, WhyformerError
from whyformer.inputs.pictures import SUFFIXES


class LayoutError(InputError):
    """The data do not have the layout that a reader expects; the message names the expected and the actual layout."""


@dataclass(frozen=True)
class Picture:
    """A picture that is read lazily.

    Attributes:
        id: identifier, equal in all runs.
        load: function that reads the picture (RGB).
        label: index of the class in the model; None if it is unknown.
        mask: function that reads the mask of the object ``[H, W]`` (True = object); None if there is none.
    """

    id: str
    load: Callable[[], Image.Image] = field(repr=False)
    label: int | None = None
    mask: Callable[[], NDArray[np.bool_]] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Text:
    """A text.

    Attributes:
        id: identifier, equal in all runs.
        text: the text.
        label: index of the class in the label list of the data set; None if it is unknown.
        words: words of the text, joined by spaces, if the data set defines words; otherwise None.
        rationale: flag for each word, True if annotators marked it; None if there is none.
    """

    id: str
    text: str
    label: int | None = None
    words: tuple[str, ...] | None = None
    rationale: tuple[bool, ...] | None = None


@dataclass(frozen=True)
class Texts(Sequence[Text]):
    """Texts with the names of their labels in order."""

    items: tuple[Text, ...]
    labels: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # int -> Text, slice -> tuple
        return self.items[index]


def content_digest(sample: Any) -> str:
    """Return a digest of a sample: its text, or the sizes of its picture's files as for jobs, and its label, words and
    rationale."""
    facts = [getattr(sample, name, None) for name in ("text", "label", "words", "rationale")]
    for read in (getattr(sample, "load", None), getattr(sample, "mask", None)):
        for part in getattr(read, "args", ()):  # of functools.partial
            if isinstance(part, Path):
                facts.append(part.stat().st_size if part.is_file() else None)
            elif isinstance(part, np.ndarray):
                facts.append(part.tobytes())
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


def require_folder(path: str | Path, expected: str) -> Path:
    """Return the folder.

    Raises:
        LayoutError: it does not exist; the message describes the ``expected`` content.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise LayoutError(f"no such folder: {path}. Expected {expected}")
    return folder


def require_file(path: str | Path, expected: str) -> Path:
    """Return the file.

    Raises:
        LayoutError: it does not exist; the message describes the ``expected`` content and lists the folder.
    """
    file = Path(path)
    if not file.is_file():
        raise wrong_layout(file.parent, expected, f"no {file.name}")
    return file


def wrong_layout(place: Path, expected: str, actual: str | None = None) -> LayoutError:
    """Return the error for a wrong layout, which lists the content of a folder unless ``actual`` describes it."""
    content = "" if place.is_file() else f" ({listing(place)})"
    return LayoutError(f"{place}: expected {expected}; found {actual + content if actual else listing(place)}")


Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


def layout_errors(reader: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a reader to turn errors of damaged files into LayoutError that names the data."""

    @wraps(reader)
    def read(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return reader(*args, **kwargs)
        except WhyformerError:
            raise
        except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, EOFError,
                RecursionError, csv.Error, struct.error) as error:  # fmt: skip
            place = args[0] if args else kwargs.get("path")
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise LayoutError(f"{place} cannot be read as {reader.__name__} ({reason})") from error

    return read


def listing(folder: Path, count: int = 5) -> str:
    """Describe the content of a folder, or a file."""
    if not folder.exists():
        return "no such folder"
    if folder.is_file():
        return f"a file of {folder.stat().st_size} bytes"
    names = sorted(p.name + ("/" if p.is_dir() else "") for p in folder.iterdir())
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more or "an empty folder"


def pictures_in(folder: Path) -> list[Path]:
    """Return the pictures directly in a folder, sorted by name."""
    return sorted(p for p in folder.glob("*") if p.suffix.lower() in SUFFIXES)

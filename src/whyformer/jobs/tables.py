"""Data with columns: their names, checked before any work, and its rows as plain values.

Tables are known by what they offer, so that no library of tables is needed to read none.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from whyformer.errors import InputError

CONTENT = ("text", "sentence", "input", "prompt", "image", "picture", "path", "file")
"""Names of the column that holds the input, the likeliest first, where none is named."""
TENSORS = ("input_ids", "pixel_values")
"""Names of columns that the model's forward takes as they are."""
_SLICE = 256


def column_names(data: Any) -> list[Any] | None:
    """The names of the columns of data in Python; None where it has none, or only its rows say which.

    Of a DataFrame of pandas, a table of Arrow, a data set of Hugging Face, and a list of mappings: of all of them.
    """
    if hasattr(data, "iloc"):
        return list(data.columns) if hasattr(data, "columns") else None
    if isinstance(data, list | tuple):
        listed = bool(data) and all(isinstance(one, Mapping) for one in data)
        return list(dict.fromkeys(itertools.chain.from_iterable(data))) if listed else None
    form, names = getattr(data, "format", None), getattr(data, "column_names", None)
    if isinstance(form, Mapping) and form.get("type") == "custom":  # a transform gives rows of other columns
        return None
    return names if isinstance(names, list) else None


def check_columns(
    name: str, there: Iterable[Any], column: str | None, id_column: str | None, content: tuple[str, ...] = CONTENT
) -> None:
    """Refuse columns that are not there.

    Args:
        name: what the data is called; there: the names of its columns.
        content: names of which one must be there, where no ``column`` is named.

    Raises:
        InputError: with the columns that are there.
    """
    names = list(there)
    listed = ", ".join(map(repr, names)) or "none"
    for wanted in (column, id_column):
        if wanted is not None and wanted not in names:
            raise InputError(f"{name} has no column {wanted!r}; it has {listed}")
    if column is None and not any(one in names for one in content):
        raise InputError(f"which column of {name} is the input? It has {listed}: name it with column")


def check_data(data: Any, column: str | None, id_column: str | None) -> None:
    """Refuse columns that data in Python does not have, as far as it says without being read.

    Raises:
        InputError: with the columns that are there.
    """
    names = column_names(data)
    if names is not None:
        check_columns(described(data), names, column, id_column, (*CONTENT, *TENSORS))


def described(data: Any) -> str:
    """What an error calls data in Python."""
    return f"the {type(data).__name__}"


def is_sliced(data: Any) -> bool:
    """Whether this is a table or a column of pandas or Arrow, which gives its rows in slices."""
    return hasattr(data, "iloc") or (hasattr(data, "to_pylist") and hasattr(data, "slice"))


def sliced(data: Any, start: int) -> Iterator[Any]:
    """The rows of such data as plain values, None where one is missing: mappings of a table, values of a column."""
    for at in range(start, len(data), _SLICE):
        if not hasattr(data, "iloc"):
            yield from data.slice(at, _SLICE).to_pylist()
            continue
        part = data.iloc[at : at + _SLICE]
        part = part.astype(object).where(part.notna(), None)
        yield from part.to_dict("records") if hasattr(part, "columns") else part.tolist()

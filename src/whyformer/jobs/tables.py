"""Data with columns: validation of column names, and rows as plain values.

Tables are recognized by their attributes, so that no table library has to be imported.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from whyformer.errors import InputError

CONTENT = ("text", "sentence", "input", "prompt", "image", "picture", "path", "file")
"""Default names of the column that holds the input, in order of preference."""
TENSORS = ("input_ids", "pixel_values")
"""Names of columns that are arguments of the model's forward."""
_SLICE = 256


def column_names(data: Any) -> list[Any] | None:
    """Return the column names of a pandas DataFrame, an Arrow table, a Hugging Face data set or a list of mappings.

    The result is None if the data has no columns, or if they are known only from its rows.
    """
    if hasattr(data, "iloc"):
        return list(data.columns) if hasattr(data, "columns") else None
    if isinstance(data, list | tuple):
        are_rows = bool(data) and all(isinstance(item, Mapping) for item in data)
        return list(dict.fromkeys(itertools.chain.from_iterable(data))) if are_rows else None
    form, names = getattr(data, "format", None), getattr(data, "column_names", None)
    if isinstance(form, Mapping) and form.get("type") == "custom":  # a transform may change the columns
        return None
    return names if isinstance(names, list) else None


def check_columns(
    name: str, existing: Iterable[Any], column: str | None, id_column: str | None, content: tuple[str, ...] = CONTENT
) -> None:
    """Check that the named columns exist.

    Args:
        name: name of the data, for error messages.
        existing: names of its columns.
        column: column that holds the input.
        id_column: column that identifies a row.
        content: names of which at least one must exist if ``column`` is None.

    Raises:
        InputError: a column does not exist; the message lists the existing columns.
    """
    names = list(existing)
    listing = ", ".join(map(repr, names)) or "none"
    for required in (column, id_column):
        if required is not None and required not in names:
            raise InputError(f"{name} has no column {required!r}; it has {listing}")
    if column is None and not any(default in names for default in content):
        raise InputError(
            f"{name} has no column with a default name of the input (text, image, path ...); it has {listing}: name "
            "that of the input with column="
        )


def check_data(data: Any, column: str | None, id_column: str | None) -> None:
    """Check that the named columns of Python data exist, if its columns are known without reading it.

    Raises:
        InputError: a column does not exist, and the message lists the existing columns; or ``column`` is a list.
    """
    if isinstance(column, list):
        raise InputError(
            f"column= takes the name of one column, not {column!r}; for pairs of texts, rename their columns to 'text' "
            "and 'text_pair', and omit column="
        )
    names = column_names(data)
    if names is not None:
        check_columns(described(data), names, column, id_column, (*CONTENT, *TENSORS))


def described(data: Any) -> str:
    """Return the name of Python data for error messages."""
    return f"the {type(data).__name__}"


def is_sliced(data: Any) -> bool:
    """Return True for a table or a column of pandas or Arrow, whose rows are read in slices."""
    return hasattr(data, "iloc") or (hasattr(data, "to_pylist") and hasattr(data, "slice"))


def sliced(data: Any, start: int) -> Iterator[Any]:
    """Yield rows as plain values: mappings of a table, values of a column; missing values are None."""
    for first in range(start, len(data), _SLICE):
        if not hasattr(data, "iloc"):
            yield from data.slice(first, _SLICE).to_pylist()
            continue
        part = data.iloc[first : first + _SLICE]
        part = part.astype(object).where(part.notna(), None)
        yield from part.to_dict("records") if hasattr(part, "columns") else part.tolist()

"""The rows of a job: one input each with its other columns, read lazily."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from whyformer.errors import InputError
from whyformer.inputs.argument import checksum, decoded, read_file
from whyformer.inputs.normalize import raw_picture
from whyformer.inputs.pictures import is_picture_name, open_picture
from whyformer.jobs.tables import CONTENT, TENSORS, check_columns, described, is_sliced, sliced
from whyformer.targets.reading import to_python

PAIR = "text_pair"
"""Column of the second text beside "text", for models that read pairs of texts."""
_FILES = ("image", "picture", "path", "file")


@dataclass(frozen=True)
class Row:
    """One input.

    Attributes:
        index: index in the input, from 0.
        id: file name relative to the folder, value of the id column, or index.
        read: function that returns the picture, the text, or a mapping of tensors with a batch axis of 1, or raises.
        columns: the other columns, for targets such as ``"column:label"``.
    """

    index: int
    id: str
    read: Callable[[], Any] = field(repr=False)
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """A source of rows.

    Attributes:
        name: name of the input, as passed by the user.
        rows: function of the index of the first row that returns an iterator from there.
        count: number of rows; None if it is unknown.
        digest: digest that distinguishes this input from others; None if there is none.
        sequential: True if a row can only be reached by reading all rows before it.
    """

    name: str
    rows: Callable[[int], Iterator[Row]]
    count: int | None = None
    digest: str | None = None
    sequential: bool = False


# -- Python objects ---------------------------------------------------------------------------------------
def from_python(data: Any, column: str | None = None, id_column: str | None = None, files: bool = True) -> Source:
    """Return the rows of an iterable: a list, a generator, a table, a ``Dataset``, or the samples of a ``DataLoader``.

    Args:
        data: items are pictures, arrays, files, texts, tensors of one sample, mappings (columns, or tensors for the
            model's forward), or (item, label) pairs.
        column: column, or key of a mapping, that holds the input; by default the first existing of
            :data:`whyformer.jobs.tables.CONTENT`.
        id_column: column that identifies a row.
        files: treat a text that ends like the name of a picture as a file name.

    Raises:
        InputError: ``data`` is not iterable.
    """
    if isinstance(data, Mapping | Tensor) or not (isinstance(data, Iterable) or hasattr(data, "__getitem__")):
        raise InputError(
            f"data must be an iterable, a Dataset, a DataLoader, a folder or files; not {type(data).__name__}"
        )
    loader = isinstance(data, torch.utils.data.DataLoader)
    count = None if loader or not isinstance(data, Sized) else len(data)
    single_pass = _SinglePass(data) if isinstance(data, Iterator) else None
    indexable = hasattr(data, "__getitem__") and not isinstance(data, torch.utils.data.IterableDataset)

    def rows(start: int) -> Iterator[Row]:
        if single_pass is not None:
            items: Iterator[Any] = single_pass.items(start)
        elif loader:
            items = itertools.islice(itertools.chain.from_iterable(map(_samples_of, data)), start, None)
        elif is_sliced(data):
            items = sliced(data, start)
        elif indexable:
            items = _from(data, start)
        else:
            items = itertools.islice(data, start, None)
        for index, item in enumerate(items, start):
            if index == 0 and isinstance(item, Mapping) and not isinstance(data, list | tuple):
                check_columns(described(data), item, column, id_column, (*CONTENT, *TENSORS))
            yield from_item(index, item, column, id_column, files)

    are_files = isinstance(data, list | tuple) and all(isinstance(item, str | Path) for item in data)
    digest = hashlib.sha256(json.dumps([str(item) for item in data]).encode()).hexdigest() if are_files else None
    sequential = single_pass is not None or loader or not (is_sliced(data) or indexable)
    return Source(type(data).__name__, rows, count, digest, sequential)


HEAD = 64
"""Number of an iterator's first items that are stored, because a trial reads them before the run."""


@dataclass
class _SinglePass:
    """An iterator that can be read only once, such as a generator or a stream."""

    data: Iterator[Any]
    head: list[Any] = field(default_factory=list)
    count: int = 0

    def items(self, start: int) -> Iterator[Any]:
        """Yield the items from index ``start``.

        Raises:
            InputError: an item was read before and is not stored.
        """
        for at in itertools.count(start):
            if at >= len(self.head) and at < self.count:
                raise InputError(
                    f"item {at} of an iterator cannot be read twice: pass a list or a Dataset instead"
                )
            while at >= self.count:
                try:
                    item = next(self.data)
                except StopIteration:
                    return
                self.count += 1
                if self.count <= HEAD:
                    self.head.append(item)
            yield self.head[at] if at < len(self.head) else item


def _from(data: Any, start: int) -> Iterator[Any]:
    """Yield the items of an indexable object from ``start``; an exception of an item is a failure of its row."""
    last = len(data) if isinstance(data, Sized) else None
    for index in itertools.count(start) if last is None else range(start, last):
        try:
            item = data[index]
        except Exception as error:
            if last is None and isinstance(error, IndexError):
                return
            item = failed_row(index, error)
        yield item


def _samples_of(batch: Any) -> Iterator[Any]:
    """Yield the samples of one batch of a ``DataLoader``."""
    if isinstance(batch, Mapping):
        names, columns = list(batch), [list(_items(v)) for v in batch.values()]
        yield from (dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True))
    elif isinstance(batch, list | tuple) and batch and isinstance(batch[0], Tensor | list | tuple):
        yield from zip(*map(_items, batch), strict=True)
    else:
        yield from _items(batch)


def _items(value: Any) -> Iterable[Any]:
    return value.unbind(0) if isinstance(value, Tensor) else value


def from_item(
    index: int,
    item: Any,
    column: str | None = None,
    id_column: str | None = None,
    files: bool = True,
    base: Path | None = None,
) -> Row:
    """Return the row of an item; file names are relative to ``base``. Other arguments: :func:`from_python`."""
    if isinstance(item, Row):
        return item
    columns: Mapping[str, Any] = {}
    if isinstance(item, tuple) and len(item) == 2:
        item, columns = item[0], {"label": to_python(item[1])}
    row = _as_row(index, item, columns, column, files, base)
    row_id = item.get(id_column) if isinstance(item, Mapping) and id_column is not None else None
    return row if row_id is None else replace(row, id=str(to_python(row_id)))


def _as_row(
    index: int, item: Any, columns: Mapping[str, Any], column: str | None, files: bool, base: Path | None
) -> Row:
    if isinstance(item, Mapping) and not isinstance(item.get(column or "input_ids", item.get("pixel_values")), Tensor):
        name = column if column is not None else next((c for c in CONTENT if c in item), None)
        if name is None or name not in item:
            return failed_row(index, InputError(_no_column(column, item)), dict(item))
        pair = name == "text" and PAIR in item
        columns = {k: to_python(v) for k, v in item.items() if k != name and not (pair and k == PAIR)}
        files = files and name not in ("text", "sentence", "prompt")
        item = {name: item[name], PAIR: item[PAIR]} if pair else item[name]
        if name in _FILES and isinstance(item, str):
            item = Path(item)
    if isinstance(item, str) and files and is_picture_name(item):
        item = Path(item)
    if isinstance(item, Path):
        path = item if base is None else base / item
        return Row(index, str(item), partial(read_file, path), columns)
    if isinstance(item, Mapping) and any(isinstance(v, Tensor) for v in item.values()):
        columns = {k: to_python(v) for k, v in item.items() if k in ("label", "labels", "id")}
        item = {k: v for k, v in item.items() if k not in columns}
    return Row(index, str(columns.get("id", index)), partial(_content, item), columns)


def _no_column(column: str | None, item: Mapping[str, Any]) -> str:
    missing = "with a default name of the input (text, image, path ...)" if column is None else repr(column)
    way = f"it has {', '.join(map(repr, item))}: name that of the input with column=" if item else "it has none"
    return f"this row has no column {missing}; {way}"


def failed_row(
    index: int, error: Exception, columns: Mapping[str, Any] | None = None, row_id: str | None = None
) -> Row:
    """Return a row that raises an error when it is read; its id is the index by default."""
    return Row(index, str(index) if row_id is None else row_id, partial(_raise, error), columns or {})


def _raise(error: Exception) -> Any:
    raise error


def read_bytes(data: bytes, name: str) -> Any:
    """Decode the picture or the text of a file from its bytes."""
    if is_picture_name(name) or not name.lower().endswith(".txt"):
        return open_picture(io.BytesIO(data))
    return decoded(data, name)


def _content(item: Any) -> Any:
    """Convert an item to a picture, a text or a mapping; tensors get a batch axis of 1."""
    if isinstance(item, bytes):
        return open_picture(io.BytesIO(item))
    if isinstance(item, Mapping) and isinstance(item.get("bytes"), bytes):  # as in picture columns of data sets
        return open_picture(io.BytesIO(item["bytes"]))
    if isinstance(item, Mapping) and isinstance(item.get("path"), str):
        return read_file(Path(item["path"]))
    if hasattr(item, "read"):
        return open_picture(item)
    if (raw := raw_picture(item)) is not None:
        return Image.fromarray(raw)
    if isinstance(item, np.ndarray):
        item = torch.from_numpy(np.ascontiguousarray(item))
    if isinstance(item, Tensor):
        return {"": item if _is_batch([item]) else item[None]}
    if isinstance(item, Mapping) and PAIR in item:
        if not all(isinstance(v, str) and v.strip() for v in item.values()):
            raise InputError(f"text or {PAIR} is empty")
        return dict(item)
    if isinstance(item, Mapping):
        is_batch = _is_batch([v for v in item.values() if isinstance(v, Tensor)])
        return {k: v[None] if isinstance(v, Tensor) and not is_batch else v for k, v in item.items()}
    if isinstance(item, str):
        if not item.strip():
            raise InputError("the text is empty")
        return item
    if isinstance(item, Image.Image):
        return item
    if item is None:
        raise InputError("the value is missing")
    raise InputError(f"a row must be a picture, a file, a text or tensors, not {type(item).__name__}")


def _is_batch(tensors: list[Tensor]) -> bool:
    """Return whether the tensors of a sample have a batch axis of 1: ids have two axes then, or pictures alone four.
    Others may have an axis of patches or of texts instead, if a picture is packed or compared with several texts."""
    ids = [t for t in tensors if not t.is_floating_point()]
    return min(t.dim() for t in ids or tensors) >= (2 if ids else 4) and any(len(t) == 1 for t in tensors)


def digest_of(content: Any) -> str:
    """Return a digest of a row's content, 16 hexadecimal digits of SHA-256."""
    if not isinstance(content, Mapping):
        return checksum(content)[:16]
    digest = hashlib.sha256()
    for name, value in sorted(content.items()):
        digest.update(f"{name}{getattr(value, 'shape', value)}".encode())
        if isinstance(value, Tensor):
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]

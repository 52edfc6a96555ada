"""Open the ``input`` of a job: a folder, a glob, files, a table, a Hugging Face data set, or a URL of these."""

from __future__ import annotations

import csv
import glob
import hashlib
import io
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from whyformer.datasets.saved import one_split
from whyformer.errors import InputError, LoadError, import_optional
from whyformer.inputs.argument import read_file
from whyformer.inputs.pictures import SUFFIXES
from whyformer.jobs.batching import first_line
from whyformer.jobs.rows import Row, Source, failed_row, from_item, from_python, read_bytes
from whyformer.jobs.tables import check_columns, check_data

TABLES = (".jsonl", ".csv", ".parquet")
_KINDS = "a folder of pictures or .txt files, a glob, a .jsonl, .csv or .parquet file, hf:NAME, or a URL of these"
Open = Callable[[], Any]  # opens a file for reading bytes


def open_source(place: Any, column: str | None = None, id_column: str | None = None, files: bool = True) -> Source:
    """Return the rows of a named input, a list of files, or any iterable.

    Args:
        place: a path, a glob, ``"hf:NAME"`` or a URL; a list of paths; or an iterable, see
            :func:`~whyformer.jobs.rows.from_python`.
        column: column of a table that holds the input; by default one of :data:`whyformer.jobs.tables.CONTENT`.
        id_column: column that identifies a row.
        files: in iterables, treat a text that ends like the name of a picture as a file name.

    Raises:
        LoadError: the input does not exist or cannot be read.
        InputError: the input is of an unsupported kind, or has no rows.
    """
    if isinstance(place, Path):
        place = str(place)
    if isinstance(place, list | tuple) and place and all(isinstance(p, Path) for p in place):
        return _of_files([(str(p), p) for p in place], f"{len(place)} files")
    if not isinstance(place, str):
        return from_python(place, column, id_column, files)
    if place.startswith("hf:"):
        return _of_data_set(place, column, id_column)
    if "://" in place:
        return _of_url(place, column, id_column)
    path = Path(place)
    if path.is_dir():
        if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
            return _of_data_set(f"hf:{place}", column, id_column)
        paths = sorted(p for p in path.rglob("*") if _explained(p.name) and p.is_file())
        return _of_files([(p.relative_to(path).as_posix(), p) for p in paths], place)
    if any(sign in place for sign in "*?["):
        return _of_files([(name, Path(name)) for name in sorted(glob.glob(place, recursive=True))], place)
    if not path.is_file():
        raise LoadError(f"the input {place!r} does not exist: expected {_KINDS}")
    if path.suffix.lower() in TABLES:
        return _of_table(place, partial(path.open, "rb"), path.parent, column, id_column)
    if _explained(path.name):
        return _of_files([(path.name, path)], place)
    raise InputError(f"{place} is not supported as an input: expected {_KINDS}")


def _explained(name: str) -> bool:
    return name.lower().endswith((*SUFFIXES, ".txt")) and not name.startswith(".")


# -- files -----------------------------------------------------------------------------------------------------------
def _of_files(files: Sequence[tuple[str, Path]], name: str) -> Source:
    sizes = [path.stat().st_size if path.is_file() else -1 for _, path in files]
    listing = [(row_id, size) for (row_id, _), size in zip(files, sizes, strict=True)]
    return _of_listing(name, listing, [(row_id, partial(read_file, path)) for row_id, path in files])


def _of_listing(name: str, listing: list[Any], reads: Sequence[tuple[str, Callable[[], Any]]]) -> Source:
    """Return the rows of files with these ids and functions that read them; ``listing`` determines the digest."""
    if not reads:
        raise InputError(f"{name} holds no picture and no .txt file")

    def rows(start: int) -> Iterator[Row]:
        return (Row(index, *reads[index]) for index in range(start, len(reads)))

    return Source(name, rows, len(reads), hashlib.sha256(json.dumps(listing).encode()).hexdigest())


def _of_url(url: str, column: str | None, id_column: str | None) -> Source:
    """Return the rows of files that fsspec can open: s3://, gs://, https://, memory:// ..."""
    fsspec = import_optional("fsspec", f"the input {url}")
    try:
        system, path = fsspec.core.url_to_fs(url)
        if PurePosixPath(path).suffix.lower() in TABLES and "*" not in path:
            return _of_table(url, partial(system.open, path, "rb"), None, column, id_column)
        files = system.glob(path, detail=True) if "*" in path else system.find(path, detail=True)
    except (OSError, ValueError, ImportError) as error:
        raise LoadError(f"cannot open {url}: {error}") from error
    sizes = {name: facts.get("size") for name, facts in sorted(files.items()) if _explained(PurePosixPath(name).name)}
    base = path.partition("*")[0].rpartition("/")[0] if "*" in path else path.rstrip("/")
    ids = {name: name.removeprefix(base).lstrip("/") for name in sizes}
    reads = [(row_id, partial(_fetched, partial(system.open, name, "rb"), row_id)) for name, row_id in ids.items()]
    return _of_listing(url, list(sizes.items()), reads)


def _fetched(open_file: Open, name: str) -> Any:
    try:
        with open_file() as file:
            return read_bytes(file.read(), name)
    except OSError as error:
        raise LoadError(f"cannot read {name}: {error}") from error


# -- tables ----------------------------------------------------------------------------------------------------------
def _of_table(name: str, open_file: Open, base: Path | None, column: str | None, id_column: str | None) -> Source:
    suffix = PurePosixPath(name).suffix.lower()
    read = {".jsonl": _json_lines, ".csv": _csv_rows, ".parquet": _parquet_rows}[suffix]
    with _readable(name):
        with open_file() as file:
            count, digest = _facts(file, suffix)
        with open_file() as file:
            first = next(read(file, 0), None)
    if not count:
        raise InputError(f"{name} has no rows")
    if isinstance(first, dict):
        check_columns(name, first, column, id_column)

    def rows(start: int) -> Iterator[Row]:
        with _readable(name), open_file() as file:
            for index, item in enumerate(read(file, start), start):
                failed = isinstance(item, InputError)
                yield failed_row(index, item) if failed else from_item(index, item, column, id_column, base=base)

    return Source(name, rows, count, digest, sequential=suffix != ".parquet")


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """Turn errors of reading a table into LoadError."""
    try:
        yield
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise LoadError(f"cannot read {name}: {error}") from error


def _facts(raw: Any, suffix: str) -> tuple[int, str]:
    """Return the number of rows of a table, and the SHA-256 of its file, which is read once."""
    if suffix == ".parquet":
        with _parquet(raw) as file:
            count = int(file.metadata.num_rows)
        raw.seek(0)
        return count, hashlib.file_digest(raw, "sha256").hexdigest()
    hashed = _HashedFile(raw)
    with io.BufferedReader(hashed, 2**20) as lines:
        if suffix == ".jsonl":
            count = sum(1 for line in lines if line.strip())
        else:
            reader = csv.reader(io.TextIOWrapper(lines, encoding="utf-8-sig", newline=""))
            next(reader, None)  # the header
            count = sum(1 for cells in reader if cells)
    return count, hashed.digest.hexdigest()


class _HashedFile(io.RawIOBase):
    """A file that is hashed as it is read."""

    def __init__(self, file: Any) -> None:
        self.file, self.digest = file, hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self.file.read(len(buffer))
        self.digest.update(content)
        buffer[: len(content)] = content
        return len(content)


def _json_lines(file: Any, start: int) -> Iterator[Any]:
    """Yield the objects of a .jsonl file, or an error for an invalid line. Empty lines are ignored."""
    lines = (line for line in file if line.strip())
    for line in itertools.islice(lines, start, None):
        try:
            item = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield InputError(f"the line is not valid JSON: {error}")
            continue
        yield item if isinstance(item, dict) else InputError("the line is not a JSON object {...}")


def _csv_rows(file: Any, start: int) -> Iterator[Any]:
    """Yield the rows of a UTF-8 .csv file with a header, or an error for a row of another length."""
    with io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines)
        header = next(reader, [])
        for cells in itertools.islice(filter(None, reader), start, None):
            if len(cells) != len(header):
                yield InputError(f"the row has {len(cells)} cells, and the header has {len(header)}")
                continue
            yield dict(zip(header, cells, strict=True))


def _parquet_rows(raw: Any, start: int) -> Iterator[Any]:
    """Yield the rows of a .parquet file, with one row group in memory at a time."""
    with _parquet(raw) as file:
        first = 0
        for group in range(file.num_row_groups):
            size = file.metadata.row_group(group).num_rows
            if first + size > start:
                yield from file.read_row_group(group).slice(max(0, start - first)).to_pylist()
            first += size


@contextmanager
def _parquet(raw: Any) -> Iterator[Any]:
    """Open a .parquet file; all errors become OSError."""
    pq, arrow = import_optional("pyarrow.parquet", "a Parquet file"), import_optional("pyarrow.lib", "a Parquet file")
    try:
        yield pq.ParquetFile(raw)
    except (ValueError, TypeError, arrow.ArrowException) as error:  # Arrow raises unrelated types
        raise OSError(str(error)) from error


# -- Hugging Face data sets ------------------------------------------------------------------------------------------
def _of_data_set(place: str, column: str | None, id_column: str | None) -> Source:
    """Return the rows of ``hf:NAME``, ``hf:NAME:SPLIT``, or ``hf:FOLDER`` written by ``save_to_disk``."""
    datasets = import_optional("datasets", f"the input {place}")
    name, _, split = place.removeprefix("hf:").partition(":")
    try:
        data = datasets.load_from_disk(name) if Path(name).is_dir() else datasets.load_dataset(name)
    except Exception as error:  # datasets raises many unrelated types
        raise LoadError(f"cannot load the data set {name!r}: {first_line(error)[:300]}") from error
    data = one_split(data, split, name, f"hf:{name}:SPLIT")
    check_data(data, column, id_column)
    source = from_python(data, column, id_column)
    return replace(source, name=place, count=len(data), digest=str(data._fingerprint))

"""Files that appear whole and survive a power cut, or do not appear at all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from whyformer.errors import LoadError
from whyformer.jobs.rows import needed


def write_table(path: Path, table: Any, job: str) -> None:
    """A Parquet file; ``job`` is as for :func:`durable`."""
    with durable(path, job) as partial:
        write_parquet(table, partial)


def write_parquet(table: Any, place: Any) -> None:
    """A table as Parquet, with a checksum of each page, to a path or a file: the same bytes whenever it is written."""
    needed("pyarrow.parquet", "a table of explanations").write_table(
        table, place, compression="zstd", write_page_checksum=True
    )


@contextmanager
def durable(path: Path, job: str) -> Iterator[Path]:
    """A passing name, which says the job's id; its file takes its place at the end, flushed before and after."""
    partial = path.with_name(f"{path.name}.{job}.{os.getpid()}.partial")  # two actors may make one part at once
    with refusing(path.parent):
        try:
            yield partial
            flush(partial)
            partial.replace(path)
            flush(path.parent)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def refusing(place: Path) -> Iterator[None]:
    """A disk that is full, or may not be written, as a sentence."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise LoadError(
            f"cannot write to {place}: {reason}. What is there stays, and a rerun goes on from it"
        ) from error


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

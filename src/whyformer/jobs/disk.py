"""Atomic, durable writing of files: after a power failure a file is complete or absent."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from whyformer.errors import LoadError, import_optional


def write_table(path: Path, table: Any, job: str) -> None:
    """Write a Parquet file durably; ``job`` is as for :func:`durable`."""
    with durable(path, job) as partial:
        write_parquet(table, partial)


def write_parquet(table: Any, place: Any) -> None:
    """Write a table as Parquet with page checksums to a path or a file; equal tables give equal bytes."""
    import_optional("pyarrow.parquet", "a table of explanations").write_table(
        table, place, compression="zstd", write_page_checksum=True
    )


@contextmanager
def durable(path: Path, job: str) -> Iterator[Path]:
    """Yield a temporary path with the job's id in its name; its file is flushed and then replaces ``path``."""
    partial = path.with_name(f"{path.name}.{job}.{os.getpid()}.partial")  # two actors may compute the same part
    with reporting_write_errors(path.parent):
        try:
            yield partial
            flush(partial)
            partial.replace(path)
            flush(path.parent)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def reporting_write_errors(place: Path) -> Iterator[None]:
    """Turn OSError, such as that of a full or read-only disk, into LoadError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise LoadError(
            f"cannot write to {place}: {reason}. Written files remain, and a rerun resumes from them"
        ) from error


def flush(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

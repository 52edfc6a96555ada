"""Files of lines of JSON that carry a checksum, so that one that was damaged is told from one that is whole."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

_CHECK = ', "check": "'


def digest(data: bytes) -> str:
    """Sixteen hex digits of SHA-256."""
    return hashlib.sha256(data).hexdigest()[:16]


def written(record: dict[str, Any]) -> bytes:
    """``{..., "check": "<digest of all that stands before it>"}`` and the end of the line; at least one key."""
    start = json.dumps(record, ensure_ascii=False, allow_nan=False)[:-1].encode()
    return start + f'{_CHECK}{digest(start)}"}}\n'.encode()


def read(line: bytes) -> dict[str, Any] | None:
    """The record of a line, without its checksum; None where the line is not as :func:`written` made it."""
    start, found, end = line.rstrip(b"\n").rpartition(_CHECK.encode())
    if not found or end != f'{digest(start)}"}}'.encode():
        return None
    try:
        record = json.loads(start + b"}")
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def append(file: int, content: bytes) -> None:
    """All of it, to a file that was opened for appending."""
    view = memoryview(content)
    while view:
        view = view[os.write(file, view) :]


def locked(file: int) -> bool:
    """Take an open file for this process; False where another one has it."""
    try:
        import fcntl
    except ImportError:  # not on this system: two processes in one folder are then the user's to avoid
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True

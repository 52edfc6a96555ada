"""JSON lines with a checksum each, which detects damaged lines."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

_CHECK = ', "check": "'


def digest(data: bytes) -> str:
    """Return 16 hexadecimal digits of SHA-256."""
    return hashlib.sha256(data).hexdigest()[:16]


def encoded(record: dict[str, Any]) -> bytes:
    """Return the line ``{..., "check": "<digest of all before it>"}`` of a record with at least one key."""
    start = json.dumps(record, ensure_ascii=False, allow_nan=False)[:-1].encode()
    return start + f'{_CHECK}{digest(start)}"}}\n'.encode()


def read(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line of :func:`encoded` without its checksum; None if the line is damaged."""
    start, separator, end = line.rstrip(b"\n").rpartition(_CHECK.encode())
    if not separator or end != f'{digest(start)}"}}'.encode():
        return None
    try:
        record = json.loads(start + b"}")
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def append(file: int, content: bytes) -> None:
    """Write all of ``content`` to a file descriptor that was opened for appending."""
    view = memoryview(content)
    while view:
        view = view[os.write(file, view) :]


def locked(file: int) -> bool:
    """Lock an open file for this process; return False if another process has locked it."""
    try:
        import fcntl
    except ImportError:  # no locks on this system: the user must avoid two processes in one folder
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True

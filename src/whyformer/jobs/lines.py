"""Lines of JSON that carry a checksum, so that one that was damaged is told from one that is whole."""

from __future__ import annotations

import hashlib
import json
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

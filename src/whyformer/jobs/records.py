"""The file in which a benchmark keeps what it has measured, one line a sample and configuration.

A run that was killed goes on where it stopped: what is in the file is not measured again, and the figures are made from
the file alone, one record a key, so nothing is lost or counted twice.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from whyformer.errors import InputError, LoadError

Record = dict[str, Any]
Key = tuple[str, str]


class RecordFile(ExitStack):
    """Records by (sample, configuration key); open in one process at a time."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.records: dict[Key, Record] = {}
        self.dropped = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise LoadError(f"cannot write {path}: {error}") from error
        self.callback(os.close, self._file)
        self._lock()
        self._read()

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # not on this system: two runs in one folder are then the user's to avoid
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            place = self.path.parent
            raise InputError(f"another run is writing to {place}; wait for it, or give another --out") from error

    def _read(self) -> None:
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):  # the last line was cut off when the run was killed
            os.truncate(self._file, whole)
            self.dropped += 1
        for line in data[:whole].splitlines():
            try:
                record = json.loads(line)
                self.records[record["sample"], record["key"]] = record
            except (ValueError, KeyError, TypeError):
                self.dropped += 1

    def __contains__(self, key: Key) -> bool:
        """Whether this was measured; what failed is tried again."""
        record = self.records.get(key)
        return record is not None and "error" not in record

    def add(self, record: Record) -> None:
        """Append a record: one write of one whole line."""
        # six digits are more than the figures show
        line = (json.dumps(plain(record, 6), ensure_ascii=False, allow_nan=False) + "\n").encode()
        view = memoryview(line)
        while view:
            view = view[os.write(self._file, view) :]
        self.records[record["sample"], record["key"]] = json.loads(line)

    def sync(self) -> None:
        """Make what was written survive a power cut."""
        os.fsync(self._file)


def plain(value: Any, digits: int | None = None) -> Any:
    """Ready for JSON: NaN and infinity as null, tuples as lists, anything else by its words.

    ``digits``: significant ones of floats, all of them by default.
    """
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float):
        return (value if digits is None else float(f"{value:.{digits}g}")) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): plain(v, digits) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v, digits) for v in value]
    return value if value is None or isinstance(value, bool | int | str) else str(value)

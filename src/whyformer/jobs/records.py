"""The file in which a benchmark keeps what it has measured, one line a sample and configuration.

A run that was killed goes on where it stopped: what is in the file is not measured again, and the figures are made from
the file alone, one record a key, so nothing is lost or counted twice. Each line has a checksum: what was cut off or
changed is left out, and measured again, with all that was measured beside it. So a run makes the same pieces, with the
same figures to the last digit, whatever happened to the one before.
"""

from __future__ import annotations

import math
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from whyformer.errors import InputError, LoadError
from whyformer.jobs import lines

Record = dict[str, Any]
Key = tuple[str, str]


class RecordFile(ExitStack):
    """Records by (sample, configuration key); open in one process at a time.

    Attributes:
        dropped: how many damaged lines were found and taken out of the file.
        torn: how many whole lines went with them, which were measured together with what they said.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.records: dict[Key, Record] = {}
        self.dropped = self.torn = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise LoadError(f"cannot write {path}: {error}") from error
        self.callback(os.close, self._file)
        self._lock()
        self._read()

    def _lock(self) -> None:
        if not lines.locked(self._file):
            self.close()
            raise InputError(f"another run is writing to {self.path.parent}; wait for it, or give another --out")

    def _read(self) -> None:
        whole: list[tuple[bytes, Record]] = []
        for line in self.path.read_bytes().splitlines(keepends=True):
            record = lines.read(line) if line.endswith(b"\n") else None  # the last may have been cut off by a kill
            if record is None or not isinstance(record.get("sample"), str) or not isinstance(record.get("key"), str):
                self.dropped += 1
            else:
                whole.append((line, record))
        there: dict[Any, set[Key]] = {}
        for _, record in whole:
            there.setdefault(_piece(record), set()).add((record["sample"], record["key"]))
        kept = [(line, r) for line, r in whole if (piece := _piece(r)) is None or len(there[piece]) == piece[1]]
        self.torn = len(whole) - len(kept)
        self.records = {(r["sample"], r["key"]): r for _, r in kept}
        if self.dropped or self.torn:
            self._rewrite(b"".join(line for line, _ in kept))

    def _rewrite(self, content: bytes) -> None:
        """Put another file in the place of this one, locked before it is seen."""
        partial = self.path.with_name(self.path.name + ".partial")
        self._file = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        self.callback(os.close, self._file)
        self._lock()
        lines.append(self._file, content)
        self.sync()
        partial.replace(self.path)

    def __contains__(self, key: Key) -> bool:
        """Whether this was measured; what failed is tried again."""
        record = self.records.get(key)
        return record is not None and "error" not in record

    def add(self, *records: Record) -> None:
        """Append what was measured together, in one write of whole lines; it counts whole, or not at all."""
        # six digits are more than the figures show
        kept = [plain(record, 6) for record in records]
        piece = [lines.digest(repr(sorted({(r["sample"], r["key"]) for r in kept})).encode()), len(kept)]
        kept = [{**record, "piece": piece} for record in kept]
        lines.append(self._file, b"".join(map(lines.written, kept)))
        self.records |= {(r["sample"], r["key"]): r for r in kept}

    def sync(self) -> None:
        """Make what was written survive a power cut."""
        os.fsync(self._file)


def _piece(record: Record) -> tuple[str, int] | None:
    """(digest, how many records) of what a record was measured with; of older files, which do not tell, None."""
    found = record.get("piece")
    return (str(found[0]), int(found[1])) if isinstance(found, list) and len(found) == 2 else None


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

"""The file of a benchmark's measurements, with a line for each sample and configuration.

A killed run resumes: records in the file are not measured again, and figures are computed from the file alone with one
record for each key, so nothing is lost or counted twice. Each line has a checksum. A truncated or changed line is
ignored and measured again, together with all records that were measured with it. So a resumed run has the same groups,
and the same figures to the last digit, as a run without interruption.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from whyformer.errors import InputError, LoadError
from whyformer.explanation.storage import plain
from whyformer.jobs import lines

Record = dict[str, Any]
Key = tuple[str, str]


class RecordFile(ExitStack):
    """Records by (sample, configuration key), open in one process at a time.

    Attributes:
        records: the records.
        dropped: number of damaged lines that were removed from the file.
        torn: number of intact lines that were removed with them, because they were measured together.
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
            raise InputError(f"another run is writing to {self.path.parent}: wait for it, or use another --out")

    def _read(self) -> None:
        intact: list[tuple[bytes, Record]] = []
        pieces: dict[str, set[Key]] = {}
        for line in self.path.read_bytes().splitlines(keepends=True):
            record = lines.read(line) or {} if line.endswith(b"\n") else {}  # a kill may truncate the last line
            match record:
                case {"sample": str(sample), "key": str(key), "piece": [str(piece), int()]}:
                    intact.append((line, record))
                    pieces.setdefault(piece, set()).add((sample, key))
                case _:
                    self.dropped += 1
        complete = [(line, r) for line, r in intact if len(pieces[r["piece"][0]]) == r["piece"][1]]
        self.torn = len(intact) - len(complete)
        self.records = {(r["sample"], r["key"]): r for _, r in complete}
        if self.dropped or self.torn:
            self._rewrite(b"".join(line for line, _ in complete))

    def _rewrite(self, content: bytes) -> None:
        """Replace the file with another file, which is locked before it is visible."""
        partial = self.path.with_name(self.path.name + ".partial")
        self._file = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        self.callback(os.close, self._file)
        self._lock()
        lines.append(self._file, content)
        self.sync()
        partial.replace(self.path)

    def __contains__(self, key: Key) -> bool:
        """Return True if the key was measured. Failures are tried again."""
        record = self.records.get(key)
        return record is not None and "error" not in record

    def add(self, *records: Record) -> None:
        """Append records that were measured together, in one write; they count all together or not at all."""
        # six digits are more than the figures show
        rows = [plain(record, finite=True, digits=6) for record in records]
        piece = [lines.digest(repr(sorted({(r["sample"], r["key"]) for r in rows})).encode()), len(rows)]
        rows = [{**record, "piece": piece} for record in rows]
        lines.append(self._file, b"".join(map(lines.encoded, rows)))
        self.records |= {(r["sample"], r["key"]): r for r in rows}

    def sync(self) -> None:
        """Flush the file to the disk."""
        os.fsync(self._file)

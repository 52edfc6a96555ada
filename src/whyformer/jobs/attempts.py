"""Notes of the rows in progress, so that a row that crashes the process is identified when the job resumes.

A row may end the process without an exception: by a segmentation fault, ``os._exit``, or out of memory. So each part
has a file of notes while it is computed, in which each step is noted before it begins. Rows that were in progress when
a process died are tried one at a time by the next process, and a row that ends the process again is skipped. Results
of these trials are discarded, so the batches are those of a job without crashes.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from whyformer.errors import WhyformerError
from whyformer.jobs import lines
from whyformer.jobs.batching import RowContent, read_one
from whyformer.jobs.disk import reporting_write_errors
from whyformer.jobs.rows import Row, failed_row

NOTES = r"part-[0-9]{6,}\.attempts\.jsonl"
_FETCH, _WORK, _ALONE = "fetch", "work", "alone"


class ProcessEnded(WhyformerError):  # noqa: N818 - describes the event
    """The process ended twice while working on a row."""


def notes_name(part: str) -> str:
    """Return the name of the file of notes for the file of a part."""
    return part.removesuffix(".parquet") + ".attempts.jsonl"


def notes_of(folder: Path) -> list[Path]:
    """Return all files of notes in a folder."""
    return [path for path in folder.glob("part-*.attempts.jsonl") if re.fullmatch(NOTES, path.name)]


class Attempts:
    """The attempts to compute one part, as a context manager around all work on its rows.

    A lane does one thing at a time, such as explaining, or reading one row. A note of a lane lists the rows that it
    works on from now on; its previous rows are done.

    Args:
        path: file of notes.
        job: id of the job.
        size: batch size.

    Attributes:
        skipped: rows to skip.
        unfetched: rows in ``skipped`` that must not be fetched from the input either.
        suspects: rows to try alone before all other work.
        died: True if a process died while working on this part.
        max_size: largest allowed batch size, after a batch ended the process though none of its rows did so alone.
    """

    def __init__(self, path: Path, job: str, size: int) -> None:
        self.skipped: set[int] = set()
        self.unfetched: set[int] = set()
        self.suspects: set[int] = set()
        self.died = False
        self.max_size: int | None = None
        self._path, self._job, self._size = path, job, size
        self._cleared: set[int] = set()
        self._fetched: Counter[int] = Counter()
        self._replay()

    def __enter__(self) -> Attempts:
        with reporting_write_errors(self._path.parent):
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._note(b"\n", start=self._size)  # the last line may be truncated
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # errors and Ctrl-C are not crashes
            if kind is None or issubclass(kind, Exception | KeyboardInterrupt):
                self._note(end=True)
        finally:
            os.close(self._file)

    # -- notes -------------------------------------------------------------------------------------------------------
    def fetch(self, row: int | None) -> None:
        """Note that a row is fetched from the input, or with None that none is."""
        self._note(lane=_FETCH, rows=[] if row is None else [row])

    def reading(self, row: Row) -> RowContent:
        """Read the content of a row; may be called by any thread."""
        lane = f"read {row.index}"
        self._note(lane=lane, rows=[row.index])
        read = read_one(row)
        self._note(lane=lane, rows=[])
        return read

    def work(self, rows: Iterable[int], *, durable: bool = False) -> None:
        """Note that rows are processed together; a ``durable`` note survives a power failure."""
        self._note(lane=_WORK, rows=list(rows))
        if durable:
            os.fsync(self._file)

    def alone(self, row: int) -> None:
        """Note that this row alone is tried."""
        self._note(lane=_ALONE, rows=[row])
        os.fsync(self._file)

    def survived(self, row: int) -> None:
        """Note that the tried row did not end the process."""
        self._note(lane=_ALONE, rows=[])
        self.suspects.discard(row)

    def _note(self, before: bytes = b"", **facts: Any) -> None:
        with reporting_write_errors(self._path.parent):
            lines.append(self._file, before + lines.encoded({"job": self._job, **facts}))

    def admitted(self, row: Row) -> Row:
        """Return the row, or a row of the same id that fails if it is to be skipped."""
        return skipped_row(row.index, row.id) if row.index in self.skipped else row

    # -- earlier attempts -----------------------------------------------------------------------------------
    def _replay(self) -> None:
        lanes: dict[str, list[int]] = {}
        size = self._size
        content = self._path.read_bytes() if self._path.is_file() else b""
        for line in content.splitlines(keepends=True):
            note = lines.read(line)
            if note is None:  # truncated, so its step did not begin
                continue
            if "start" in note:
                self._settle(lanes, size)
                lanes, size = {}, int(note["start"])
            elif "end" in note:
                lanes = {}
            else:
                if note["lane"] == _ALONE:
                    self._cleared.update(lanes.get(_ALONE, []))
                lanes[note["lane"]] = note["rows"]
        self._settle(lanes, size)
        self.suspects -= self.skipped | self._cleared

    def _settle(self, lanes: dict[str, list[int]], size: int) -> None:
        """Update the attributes for a process that died while working on the rows of these lanes."""
        started = {row for rows in lanes.values() for row in rows}
        self.died |= bool(started)
        fetched, alone = lanes.get(_FETCH, []), lanes.get(_ALONE, [])
        self._fetched.update(fetched)
        repeated = {row for row in fetched if self._fetched[row] > 1}
        self.unfetched |= repeated
        self.skipped |= repeated | set(alone)
        started -= {*fetched, *alone}
        if started - self._cleared - self.skipped:
            self.suspects |= started
        elif len(lanes.get(_WORK, [])) > 1 < size:  # no row alone ended the process: the batch is too large
            self.max_size = size // 2
        else:
            self.skipped |= started


def skipped_row(index: int, row_id: str) -> Row:
    """Return a row that fails when it is read."""
    reason = "the process ended twice while working on this row: it crashed, was killed, or ran out of memory"
    return failed_row(index, ProcessEnded(reason), row_id=row_id)

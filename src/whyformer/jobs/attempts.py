"""Notes of the rows that are being worked on, so that a row that ends the process is known when the job goes on.

A row may end the process without a word: a segmentation fault, ``os._exit``, all memory taken. So each part has a file
of notes while it is made, and what is begun is written there before. What was begun in a process that died and never
ended is tried alone in the next one, each row by itself: the row that ends the process again is set aside. Results of
these trials are not used, and the batches stay those of a job that nothing happened to.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from whyformer.errors import WhyformerError
from whyformer.jobs import lines
from whyformer.jobs.batching import Read, read_one
from whyformer.jobs.disk import refusing
from whyformer.jobs.rows import Row, raising

NOTES = r"part-[0-9]{6,}\.attempts\.jsonl"
_FETCH, _WORK, _ALONE = "fetch", "work", "alone"


class ProcessEnded(WhyformerError):  # noqa: N818 - names what happened
    """The process ended twice in the middle of a row."""


def notes_name(part: str) -> str:
    """The file of notes of a part's file."""
    return part.removesuffix(".parquet") + ".attempts.jsonl"


def notes_of(folder: Path) -> list[Path]:
    """All files of notes of a folder."""
    return [path for path in folder.glob("part-*.attempts.jsonl") if re.fullmatch(NOTES, path.name)]


class Attempts:
    """The attempts to make one part, of which this is the latest; a context, around all work on its rows.

    A lane is what does one thing at a time, such as the explaining, or the reading of one row. A note of a lane says
    which rows it works on from now on, and that it has done with those before.

    Args:
        path: the file of notes; job: the job's id; size: of the batches.

    Attributes:
        aside: rows that are not to be explained; unfetched: of them those that are not even to be taken from the input.
        suspects: rows to try alone before anything else is done.
        died: whether a process died in the middle of this part.
        most: the largest batch that may be made, where a batch ended the process and none of its rows alone did.
    """

    def __init__(self, path: Path, job: str, size: int) -> None:
        self.aside: set[int] = set()
        self.unfetched: set[int] = set()
        self.suspects: set[int] = set()
        self.died = False
        self.most: int | None = None
        self._path, self._job, self._size = path, job, size
        self._cleared: set[int] = set()
        self._fetched: Counter[int] = Counter()
        self._replay()

    def __enter__(self) -> Attempts:
        with refusing(self._path.parent):
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._note(b"\n", start=self._size)  # the last line may have been cut off
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # an error and Ctrl-C are no sudden end; what else ends a process is
            if kind is None or issubclass(kind, Exception | KeyboardInterrupt):
                self._note(end=True)
        finally:
            os.close(self._file)

    # -- notes -------------------------------------------------------------------------------------------------------
    def fetch(self, row: int | None) -> None:
        """A row is taken from the input; None: no row is."""
        self._begin(_FETCH, [] if row is None else [row])

    def reading(self, row: Row) -> Read:
        """The content of a row, read by any thread."""
        lane = f"read {row.index}"
        self._begin(lane, [row.index])
        read = read_one(row)
        self._begin(lane, [])
        return read

    def work(self, rows: Iterable[int], *, durable: bool = False) -> None:
        """These rows are prepared, explained or drawn together; with ``durable`` a power cut does not lose the note."""
        self._begin(_WORK, list(rows))
        if durable:
            os.fsync(self._file)

    def alone(self, row: int) -> None:
        """This row is tried, and nothing else is done."""
        self._begin(_ALONE, [row])
        os.fsync(self._file)

    def survived(self, row: int) -> None:
        """The row that was tried did not end the process."""
        self._begin(_ALONE, [])
        self.suspects.discard(row)

    def _begin(self, lane: str, rows: list[int]) -> None:
        self._note(lane=lane, rows=rows)

    def _note(self, before: bytes = b"", **facts: Any) -> None:
        with refusing(self._path.parent):
            lines.append(self._file, before + lines.written({"job": self._job, **facts}))

    def admitted(self, row: Row) -> Row:
        """The row, or one of its name that fails, if it is set aside."""
        return set_aside(row.index, row.id) if row.index in self.aside else row

    # -- what earlier attempts say -----------------------------------------------------------------------------------
    def _replay(self) -> None:
        lanes: dict[str, list[int]] = {}
        size = self._size
        content = self._path.read_bytes() if self._path.is_file() else b""
        for line in content.splitlines(keepends=True):
            note = lines.read(line)
            if note is None:  # cut off: what it says was not begun
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
        self.suspects -= self.aside | self._cleared

    def _settle(self, lanes: dict[str, list[int]], size: int) -> None:
        """What follows from the rows that were worked on when a process died."""
        begun = {row for rows in lanes.values() for row in rows}
        self.died |= bool(begun)
        fetched, alone = lanes.get(_FETCH, []), lanes.get(_ALONE, [])
        self._fetched.update(fetched)
        lost = {row for row in fetched if self._fetched[row] > 1}
        self.unfetched |= lost
        self.aside |= lost | set(alone)
        begun -= {*fetched, *alone}
        if begun - self._cleared - self.aside:
            self.suspects |= begun
        elif len(lanes.get(_WORK, [])) > 1 < size:  # each alone did no harm: together they took too much
            self.most = size // 2
        else:
            self.aside |= begun


def set_aside(index: int, called: str) -> Row:
    """A row that fails when it is read."""
    reason = "the process ended twice in the middle of this row: it crashed, was killed, or took all memory"
    return Row(index, called, partial(raising, ProcessEnded(reason)))

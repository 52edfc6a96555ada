"""The folder that a job writes: parts that appear whole, a journal of them, and the manifest of all.

A part is written under a passing name, flushed to the disk, renamed, and then noted in the journal with its checksum.
What is not there, or not as it was written, is made again: a part is a function of the job and of the rows, so that
whatever happened on the way, the folder ends with the same bytes. What is lost of the manifest and the journal is read
off the command and the parts, which say themselves what they are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from whyformer.errors import InputError, LoadError
from whyformer.jobs import lines
from whyformer.jobs.attempts import notes_name, notes_of
from whyformer.jobs.disk import checksum, durable, refusing, write_table
from whyformer.jobs.manifest import FAILURES, FORMAT, JOURNAL, MANIFEST, Part, job_id, sealed
from whyformer.jobs.ownership import OVERLAYS, Holdings, holdings
from whyformer.jobs.parts import stamped

_LOCK = ".lock"


class Folder(ExitStack):
    """An output folder, open in one process at a time.

    Args:
        facts: ``job``, ``model``, ``source``, ``versions``: what decides the bytes of the parts.

    Attributes:
        manifest: of this job, new or as an earlier run left it.
        parts: those that are there, by name.
        damaged: names of files, and what else was not as it was written.

    Raises:
        InputError: it holds another job, or files of something else; nothing in it is touched then.
        LoadError: it cannot be written to.
    """

    def __init__(self, path: str | Path, facts: Mapping[str, Any]) -> None:
        super().__init__()
        self.path, self.job = Path(path), job_id(facts)
        try:
            if not (self.path / _LOCK).is_file():  # a folder that is not ours gets no lock either
                holdings(self.path, facts)
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise LoadError(f"cannot write to {path}: {error.strerror}") from error
        self.callback(os.close, self._lock)
        try:
            if not lines.locked(self._lock):
                raise InputError(f"another job is writing to {path}; wait for it, or give another out")
            found = holdings(self.path, facts)
            self.parts, self.damaged = found.parts, found.damaged
            self.manifest = self._begin(found, facts)
        except BaseException:
            self.close()
            raise

    def _begin(self, found: Holdings, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Take away what a killed run left, and write what was lost: a manifest, a journal of what is there."""
        done = {notes_name(name) for name in self.parts}
        notes = [path for path in notes_of(self.path) if path.name in done]
        for path in [*found.passing, *notes, *(self.path / OVERLAYS).glob(".*.partial")]:
            path.unlink()
        manifest = found.manifest or {"format": FORMAT, "id": self.job, **facts, "complete": False}
        if found.sizes:
            manifest["batch_sizes"] = _sizes(found.sizes)
        if not manifest["complete"] or self.damaged:
            entries = [self._line(), *(self._line(self.parts[name]) for name in sorted(self.parts))]
            self._replace(JOURNAL, b"".join(entries))
        if found.manifest is None:
            self.write_manifest(manifest)
        return manifest

    # -- writing -----------------------------------------------------------------------------------------------------
    def note(self, part: Part) -> None:
        """Add a part to the journal: from now on it is not made again."""
        with refusing(self.path):
            file = os.open(self.path / JOURNAL, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                lines.append(file, self._line(part))
                os.fsync(file)
            finally:
                os.close(file)
        self.parts[part.file] = part
        (self.path / notes_name(part.file)).unlink(missing_ok=True)

    def _line(self, part: Part | None = None) -> bytes:
        return lines.written({"job": self.job, **({} if part is None else asdict(part))})

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Write it, with a checksum of all that it says."""
        self._replace(MANIFEST, sealed(manifest))

    def write_failures(self, failures: Any) -> None:
        """Write the table of failures."""
        write_table(self.path / FAILURES, stamped(failures, job=self.job), self.job)

    def finish(self, failures: Any, rows: int) -> dict[str, Any]:
        """Write the table of failures and the whole manifest, and take the journal away."""
        self.write_failures(failures)
        parts = [asdict(self.parts[name]) for name in sorted(self.parts)]
        written = sum(p["written"] for p in parts)
        self.manifest |= {"complete": True, "rows": rows, "written": written,
                          "failed": failures.num_rows, "failures_sha256": checksum(self.path / FAILURES),
                          "parts": parts}  # fmt: skip
        self.write_manifest(self.manifest)
        for path in [self.path / JOURNAL, *notes_of(self.path)]:
            path.unlink(missing_ok=True)
        return self.manifest

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to write."""
        path = self.path / FAILURES
        same = path.is_file() and checksum(path) == self.manifest.get("failures_sha256")
        return bool(self.manifest["complete"]) and same and not self.damaged and not (self.path / JOURNAL).exists()

    def _replace(self, name: str, content: bytes) -> None:
        with durable(self.path / name, self.job) as partial:
            partial.write_bytes(content)


def _sizes(found: Mapping[int, int]) -> list[list[int]]:
    """``[number of the first part, size of its batches]``, where the size changes; the first is that of all before."""
    sizes: list[list[int]] = []
    for number in sorted(found):
        if not sizes or sizes[-1][1] != found[number]:
            sizes.append([number if sizes else 0, found[number]])
    return sizes

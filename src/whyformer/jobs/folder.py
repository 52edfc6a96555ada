"""The output folder of a job: parts, a journal of finished parts, and the manifest.

A part is written under a temporary name, flushed to the disk, renamed, and then added to the journal with its checksum.
Missing and damaged parts are computed again. A part depends on the job and its rows alone, so the folder ends with the
same bytes after any interruption. A lost manifest or journal is restored from the command and the parts' metadata.
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
from whyformer.jobs.manifest import FAILURES, FORMAT, JOURNAL, MANIFEST, Part, job_id, manifest_bytes
from whyformer.jobs.ownership import OVERLAYS, JobFiles, job_files
from whyformer.jobs.parts import stamped

_LOCK = ".lock"


class Folder(ExitStack):
    """An output folder, open in one process at a time.

    Args:
        path: the folder.
        facts: ``job``, ``model``, ``source`` and ``versions``, which determine the bytes of the parts.

    Attributes:
        manifest: manifest of the job, new or of an earlier run.
        parts: finished parts by name.
        damaged: names of damaged files, and descriptions of other damage.

    Raises:
        InputError: the folder contains another job or other files; nothing in it is changed.
        LoadError: the folder is not writable.
    """

    def __init__(self, path: str | Path, facts: Mapping[str, Any]) -> None:
        super().__init__()
        self.path, self.job = Path(path), job_id(facts)
        try:
            if not (self.path / _LOCK).is_file():  # write no lock into a folder of others
                job_files(self.path, facts)
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise LoadError(f"cannot write to {path}: {error.strerror}") from error
        self.callback(os.close, self._lock)
        try:
            if not lines.locked(self._lock):
                raise InputError(f"another job is writing to {path}: wait for it, or use another out")
            contents = job_files(self.path, facts)
            self.parts, self.damaged = contents.parts, contents.damaged
            self.manifest = self._begin(contents, facts)
        except BaseException:
            self.close()
            raise

    def _begin(self, contents: JobFiles, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Remove temporary files of a killed run, and restore the journal and a lost manifest."""
        done = {notes_name(name) for name in self.parts}
        notes = [path for path in notes_of(self.path) if path.name in done]
        for path in [*contents.temporary, *notes, *(self.path / OVERLAYS).glob(".*.partial")]:
            path.unlink()
        manifest = contents.manifest or {"format": FORMAT, "id": self.job, **facts, "complete": False}
        if contents.sizes:
            manifest["batch_sizes"] = _sizes(contents.sizes)
        if not manifest["complete"] or self.damaged:
            entries = [self._line(), *(self._line(self.parts[name]) for name in sorted(self.parts))]
            self._replace(JOURNAL, b"".join(entries))
        if contents.manifest is None:
            self.write_manifest(manifest)
        return manifest

    # -- writing -----------------------------------------------------------------------------------------------------
    def note(self, part: Part) -> None:
        """Add a finished part to the journal."""
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
        return lines.encoded({"job": self.job, **({} if part is None else asdict(part))})

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Write the manifest with its checksum."""
        self._replace(MANIFEST, manifest_bytes(manifest))

    def write_failures(self, failures: Any) -> None:
        """Write the table of failures."""
        write_table(self.path / FAILURES, stamped(failures, job=self.job), self.job)

    def finish(self, failures: Any, rows: int) -> dict[str, Any]:
        """Write the table of failures and the complete manifest, and remove the journal."""
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
        """True if nothing is left to write."""
        path = self.path / FAILURES
        same = path.is_file() and checksum(path) == self.manifest.get("failures_sha256")
        return bool(self.manifest["complete"]) and same and not self.damaged and not (self.path / JOURNAL).exists()

    def _replace(self, name: str, content: bytes) -> None:
        with durable(self.path / name, self.job) as partial:
            partial.write_bytes(content)


def _sizes(by_part: Mapping[int, int]) -> list[list[int]]:
    """Return ``[number of a part, batch size from it on]`` for each change of the batch size; the first number is 0."""
    sizes: list[list[int]] = []
    for number in sorted(by_part):
        if not sizes or sizes[-1][1] != by_part[number]:
            sizes.append([number if sizes else 0, by_part[number]])
    return sizes

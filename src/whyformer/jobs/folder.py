"""The output folder of a job: parts, and the manifest.

A part is written under a temporary name, flushed to the disk, and renamed, so a part that exists is finished. The log
lists it with its checksum, and the manifest does when the job is finished. Missing and damaged parts are computed
again. A part depends on the job and its rows alone, so the folder ends with the same bytes after any interruption. A
lost manifest or log is restored from the command and the parts' metadata.
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
from whyformer.jobs.disk import checksum, durable, write_table
from whyformer.jobs.manifest import FAILURES, FORMAT, MANIFEST, Part, job_id, manifest_bytes
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
        damaged: names of damaged files.

    Raises:
        InputError: the folder contains another job or other files; nothing in it is changed.
        LoadError: the folder is not writable.
    """

    def __init__(self, path: str | Path, facts: Mapping[str, Any]) -> None:
        super().__init__()
        self.path, self.job = Path(path), job_id(facts)
        try:
            if not (self.path / _LOCK).is_file():  # do not write a lock into a folder of another owner
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
        """Remove temporary files of a killed run, and restore a lost manifest."""
        done = {notes_name(name) for name in self.parts}
        notes = [path for path in notes_of(self.path) if path.name in done]
        for path in [*contents.temporary, *notes, *(self.path / OVERLAYS).glob(".*.partial")]:
            path.unlink()
        manifest = contents.manifest or {"format": FORMAT, "id": self.job, **facts, "complete": False}
        if contents.sizes:
            manifest["batch_sizes"] = _sizes(contents.sizes)
        if contents.manifest is None:
            self.write_manifest(manifest)
        return manifest

    # -- writing -----------------------------------------------------------------------------------------------------
    def add(self, part: Part) -> None:
        """Add a written part, and remove its notes."""
        self.parts[part.file] = part
        (self.path / notes_name(part.file)).unlink(missing_ok=True)

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Write the manifest with its checksum."""
        with durable(self.path / MANIFEST, self.job) as partial:
            partial.write_bytes(manifest_bytes(manifest))

    def write_failures(self, failures: Any) -> None:
        """Write the table of failures."""
        write_table(self.path / FAILURES, stamped(failures, job=self.job), self.job)

    def finish(self, failures: Any, rows: int) -> None:
        """Write the table of failures and the complete manifest."""
        self.write_failures(failures)
        row_count = sum(part.written for part in self.parts.values())
        self.manifest |= {"complete": True, "rows": rows, "written": row_count,
                          "failed": failures.num_rows, "failures_sha256": checksum(self.path / FAILURES),
                          "parts": self._entries()}  # fmt: skip
        self.write_manifest(self.manifest)
        for path in notes_of(self.path):
            path.unlink(missing_ok=True)

    @property
    def is_finished(self) -> bool:
        """True if nothing is left to write."""
        path = self.path / FAILURES
        same = path.is_file() and checksum(path) == self.manifest.get("failures_sha256")
        return bool(self.manifest["complete"]) and same and self.manifest["parts"] == self._entries()

    def _entries(self) -> list[dict[str, Any]]:
        return [asdict(self.parts[name]) for name in sorted(self.parts)]


def _sizes(by_part: Mapping[int, int]) -> list[list[int]]:
    """Return ``[number of a part, batch size from it on]`` for each change of the batch size; the first number is 0."""
    sizes: list[list[int]] = []
    for number in sorted(by_part):
        if not sizes or sizes[-1][1] != by_part[number]:
            sizes.append([number if sizes else 0, by_part[number]])
    return sizes

"""The folder that a job writes: parts that appear whole, a journal of them, and the manifest of all.

A part is written under a passing name, flushed to the disk, renamed, and then noted in the journal with its checksum.
What is there and not in the journal, or not as the journal says, is made again: a part is a function of the job and of
the rows, so that whatever happened on the way, the folder ends with the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr

from whyformer.errors import InputError, LoadError
from whyformer.explanation.schemas import Natural, checked
from whyformer.explanation.versions import versions
from whyformer.jobs import lines
from whyformer.jobs.batching import Failure
from whyformer.jobs.description import differences
from whyformer.jobs.rows import needed

_SEAL = "sha256"
_PART = r"part-[0-9]{6,}\.parquet"
MANIFEST, JOURNAL, FAILURES, LOG = "manifest.json", "journal.jsonl", "failures.parquet", "log.jsonl"
FORMAT = 1


@dataclass(frozen=True)
class Part:
    """What is known of a finished file: ``first`` and ``rows`` of the input, ``written`` rows of the table."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    file: Annotated[str, Field(pattern=f"^{_PART}$")]
    first: Natural
    rows: Natural
    written: Natural
    failed: Natural
    bytes: Natural
    sha256: StrictStr


class _Described(BaseModel):
    """What a manifest says of the model: more than is read."""

    labels: dict[Annotated[str, Field(pattern="^[0-9]+$")], StrictStr] | None = None


class Manifest(BaseModel):
    """What is read of a manifest; it may say more."""

    format: Literal[1]
    job: dict[str, Any]
    model: _Described
    source: dict[str, Any]
    complete: StrictBool
    parts: list[Part] | None = None
    batch_sizes: list[tuple[Natural, Natural]] | None = None


def part_name(number: int) -> str:
    """``part-000012.parquet``."""
    return f"part-{number:06d}.parquet"


class Folder(ExitStack):
    """An output folder, open in one process at a time.

    Attributes:
        damaged: names of files, and numbers of journal lines, that were not as they were written.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = Path(path)
        self.parts: dict[str, Part] = {}
        self.damaged: list[str] = []
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise LoadError(f"cannot write to {path}: {error.strerror}") from error
        self.callback(os.close, self._lock)
        if not lines.locked(self._lock):
            self.close()
            raise InputError(f"another job is writing to {path}; wait for it, or give another out")

    def begin(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """The manifest of this job, new or as an earlier run left it.

        Args:
            facts: ``job``, ``model``, ``source``, ``versions``: what decides the bytes of the parts.

        Raises:
            InputError: the folder holds another job, or files of something else. LoadError: its manifest is damaged.
        """
        found = read_manifest(self.path) if (self.path / MANIFEST).exists() else None
        if found is None:
            foreign = sorted(p.name for p in self.path.iterdir() if not _is_ours(p.name))
            if foreign:
                raise InputError(
                    f"{self.path} holds other files ({', '.join(foreign[:3])}): give another folder as out"
                )
            found = {"format": FORMAT, **facts, "complete": False}
            self._clean(every=True)
            self.write_manifest(found)
            return found
        changed = [
            line if key == "job" else f"the {key}'s {line}"
            for key in ("job", "model", "source", "versions")
            for line in differences(_bare(found.get(key)), _bare(facts[key]))
        ]
        if changed:
            raise InputError(
                f"{self.path} holds another job: {'; '.join(changed)}. Give another folder as out, or delete this one"
            )
        self._clean()
        self._read_journal(found)
        return found

    def holds_job(self) -> bool:
        """Whether a job has begun here."""
        return (self.path / MANIFEST).exists()

    def _clean(self, every: bool = False) -> None:
        """Take away what a run that was killed left under passing names; with ``every``, parts that none has noted."""
        for path in self.path.iterdir():
            if path.name.endswith(".partial") or (every and path.name not in (".lock", LOG) and path.is_file()):
                path.unlink()

    def _read_journal(self, manifest: Mapping[str, Any]) -> None:
        listed = list(manifest.get("parts") or [])
        journal = self.path / JOURNAL
        if journal.exists():
            content = journal.read_bytes()
            for line in content.splitlines(keepends=True):
                record = lines.read(line) if line.endswith(b"\n") else None
                if record is None:
                    self.damaged.append("a line of the journal")
                else:
                    listed.append(record)
        for record in listed:
            try:
                part = read_part(record)
            except ValueError:
                self.damaged.append("a line of the journal")
                continue
            self.parts[part.file] = part
        for name, part in list(self.parts.items()):
            if not holds(self.path / name, part):
                self.damaged.append(name)
                del self.parts[name]
        if journal.exists():  # without the damaged lines
            self._replace(JOURNAL, b"".join(lines.written(asdict(part)) for part in self.parts.values()))

    # -- writing -----------------------------------------------------------------------------------------------------
    def note(self, part: Part) -> None:
        """Add a part to the journal: from now on it is not made again."""
        with _told(self.path):
            file = os.open(self.path / JOURNAL, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                lines.append(file, lines.written(asdict(part)))
                os.fsync(file)
            finally:
                os.close(file)
        self.parts[part.file] = part

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Write it, with a checksum of all that it says."""
        facts = {name: value for name, value in manifest.items() if name != _SEAL}
        whole = {**facts, _SEAL: _digest_of(facts)}
        self._replace(MANIFEST, (json.dumps(whole, indent=1, ensure_ascii=False) + "\n").encode())

    def finish(self, manifest: Mapping[str, Any], failures: Any, rows: int) -> dict[str, Any]:
        """Write the table of failures and the whole manifest, and take the journal away."""
        write_table(self.path / FAILURES, failures)
        parts = [asdict(self.parts[name]) for name in sorted(self.parts)]
        written = sum(p["written"] for p in parts)
        whole = {**manifest, "complete": True, "rows": rows, "written": written,
                 "failed": failures.num_rows, "failures_sha256": checksum(self.path / FAILURES),
                 "parts": parts}  # fmt: skip
        self.write_manifest(whole)
        (self.path / JOURNAL).unlink(missing_ok=True)
        return whole

    def is_finished(self, manifest: Mapping[str, Any]) -> bool:
        """Whether nothing is left to write."""
        path = self.path / FAILURES
        same = path.is_file() and checksum(path) == manifest.get("failures_sha256")
        return bool(manifest["complete"]) and same and not self.damaged and not (self.path / JOURNAL).exists()

    def _replace(self, name: str, content: bytes) -> None:
        with _durable(self.path / name) as partial:
            partial.write_bytes(content)


def write_table(path: Path, table: Any) -> None:
    """A Parquet file that appears whole, and survives a power cut, or not at all."""
    pq = needed("pyarrow.parquet", "a table of explanations")
    with _durable(path) as partial:
        pq.write_table(table, partial, compression="zstd")


@contextmanager
def _durable(path: Path) -> Iterator[Path]:
    """A passing name whose file takes its place at the end, flushed to the disk before and after."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")  # two actors may make one part at once
    with _told(path.parent):
        try:
            yield partial
            _flush(partial)
            partial.replace(path)
            _flush(path.parent)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def _told(place: Path) -> Iterator[None]:
    """A disk that is full, or may not be written, as a sentence."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise LoadError(
            f"cannot write to {place}: {reason}. What is there stays, and a rerun goes on from it"
        ) from error


def _flush(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


# -- reading ---------------------------------------------------------------------------------------------------------
def read_manifest(folder: Path) -> dict[str, Any]:
    """What the manifest says, checked to be one, and to be what was written.

    Raises:
        LoadError: there is none, or it is damaged.
    """
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        checked(Manifest, found, "the manifest")
        seal = found.pop(_SEAL, None)  # an older version wrote none
        if seal is not None and seal != _digest_of(found):
            raise ValueError("its checksum is another")
    except FileNotFoundError as error:
        raise LoadError(f"{folder} has no {MANIFEST}: no job has written there") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LoadError(
            f"{folder / MANIFEST} is damaged ({error}); delete the folder, and run the job again"
        ) from error
    return dict(found)


def read_part(record: Any) -> Part:
    """The part of a journal's or a manifest's entry.

    Raises:
        ValueError: it is none.
    """
    return checked(Part, record, "an entry of a part")


def finished_parts(folder: Path, manifest: Mapping[str, Any]) -> list[Part]:
    """The parts of a folder that may still be written to, in the order of the input."""
    listed = [read_part(p) for p in manifest.get("parts") or []]
    journal = folder / JOURNAL
    for line in journal.read_bytes().splitlines(keepends=True) if journal.exists() else []:
        with suppress(ValueError):  # a line that was cut off
            listed.append(read_part(lines.read(line)))
    found = {part.file: part for part in listed}
    return [found[name] for name in sorted(found)]


def holds(path: Path, part: Part) -> bool:
    """Whether a file is still what was written."""
    try:
        return path.stat().st_size == part.bytes and checksum(path) == part.sha256
    except OSError:
        return False


def _digest_of(facts: Mapping[str, Any]) -> str:
    """SHA-256 of JSON values, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def part_of(path: Path, first: int, rows: int, failed: int, written: int) -> Part:
    """The journal's entry for a file that was just written."""
    return Part(path.name, first, rows, written, failed, path.stat().st_size, checksum(path))


def failures_of(table_schema: Any) -> list[Failure]:
    """The failures that a part carries in its schema."""
    return [
        Failure(**one)
        for one in json.loads((table_schema.metadata or {}).get(b"whyformer", b'{"failures": []}'))["failures"]
    ]


def described(job: Mapping[str, Any], model: Mapping[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the bytes of a job's parts."""
    pa = needed("pyarrow", "a job")
    return {"job": dict(job), "model": dict(model), "source": dict(source),
            "versions": {**versions(), "pyarrow": pa.__version__}}  # fmt: skip


def _bare(facts: Any) -> dict[str, Any]:
    """Without the name: a folder may have been moved."""
    return {k: v for k, v in dict(facts or {}).items() if k != "name"}


def _is_ours(name: str) -> bool:
    known = (MANIFEST, JOURNAL, FAILURES, LOG, ".lock", "overlays")
    return name in known or name.endswith(".partial") or bool(re.fullmatch(_PART, name))

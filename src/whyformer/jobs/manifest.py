"""What a job's folder says of the job: the manifest, the entries of parts, and the journal of an unfinished job."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr

from whyformer.errors import LoadError
from whyformer.explanation.schemas import Natural, checked
from whyformer.explanation.versions import versions
from whyformer.jobs import lines
from whyformer.jobs.description import differences
from whyformer.jobs.disk import checksum
from whyformer.jobs.rows import needed

MANIFEST, JOURNAL, FAILURES, LOG = "manifest.json", "journal.jsonl", "failures.parquet", "log.jsonl"
PART = r"part-[0-9]{6,}\.parquet"
FORMAT = 1
_SEAL = "sha256"
_IDENTITY = ("job", "model", "source", "versions")


# -- which job it is -------------------------------------------------------------------------------------------------
def described(job: Mapping[str, Any], model: Mapping[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the bytes of a job's parts."""
    pa = needed("pyarrow", "a job")
    return {"job": dict(job), "model": dict(model), "source": dict(source),
            "versions": {**versions(), "pyarrow": pa.__version__}}  # fmt: skip


def job_id(facts: Mapping[str, Any]) -> str:
    """Sixteen hex digits of what decides the bytes of a job's parts: every file of the job says them."""
    return _digest_of({key: _bare(facts.get(key)) for key in _IDENTITY})[:16]


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What is not the same in two jobs, in words."""
    return [
        line if key == "job" else f"the {key}'s {line}"
        for key in _IDENTITY
        for line in differences(_bare(old.get(key)), _bare(new.get(key)))
    ]


def _bare(facts: Any) -> dict[str, Any]:
    """Without the name: a folder may have been moved."""
    return {k: v for k, v in dict(facts or {}).items() if k != "name"}


def _digest_of(facts: Mapping[str, Any]) -> str:
    """SHA-256 of JSON values, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


# -- parts -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Part:
    """What is known of a finished file: ``first`` and ``rows`` of the input, ``written`` rows of the table."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    file: Annotated[str, Field(pattern=f"^{PART}$")]
    first: Natural
    rows: Natural
    written: Natural
    failed: Natural
    bytes: Natural
    sha256: StrictStr


def part_name(number: int) -> str:
    """``part-000012.parquet``."""
    return f"part-{number:06d}.parquet"


def read_part(record: Any) -> Part:
    """The part of a journal's or a manifest's entry.

    Raises:
        ValueError: it is none.
    """
    return checked(Part, record, "an entry of a part")


def holds(path: Path, part: Part) -> bool:
    """Whether a file is still what was written."""
    try:
        return path.stat().st_size == part.bytes and checksum(path) == part.sha256
    except OSError:
        return False


def finished_parts(folder: Path, manifest: Mapping[str, Any]) -> list[Part]:
    """The parts of a folder that may still be written to, in the order of the input."""
    listed = [*map(read_part, manifest.get("parts") or []), *journal_parts(folder)[0]]
    found = {part.file: part for part in listed}
    return [found[name] for name in sorted(found)]


def journal_parts(folder: Path) -> tuple[list[Part], int]:
    """The parts that the journal lists, and how many of its lines are damaged."""
    journal, found, damaged = folder / JOURNAL, [], 0
    for line in journal.read_bytes().splitlines(keepends=True) if journal.is_file() else []:
        record = lines.read(line) if line.endswith(b"\n") else None  # the last may have been cut off by a kill
        try:
            entry = {k: v for k, v in record.items() if k != "job"} if record is not None else None
            if entry != {}:  # the first line says the job alone
                found.append(read_part(entry))
        except ValueError:
            damaged += 1
    return found, damaged


# -- the manifest ----------------------------------------------------------------------------------------------------
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


def sealed(manifest: Mapping[str, Any]) -> bytes:
    """A manifest as its file has it, with a checksum of all that it says."""
    facts = {name: value for name, value in manifest.items() if name != _SEAL}
    return (json.dumps({**facts, _SEAL: _digest_of(facts)}, indent=1, ensure_ascii=False) + "\n").encode()


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
        lost = any(folder.glob("part-*.parquet"))
        way = "run the job that wrote its parts again, which writes it again" if lost else "no job has written there"
        raise LoadError(f"{folder} has no {MANIFEST}: {way}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LoadError(
            f"{folder / MANIFEST} is damaged ({error}); run the job again, which writes it again and keeps the parts"
        ) from error
    return dict(found)

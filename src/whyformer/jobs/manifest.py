"""The manifest of a job, and the entries of its parts in the manifest and the log."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr

from whyformer.errors import LoadError, import_optional
from whyformer.explanation.schemas import Natural, checked
from whyformer.explanation.versions import versions
from whyformer.jobs import lines
from whyformer.jobs.disk import checksum

MANIFEST, FAILURES, LOG = "manifest.json", "failures.parquet", "log.jsonl"
PART = r"part-[0-9]{6,}\.parquet"
FORMAT = 1
_CHECKSUM = "sha256"
_IDENTITY = ("job", "model", "source", "versions")


# -- identity of a job ----------------------------------------------------------------------------------------------
def job_facts(job: Mapping[str, Any], model: Mapping[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that determine the bytes of a job's parts."""
    pa = import_optional("pyarrow", "a job")
    return {"job": dict(job), "model": dict(model), "source": dict(source),
            "versions": {**versions(), "pyarrow": pa.__version__}}  # fmt: skip


def job_id(facts: Mapping[str, Any]) -> str:
    """Return the id of a job, 16 hexadecimal digits of SHA-256, which every file of the job contains."""
    return _digest_of({key: _bare(facts.get(key)) for key in _IDENTITY})[:16]


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return a description of each difference between two jobs."""
    lines = []
    for key in _IDENTITY:
        whose, before, after = "" if key == "job" else f"the {key}'s ", _bare(old.get(key)), _bare(new.get(key))
        names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        lines += [f"{whose}{name} was {before.get(name)!r} and is {after.get(name)!r}" for name in names]
    return lines


def _bare(facts: Any) -> dict[str, Any]:
    """Return facts without names, because a folder may have been moved."""
    return {k: v for k, v in dict(facts or {}).items() if k != "name"}


def _digest_of(facts: Mapping[str, Any]) -> str:
    """Return the SHA-256 of JSON values, independent of the order of keys."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


# -- parts -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Part:
    """The entry of a finished part.

    Attributes:
        file: name of its file.
        first: index of its first row in the input.
        rows: number of its rows in the input.
        written: number of rows of its table.
        failed: number of failures.
        bytes: size of the file.
        sha256: checksum of the file.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    file: Annotated[str, Field(pattern=f"^{PART}$")]
    first: Natural
    rows: Natural
    written: Natural
    failed: Natural
    bytes: Natural
    sha256: StrictStr


def part_name(number: int) -> str:
    """Return the file name of a part, such as ``part-000012.parquet``."""
    return f"part-{number:06d}.parquet"


def read_part(record: Any) -> Part:
    """Validate the entry of a part in a manifest or a log.

    Raises:
        ValueError: the entry is invalid.
    """
    return checked(Part, record, "an entry of a part")


def holds(path: Path, part: Part) -> bool:
    """Return True if a file has the size and the checksum of its entry."""
    try:
        return path.stat().st_size == part.bytes and checksum(path) == part.sha256
    except OSError:
        return False


def finished_parts(folder: Path, manifest: Mapping[str, Any], job: str) -> dict[str, Part]:
    """Return the finished parts that the manifest and the log list, by name and in order; the job may be running."""
    parts, log = {}, folder / LOG
    for line in log.read_bytes().splitlines() if log.is_file() else []:
        facts = lines.read(line) or {}  # a damaged line lists no part
        with suppress(ValueError, KeyError):  # the line is another event
            part = read_part({f.name: facts[f.name] for f in fields(Part)})
            if facts["job"] == job:
                parts[part.file] = part
    parts |= {part.file: part for part in map(read_part, manifest.get("parts") or [])}
    return {name: parts[name] for name in sorted(parts)}


# -- the manifest ----------------------------------------------------------------------------------------------------
class _Described(BaseModel):
    """Validated fields of the model in a manifest; others are allowed."""

    labels: dict[Annotated[str, Field(pattern="^[0-9]+$")], StrictStr] | None = None


class Manifest(BaseModel):
    """Validated fields of a manifest; others are allowed."""

    format: Literal[1]
    job: dict[str, Any]
    model: _Described
    source: dict[str, Any]
    complete: StrictBool
    parts: list[Part] | None = None
    batch_sizes: list[tuple[Natural, Natural]] | None = None


def manifest_bytes(manifest: Mapping[str, Any]) -> bytes:
    """Return the bytes of a manifest with its checksum."""
    facts = {name: value for name, value in manifest.items() if name != _CHECKSUM}
    return (json.dumps({**facts, _CHECKSUM: _digest_of(facts)}, indent=1, ensure_ascii=False) + "\n").encode()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and validate the manifest of a folder.

    Raises:
        LoadError: the manifest is missing or damaged.
    """
    lost = any(folder.glob("part-*.parquet"))
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        checked(Manifest, manifest, "the manifest")
        if manifest.pop(_CHECKSUM, None) != _digest_of(manifest):
            raise ValueError("its content does not match its checksum")
    except FileNotFoundError as error:
        way = "run the job that wrote its parts again to restore it" if lost else "it is not the output of a job"
        raise LoadError(f"{folder} has no {MANIFEST}: {way}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if is_foreign(folder / MANIFEST):
            way = "delete it, and run the job that wrote the parts beside it again" if lost else "read another folder"
            raise LoadError(f"{folder / MANIFEST} is not the manifest of a job: {way}") from error
        raise LoadError(
            f"{folder / MANIFEST} is damaged ({error}): run the job again to rewrite it; finished parts are kept"
        ) from error
    return dict(manifest)


def is_foreign(path: Path) -> bool:
    """Return True if a file of the manifest's name is JSON of another kind; a damaged manifest is not."""
    try:
        facts = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return not (isinstance(facts, dict) and {"job", "model", "source"} <= facts.keys())

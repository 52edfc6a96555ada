"""Whose files are in a folder: each file that a job writes says which job it is of.

Parts and the table of failures say it in their metadata, the manifest by what it describes, the journal, the log and
the notes of rows in each line, files under passing names in the name. A file that was damaged says nothing; it is the
job's where another file of the folder is, and it has a name that only the job gives.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whyformer.errors import InputError, LoadError
from whyformer.jobs.attempts import NOTES
from whyformer.jobs.manifest import (
    FAILURES,
    JOURNAL,
    LOG,
    MANIFEST,
    PART,
    Part,
    changes,
    holds,
    job_id,
    journal_parts,
    read_manifest,
    read_part,
)
from whyformer.jobs.parts import facts_of, is_stamped, stamp_of, verified
from whyformer.jobs.rows import needed

OVERLAYS = "overlays"
_LINES = rf"{re.escape(JOURNAL)}|{re.escape(LOG)}|{NOTES}"
_PASSING = re.compile(r"[a-z]+(?:-[0-9]{6,})?\.[a-z]+\.([0-9a-f]{16})\.[0-9]+\.partial")
_OVERLAY = re.compile(r"[0-9]{8,}-[0-9]+-.*\.(png|html)")
_HEAD = 2**16


@dataclass
class Holdings:
    """What a folder holds of one job.

    Attributes:
        manifest: what it says, None where it is lost or damaged.
        parts: those whose bytes are as they were written, by name; sizes: of their batches, by the parts' numbers,
            where there is no manifest that says them.
        damaged: names of files, and what else was not as it was written.
        passing: files that a run that was killed left under passing names.
    """

    manifest: dict[str, Any] | None = None
    parts: dict[str, Part] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)
    passing: list[Path] = field(default_factory=list)


def holdings(folder: Path, facts: Mapping[str, Any]) -> Holdings:
    """What a folder holds of a job; it is only read.

    Args:
        facts: what decides the bytes of the job's parts, as :func:`whyformer.jobs.manifest.described` gives it.

    Raises:
        InputError: it holds another job, files of something else, or files that do not say what they are of.
    """
    found, own = Holdings(), job_id(facts)
    paths = [p for p in sorted(folder.iterdir()) if not _is_hidden(p.name)] if folder.is_dir() else []
    found.manifest = _manifest(folder, facts)
    if not paths:
        return found
    listed = _listed(folder, found)
    found.parts = {name: part for name, part in listed.items() if holds(folder / name, part)}
    says = {path: own if path.name in found.parts else _says(path) for path in paths}
    foreign = [path.name for path, said in says.items() if said == ""]
    if foreign:
        raise InputError(f"{folder} holds other files ({_few(foreign)}): give another folder as out")
    others = [path.name for path, said in says.items() if said not in (None, own)]
    if others:
        raise InputError(f"{folder} holds files of another job ({_few(others)}): give another folder as out")
    proven = own in says.values()
    silent = [path.name for path, said in says.items() if said is None and not (proven and _is_known(path, listed))]
    if silent:
        raise InputError(
            f"{folder} holds files that do not say which job they are of ({_few(silent)}): give another folder as out, "
            f"or delete them if they are of this job, which makes them again"
        )
    _sort(found, says, listed, str(facts["job"]["scores"]))
    return found


def _manifest(folder: Path, facts: Mapping[str, Any]) -> dict[str, Any] | None:
    try:
        manifest = read_manifest(folder)
    except LoadError:  # lost or damaged: what the other files say decides
        return None
    changed = changes(manifest, facts)
    if changed:
        raise InputError(
            f"{folder} holds another job: {'; '.join(changed)}. Give another folder as out, or delete this one"
        )
    return manifest


def _listed(folder: Path, found: Holdings) -> dict[str, Part]:
    """The parts that the manifest and the journal list, by name."""
    journal, damaged = journal_parts(folder)
    found.damaged += ["a line of the journal"] * damaged
    known = [read_part(p) for p in (found.manifest or {}).get("parts") or []]
    return {part.file: part for part in [*known, *journal]}


def _sort(found: Holdings, says: Mapping[Path, str | None], listed: Mapping[str, Part], scores: str) -> None:
    """Tell whole parts from damaged ones, and what a run that was killed left."""
    for path in says:
        if path.name == MANIFEST and found.manifest is None:
            found.damaged.append(path.name)
        elif _PASSING.fullmatch(path.name):
            found.passing.append(path)
        elif re.fullmatch(PART, path.name) and path.name not in found.parts:
            whole = verified(path, scores)
            if whole is None:
                found.damaged.append(path.name)
            else:
                found.parts[path.name] = whole
    found.damaged += [name for name in listed if name not in found.parts and name not in found.damaged]
    if found.manifest is None:
        facts = [facts_of(path) for path in says if path.name in found.parts]
        found.sizes = {one.part: one.batch_size for one in facts}


# -- what one file says ----------------------------------------------------------------------------------------------
def _says(path: Path) -> str | None:
    """The id of the job that a file says it is of; "" where it is of something else, None where it says nothing."""
    name = path.name
    if name == OVERLAYS and path.is_dir():
        return None if all(_OVERLAY.fullmatch(p.name) or _is_hidden(p.name) for p in path.iterdir()) else ""
    passing = _PASSING.fullmatch(name)
    if not path.is_file() or passing:
        return passing[1] if passing else ""
    if name == FAILURES or re.fullmatch(PART, name):
        return _said_by_table(path)
    if name == MANIFEST:
        return _said_by_manifest(path)
    if re.fullmatch(_LINES, name):
        return _said_by_line(path)
    return ""


def _said_by_table(path: Path) -> str | None:
    pq, arrow = needed("pyarrow.parquet", "a job"), needed("pyarrow", "a job")
    try:
        read = pq.read_schema(path)
    except (OSError, ValueError, TypeError, arrow.ArrowException):  # not all of arrow's errors are of one kind
        return None
    facts = stamp_of(read)
    return str(facts["job"]) if facts is not None and "job" in facts else None if is_stamped(read) else ""


def _said_by_manifest(path: Path) -> str | None:
    try:
        return job_id(read_manifest(path.parent))
    except LoadError:
        pass
    try:
        facts = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None
    return None if isinstance(facts, dict) and {"job", "model", "source"} <= facts.keys() else ""


def _said_by_line(path: Path) -> str | None:
    """By the first whole line that says something."""
    with path.open("rb") as file:
        head = file.read(_HEAD)
    for line in head.splitlines():
        try:
            facts = json.loads(line)
        except (ValueError, RecursionError):
            continue
        return str(facts["job"]) if isinstance(facts, dict) and "job" in facts else ""
    return None


# -- names -----------------------------------------------------------------------------------------------------------
def _is_hidden(name: str) -> bool:
    """Whether a file is the system's, or the lock: these are let be."""
    return name.startswith(".") or name in ("Thumbs.db", "desktop.ini")


def _is_known(path: Path, listed: Mapping[str, Part]) -> bool:
    """Whether a file that says nothing has a name that the job gives: of parts, that of one that it has listed."""
    return path.name in listed if re.fullmatch(PART, path.name) else True


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

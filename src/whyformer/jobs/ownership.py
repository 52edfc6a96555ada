"""Ownership of the files in a folder: each file that a job writes contains the id of the job.

The id is in the metadata of parts and of the table of failures, in each line of the log and of the notes of rows, and
in the names of temporary files; that of the manifest is computed from its content. A damaged file has no id: it belongs
to the job if another file of the folder does, and if its name is one that the job uses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whyformer.errors import InputError, LoadError, import_optional
from whyformer.jobs import lines
from whyformer.jobs.attempts import NOTES
from whyformer.jobs.manifest import (
    FAILURES,
    LOG,
    MANIFEST,
    PART,
    Part,
    changes,
    finished_parts,
    holds,
    is_foreign,
    job_id,
    read_manifest,
)
from whyformer.jobs.parts import facts_of, is_stamped, stamp_of, verified

OVERLAYS = "overlays"
_LINES = rf"{re.escape(LOG)}|{NOTES}"
_TEMPORARY = re.compile(r"[a-z]+(?:-[0-9]{6,})?\.[a-z]+\.([0-9a-f]{16})\.[0-9]+\.partial")
_OVERLAY = re.compile(r"[0-9]{8,}-[0-9]+-.*\.(png|html)")
_HEAD = 2**16


@dataclass
class JobFiles:
    """The files of one job in a folder.

    Attributes:
        manifest: the manifest; None if it is missing or damaged.
        parts: intact parts by name.
        sizes: batch size of each part by its number, if there is no manifest.
        damaged: names of damaged files.
        temporary: temporary files of a killed run, and all files of another job that wrote no part, to be removed.
    """

    manifest: dict[str, Any] | None = None
    parts: dict[str, Part] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)
    temporary: list[Path] = field(default_factory=list)


def job_files(folder: Path, facts: Mapping[str, Any]) -> JobFiles:
    """Return the files of a job in a folder, without changing them.

    Args:
        folder: the folder.
        facts: values that determine the bytes of the job's parts, see :func:`whyformer.jobs.manifest.job_facts`.

    Raises:
        InputError: the folder contains another job, other files, or files that cannot be identified.
    """
    contents, job = JobFiles(), job_id(facts)
    paths = [p for p in sorted(folder.iterdir()) if not _is_hidden(p.name)] if folder.is_dir() else []
    if not paths:
        return contents
    if _wrote_nothing(folder, paths, job):
        return JobFiles(temporary=paths)
    contents.manifest = _manifest(folder, facts)
    finished = finished_parts(folder, contents.manifest or {}, job)
    contents.parts = {name: part for name, part in finished.items() if holds(folder / name, part)}
    ids = {path: job if path.name in contents.parts else _id_in(path) for path in paths}
    foreign = [path.name for path, id_ in ids.items() if id_ == ""]
    if foreign:
        raise InputError(f"{folder} contains other files ({_few(foreign)}): use another folder as out")
    others = [path.name for path, id_ in ids.items() if id_ not in (None, job)]
    if others:
        raise InputError(f"{folder} contains files of another job ({_few(others)}): use another folder as out")
    unknown = [path.name for path, id_ in ids.items() if id_ is None]
    if job in ids.values():  # then damaged files are of this job, except parts that neither manifest nor log lists
        unknown = [name for name in unknown if re.fullmatch(PART, name) and name not in finished]
    if unknown:
        raise InputError(
            f"{folder} contains files of an unknown job ({_few(unknown)}): use another folder as out, or delete them "
            "if they are files of this job, which then rewrites them"
        )
    _sort(contents, ids, finished, str(facts["job"]["scores"]))
    return contents


def _manifest(folder: Path, facts: Mapping[str, Any]) -> dict[str, Any] | None:
    try:
        manifest = read_manifest(folder)
    except LoadError:  # missing or damaged: the other files decide
        return None
    changed = changes(manifest, facts)
    if changed:
        raise InputError(
            f"{folder} contains another job: {'; '.join(changed)}. Use another folder as out, or delete this one"
        )
    return manifest


def _wrote_nothing(folder: Path, paths: list[Path], job: str) -> bool:
    """Return whether all files are those of one other job, which ended before it wrote a part."""
    try:
        manifest = read_manifest(folder)
    except LoadError:
        return False
    other = job_id(manifest)
    if other == job or manifest["complete"] or finished_parts(folder, manifest, other):
        return False
    results = rf"{PART}|{OVERLAYS}"
    return all(not re.fullmatch(results, path.name) and _id_in(path) in (other, None) for path in paths)


def _sort(contents: JobFiles, ids: Mapping[Path, str | None], finished: Mapping[str, Part], scores: str) -> None:
    """Classify the files: intact parts, damaged files, and temporary files."""
    for path in ids:
        if path.name == MANIFEST and contents.manifest is None:
            contents.damaged.append(path.name)
        elif _TEMPORARY.fullmatch(path.name):
            contents.temporary.append(path)
        elif re.fullmatch(PART, path.name) and path.name not in contents.parts:
            intact = verified(path, scores)
            if intact is None:
                contents.damaged.append(path.name)
            else:
                contents.parts[path.name] = intact
    contents.damaged += [name for name in finished if name not in contents.parts and name not in contents.damaged]
    if contents.manifest is None:
        facts = [facts_of(path) for path in ids if path.name in contents.parts]
        contents.sizes = {part.part: part.batch_size for part in facts}


# -- id of one file --------------------------------------------------------------------------------------------------
def _id_in(path: Path) -> str | None:
    """Return the job id of a file; "" if it is no file of a job, None if it is damaged."""
    name = path.name
    if name == OVERLAYS and path.is_dir():
        return None if all(_OVERLAY.fullmatch(p.name) or _is_hidden(p.name) for p in path.iterdir()) else ""
    temporary = _TEMPORARY.fullmatch(name)
    if not path.is_file() or temporary:
        return temporary[1] if temporary else ""
    if name == FAILURES or re.fullmatch(PART, name):
        return _id_in_table(path)
    if name == MANIFEST:
        return _id_in_manifest(path)
    if re.fullmatch(_LINES, name):
        return _id_in_lines(path)
    return ""


def _id_in_table(path: Path) -> str | None:
    pq, arrow = import_optional("pyarrow.parquet", "a job"), import_optional("pyarrow", "a job")
    try:
        table_schema = pq.read_schema(path)
    except (OSError, ValueError, TypeError, arrow.ArrowException):  # Arrow raises unrelated types
        return None
    facts = stamp_of(table_schema)
    return str(facts["job"]) if facts is not None and "job" in facts else None if is_stamped(table_schema) else ""


def _id_in_manifest(path: Path) -> str | None:
    try:
        return job_id(read_manifest(path.parent))
    except LoadError:
        return "" if is_foreign(path) else None


def _id_in_lines(path: Path) -> str | None:
    """Return the job id of the first line that is intact; "" if the first line in JSON is no line of a job."""
    with path.open("rb") as file:
        head = file.read(_HEAD)
    for line in head.splitlines():
        try:
            facts = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(facts, dict) or not {"job", "check"} <= facts.keys():
            return ""
        if lines.read(line) is not None:
            return str(facts["job"])
    return None


# -- names -----------------------------------------------------------------------------------------------------------
def _is_hidden(name: str) -> bool:
    """Return True for files of the system and for the lock, which are ignored."""
    return name.startswith(".") or name in ("Thumbs.db", "desktop.ini")


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

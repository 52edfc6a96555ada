"""Find and read the results of a report: explanations, answers, benchmarks and the folders of jobs, in any mixture."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from markupsafe import Markup
from safetensors import SafetensorError, safe_open

from whyformer.apps.report.inputs import SavedMap, once
from whyformer.apps.report.pictures import LONGEST, decoded, shrunk
from whyformer.apps.report.sections import (
    FILES,
    BenchmarkSection,
    JobFolder,
    drifts,
    read_benchmark,
    summary,
)
from whyformer.errors import FOREIGN_ERRORS, InputError, LoadError, WhyformerError
from whyformer.explanation.counts import amount
from whyformer.explanation.generation import Generation
from whyformer.explanation.result import Explanation
from whyformer.jobs.manifest import MANIFEST
from whyformer.progress import Track
from whyformer.show import painting
from whyformer.show.answers import conversation, question
from whyformer.show.html import curves
from whyformer.show.html.answer import card
from whyformer.show.layout import by_input
from whyformer.show.words import remarks, short, trust_figures, words

_MOST_BYTES = 256 * 2**20
_DRAWINGS = {".png", ".svg", ".pdf", ".html"}
"""Suffixes of files without scores that commands write; they are not listed as left out."""
_REASONS = {
    "records.jsonl": "an unfinished benchmark: run it again with the same --out to finish it",
    "table.csv": "a table: a benchmark is read from its report.json",
}


@dataclass(frozen=True)
class SavedAnswer:
    """A generated text with its explanation.

    Attributes:
        g: the answer.
        title: the question that its scores answer.
        file: where it was found.
        versions: versions of the packages that made it.
        card: its drawing.
    """

    g: Generation
    title: str
    file: str
    versions: dict[str, str]
    card: Markup


@dataclass(frozen=True)
class Skipped:
    """A file that is not in the report; ``damaged`` if it should have been."""

    file: str
    why: str
    damaged: bool = False


class _OtherFile(Exception):  # noqa: N818
    """A file of another kind; the message names the kind."""


@dataclass
class Contents:
    """The results in the order of the files' names."""

    saved: list[SavedMap] = field(default_factory=list)
    answers: list[SavedAnswer] = field(default_factory=list)
    benchmarks: list[BenchmarkSection] = field(default_factory=list)
    jobs: list[JobFolder] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)


def read(sources: Sequence[Path], leave_out: Path, track: Track) -> Contents:
    """Read everything in files and folders (with what is below them), without following links to folders.

    Args:
        sources: the files and folders.
        leave_out: the report itself, which may lie in one of the folders.
        track: wraps the files in a progress bar.

    Raises:
        LoadError: a source is missing or cannot be listed.
    """
    files = list(_files(sources, leave_out))
    contents = Contents()
    benchmarks = {path.parent for path, _ in files if path.name == "report.json" and path.is_file()}
    jobs = {path.parent for path, _ in files if path.name == MANIFEST and _is_job(path)}
    for path, name in track(files, "reading", len(files)):
        in_job = path.parent in jobs
        part = (in_job and path.name != MANIFEST) or (path.parent in benchmarks and path.name in FILES)
        if part or path.suffix in _DRAWINGS:
            continue
        try:
            if in_job:
                _read_job(path.parent, name, contents)
            else:
                _read(path, name, contents)
        except _OtherFile as error:
            contents.skipped.append(Skipped(name, str(error)))
        except WhyformerError as error:
            contents.skipped.append(Skipped(name, str(error).replace(str(path), path.name), damaged=True))
        except OSError as error:
            contents.skipped.append(Skipped(name, f"cannot be read: {error.strerror or error}", damaged=True))
        except (*FOREIGN_ERRORS, TemplateError) as error:  # well formed, but its values do not fit together
            contents.skipped.append(Skipped(name, f"damaged: it cannot be drawn ({error})", damaged=True))
    contents.benchmarks += drifts(contents.jobs)
    # the .json beside a .safetensors holds a part of the same answer
    twice = {answer.file.removesuffix(".safetensors") + ".json" for answer in contents.answers}
    contents.answers = [answer for answer in contents.answers if answer.file not in twice]
    contents.skipped = [skipped for skipped in contents.skipped if skipped.damaged or skipped.file not in twice]
    contents.saved = once(contents.saved)
    return contents


def _files(sources: Sequence[Path], leave_out: Path) -> Iterator[tuple[Path, str]]:
    """Yield (path, name in the report) of each file once, except hidden and half-written files."""
    listed = {leave_out.resolve()}
    for source in sources:
        if not source.exists():
            raise LoadError(f"no such file or folder: {source}")
        for path in _below(source) if source.is_dir() else [source]:
            if path.resolve() not in listed:
                listed.add(path.resolve())
                yield path, str(path.relative_to(source)) if source.is_dir() else path.name


def _below(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise LoadError(f"cannot list {error.filename}: {error.strerror}") from error

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        yield from (Path(parent) / n for n in sorted(names) if not n.startswith(".") and not n.endswith(".partial"))


def _is_job(path: Path) -> bool:
    """Return True if a manifest is that of a job."""
    try:
        return _fits(path) is None and json.loads(path.read_bytes()).keys() >= {"format", "job", "source"}
    except (OSError, ValueError, RecursionError, AttributeError):
        return False


def _fits(path: Path) -> str | None:
    """Return why a file is not opened, or None."""
    if not path.is_file():
        return "not a regular file"
    return f"larger than {_MOST_BYTES // 2**20} MB" if path.stat().st_size > _MOST_BYTES else None


# -- files of each kind ----------------------------------------------------------------------------------------------
def _read_job(folder: Path, name: str, contents: Contents) -> None:
    from whyformer.jobs.reading import read as read_maps

    job = JobFolder(read_maps(folder), str(Path(name).parent) if Path(name).parent.name else folder.name)
    contents.benchmarks.append(summary(job))
    contents.jobs.append(job)


def _read(path: Path, name: str, contents: Contents) -> None:
    if reason := _fits(path):
        raise _OtherFile(reason)
    if path.suffix == ".safetensors":
        _read_tensors(path, name, contents)
    elif path.suffix == ".json":
        _read_json(path, name, contents)
    else:
        raise _OtherFile(_REASONS.get(path.name, "another kind of file"))


def _read_tensors(path: Path, name: str, contents: Contents) -> None:
    """Read a file of :meth:`Explanation.save` or :meth:`Generation.save`."""
    try:
        with safe_open(str(path), "pt") as file:
            facts = json.loads((file.metadata() or {}).get("whyformer", "null"))
    except (SafetensorError, ValueError) as error:
        raise LoadError(f"damaged: {error}") from error
    if not isinstance(facts, dict) or "method" not in facts:
        raise _OtherFile("tensors, but no saved explanation")
    if str(facts.get("format")).startswith("generation"):
        contents.answers.append(_answer(Generation.load(path), name, facts, len(contents.answers)))
    else:
        contents.saved += _maps(Explanation.load(path), path.stem, name, facts)


def _read_json(path: Path, name: str, contents: Contents) -> None:
    """Read a file of ``--format json`` or ``--json``, or the values of a ``to_dict`` method."""
    content = path.read_bytes()
    try:
        facts = json.loads(content)
    except (ValueError, RecursionError) as error:
        if b'"schema_version"' in content[:200] or path.name == "report.json":
            raise LoadError(f"damaged: {error}") from error
        raise _OtherFile("not valid JSON") from error
    keys = facts.keys() if isinstance(facts, dict) else set()
    if keys >= {"benchmark", "figures"}:
        contents.benchmarks.append(read_benchmark(path, name, facts))
    elif "generation" in keys or keys >= {"matrix", "pieces", "explained"}:
        values = facts.get("generation", facts)
        if isinstance(values, dict) and values.get("seen"):
            raise _OtherFile("an answer without the pictures of its prompt: explain again with --format safetensors")
        contents.answers.append(_answer(Generation.from_dict(values), name, facts, len(contents.answers)))
    elif keys >= {"scores", "method", "level"}:
        contents.saved += _maps(Explanation.from_dict(facts), path.stem, name, {})
    elif keys and facts.get("command") in ("explain", "compare"):
        contents.saved += _printed(facts, path, name)
    else:
        raise _OtherFile("JSON without explanations")


def _printed(facts: Mapping[str, Any], path: Path, name: str) -> list[SavedMap]:
    """Return the explanations of ``--format json``, with the picture that they share."""
    if not isinstance(facts.get("explanations"), list):
        raise LoadError("damaged: it has no list of explanations")
    picture = None if facts.get("picture") is None else decoded(facts["picture"])
    maps = []
    for values in facts["explanations"]:
        e = Explanation.from_dict(values)
        if picture is not None and len(e) == 1:
            place = e.geometry[0] if e.geometry is not None else None
            if place is None:
                e = e.with_features(pictures=torch.from_numpy(np.array(picture))[None])
            else:  # the picture may have another size than the original
                size = (picture.height, picture.width)
                e = e.with_features(originals=[picture], geometry=[place.scaled(size)])
        maps += _maps(e, str(facts.get("input") or path.stem), name, facts)
    return maps


def _answer(g: Generation, name: str, facts: Mapping[str, Any], number: int) -> SavedAnswer:
    drawing = Markup(card(g, f"g{number + 1}", titled=False))
    title = short(question(conversation(g)), 90)
    return SavedAnswer(g, title, name, _versions(facts), drawing)


def _maps(e: Explanation, title: str, name: str, facts: Mapping[str, Any]) -> list[SavedMap]:
    """Return the explanation of each sample and input of the model, after checking that it can be drawn."""
    maps = []
    for number, sample in enumerate(e, 1):
        for part in by_input(sample):
            shrunken = shrunk(part, LONGEST)
            _check_drawing(shrunken)
            label = title if len(e) == 1 else f"{title}, sample {number}"
            maps.append(SavedMap(shrunken, label, name, _versions(facts)))
    return maps


def _check_drawing(e: Explanation) -> None:
    """Raise an exception if the values of a file do not fit together: fewer tokens than scores, or another grid."""
    e.top(0, 1)
    remarks([e])
    if check := trust_figures(e):
        curves(check)
    if e.level == "token":
        words(e)
    elif painting.drawable(e):
        painting.overlay(e, longest=8)


def _versions(facts: Mapping[str, Any]) -> dict[str, str]:
    versions = facts.get("versions")
    return {str(k): str(v) for k, v in versions.items()} if isinstance(versions, dict) else {}


def nothing(sources: Sequence[Path], contents: Contents) -> InputError:
    """Return the error of a report without results: what is expected, and what is there instead."""
    where = ", ".join(map(str, sources))
    for file in contents.skipped:
        if file.damaged:
            return InputError(f"nothing in {where} can be read; {file.file}: {file.why}")
    return InputError(
        f"there is nothing to report in {where}, only {amount(len(contents.skipped), 'file')} of other kinds: a report "
        "is made of saved explanations and answers (.safetensors, or .json from --format json), benchmarks "
        "(report.json) and jobs' folders; pictures and pages have no scores, so explain again with --format png,json"
    )

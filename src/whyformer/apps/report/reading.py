"""Find and read what a report is made of: saved explanations and the folders of benchmarks, in any mixture."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from whyformer.apps.report.benchmarks import FILES, BenchmarkSection, read_benchmark, read_table
from whyformer.apps.report.jobs import MANIFEST, JobSection, drift, pairs, read_job, summary
from whyformer.apps.report.pictures import LONGEST, decoded, shrunk
from whyformer.errors import InputError, LoadError, WhyformerError
from whyformer.explanation.counts import amount
from whyformer.explanation.generation import Generation
from whyformer.explanation.result import Explanation
from whyformer.show.layout import by_input
from whyformer.show.words import short

Track = Callable[..., Iterable[Any]]

_MOST_BYTES = 256 * 2**20
_BESIDES = {".png", ".svg", ".pdf", ".html", ".json"}
"""What the commands write beside a saved explanation of the same name: known, so not worth a remark."""
_SAID = {"matrix", "pieces", "explained"}
"""What :meth:`Generation.to_dict` gives, beside others."""
_MARKS = (
    b"Software\0whyformer", b"<dc:title>whyformer</dc:title>", b"/Creator (whyformer)",
    b'name="generator" content="whyformer',
)  # fmt: skip
"""What they write into these, so that one is known by itself."""


@dataclass(frozen=True)
class Saved:
    """One explanation of one sample.

    Attributes:
        title: what the input is called.
        file: where it was found, below what was asked for, a line for each place.
        versions: of the packages that made it.
    """

    e: Explanation
    title: str
    file: str
    versions: dict[str, str]


@dataclass(frozen=True)
class Answer:
    """One generated text with its explanation; ``card``: its drawing, once there is one; the rest as in
    :class:`Saved`."""

    g: Generation
    title: str
    file: str
    versions: dict[str, str]
    card: str = ""


@dataclass(frozen=True)
class Skipped:
    """A file that is not in the report; ``damaged`` if it should have been."""

    file: str
    why: str
    damaged: bool = False


@dataclass
class Contents:
    """All that was found, in the order of the files' names; ``drawn``: how many drawings of ours, without scores."""

    saved: list[Saved] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    benchmarks: list[BenchmarkSection] = field(default_factory=list)
    jobs: list[JobSection] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    drawn: int = 0


class _NotOurs(Exception):  # noqa: N818
    """A file of another kind; the message says of which."""


def read(sources: Sequence[Path], leave_out: Path, track: Track) -> Contents:
    """Everything in files and folders (with what is below them), without following links to folders.

    Args:
        leave_out: the report itself, which may lie in one of the folders.
        track: wraps the files in a progress bar.

    Raises:
        LoadError: a source is missing or cannot be listed.
    """
    found = list(_files(sources, leave_out))
    contents = Contents()
    ours = {path.parent for path, _ in found if path.name == "report.json" and path.is_file()}
    work = {path.parent for path, _ in found if path.name == MANIFEST and _is_job(path)}
    for path, name in track(found, "reading", len(found)):
        try:
            if path.parent in work and path.name != MANIFEST:
                continue
            if path.parent in ours and path.name in FILES[1:]:
                continue
            if path.parent in work:
                job = read_job(path.parent, str(Path(name).parent) if Path(name).parent.name else path.parent.name)
                contents.benchmarks.append(summary(job))
                contents.jobs.append(job)
                continue
            _read(path, name, contents)
        except _NotOurs as error:
            if _drawn_by_us(path):
                contents.drawn += 1
            else:
                contents.skipped.append(Skipped(name, str(error)))
        except WhyformerError as error:
            contents.skipped.append(Skipped(name, str(error).replace(str(path), path.name), damaged=True))
        except OSError as error:
            contents.skipped.append(Skipped(name, f"cannot be read: {error.strerror or error}", damaged=True))
    contents.benchmarks += [drift(*pair) for pair in pairs(contents.jobs)]
    # of an answer in both forms the one that holds all of it is shown
    twice = {a.file.removesuffix(".safetensors") + ".json" for a in contents.answers}
    contents.answers = [a for a in contents.answers if a.file not in twice]
    read_from = [*(m.file for m in contents.saved), *(a.file for a in contents.answers)]
    shown = {Path(file).with_suffix("") for file in read_from}
    contents.skipped = [
        s
        for s in contents.skipped
        if s.damaged or Path(s.file).suffix not in _BESIDES or Path(s.file).with_suffix("") not in shown
    ]
    return contents


def _is_job(path: Path) -> bool:
    """Whether a manifest is that of a job."""
    try:
        facts = json.loads(path.read_bytes()) if path.is_file() and path.stat().st_size < _MOST_BYTES else None
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(facts, dict) and {"format", "job", "source"} <= facts.keys()


def _files(sources: Sequence[Path], leave_out: Path) -> Iterator[tuple[Path, str]]:
    """(path, name to show) of each file once, hidden ones and half-written ones left out."""
    seen = {leave_out.resolve()}
    for source in sources:
        if not source.exists():
            raise LoadError(f"no such file or folder: {source}")
        for path in _below(source) if source.is_dir() else [source]:
            if path.resolve() in seen:
                continue
            seen.add(path.resolve())
            yield path, str(path.relative_to(source)) if source.is_dir() else path.name


def _below(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise LoadError(f"cannot list {error.filename}: {error.strerror}") from error

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        yield from (Path(parent) / n for n in sorted(names) if not n.startswith(".") and not n.endswith(".partial"))


def _read(path: Path, name: str, contents: Contents) -> None:
    if not path.is_file():
        raise _NotOurs("not a regular file")
    if path.stat().st_size > _MOST_BYTES:
        raise _NotOurs(f"larger than {_MOST_BYTES // 2**20} MB")
    if path.suffix == ".safetensors":
        found = _saved(path, name)
        contents.answers.append(found) if isinstance(found, Answer) else contents.saved.extend(found)
    elif path.suffix == ".json":
        facts = _json(path)
        if isinstance(facts, dict) and "benchmark" in facts and "figures" in facts:
            contents.benchmarks.append(read_benchmark(path, name, facts))
        elif isinstance(facts, dict) and ("generation" in facts or facts.keys() >= _SAID):
            contents.answers.append(_said(facts, path, name))
        else:
            contents.saved += _printed(facts, path, name)
    elif path.name == "table.csv":
        table = read_table(path, name)
        if table is None:
            raise _NotOurs("a table, but no benchmark's")
        contents.benchmarks.append(table)
    elif path.name == "records.jsonl":
        raise _NotOurs("an unfinished benchmark: run it again with the same --out to finish it")
    else:
        raise _NotOurs("another kind of file")


def _drawn_by_us(path: Path) -> bool:
    """Whether a picture or a page says that it is one of ours: what was drawn is no source of a report."""
    if path.suffix not in _BESIDES or not path.is_file():
        return False
    with suppress(OSError), path.open("rb") as file:
        ends = file.read(2**16)
        file.seek(max(0, path.stat().st_size - 2**16))
        ends += file.read()
        return any(mark in ends for mark in _MARKS)
    return False


def _saved(path: Path, name: str) -> list[Saved] | Answer:
    """What :meth:`Explanation.save` or :meth:`Generation.save` wrote."""
    try:
        with safe_open(str(path), "pt") as file:
            facts = json.loads((file.metadata() or {}).get("whyformer", "null"))
    except (SafetensorError, ValueError) as error:
        raise LoadError(f"damaged: {error}") from error
    if not isinstance(facts, dict) or "method" not in facts:
        raise _NotOurs("tensors, but no saved explanation")
    if str(facts.get("format")).startswith("generation"):
        return _answer(Generation.load(path), path, name, facts.get("versions"))
    return _maps(Explanation.load(path), path.stem, name, facts.get("versions"))


def _said(facts: dict[str, Any], path: Path, name: str) -> Answer:
    """What ``--format json`` wrote of an answer, or what :meth:`Generation.to_dict` gave."""
    own = facts.get("generation", facts)
    if isinstance(own, dict) and own.get("seen"):
        raise _NotOurs("an answer without the pictures of its prompt: explain again with --format safetensors")
    return _answer(Generation.from_dict(own), path, name, facts.get("versions"))


def _answer(g: Generation, path: Path, name: str, versions: Any) -> Answer:
    return Answer(g, short(" ".join(g.text.split()) or path.stem, 90), name, _versions(versions))


def _printed(facts: Any, path: Path, name: str) -> list[Saved]:
    """What ``--format json`` wrote, or what :meth:`Explanation.to_dict` gave."""
    if isinstance(facts, dict) and {"scores", "method", "level"} <= facts.keys():
        return _maps(Explanation.from_dict(facts), path.stem, name, None)
    if not isinstance(facts, dict) or facts.get("command") not in ("explain", "compare"):
        raise _NotOurs("JSON, but no explanations in it")
    listed = facts.get("explanations")
    if not isinstance(listed, list):
        raise LoadError("damaged: no list of explanations in it")
    picture = None if facts.get("picture") is None else decoded(facts["picture"])
    made = []
    for one in listed:
        e = Explanation.from_dict(one)
        if picture is not None and len(e) == 1:  # kept apart from it, perhaps at another size
            size = (picture.height, picture.width)
            if e.geometry is None:
                e = e.with_features(pictures=torch.from_numpy(np.array(picture))[None])
            else:
                e = e.with_features(originals=[picture], geometry=[e.geometry[0].scaled(size)])
        made += _maps(e, str(facts.get("input") or path.stem), name, facts.get("versions"))
    return made


def _maps(e: Explanation, title: str, name: str, versions: Any) -> list[Saved]:
    known = _versions(versions)
    titles = [title if len(e) == 1 else f"{title}, sample {i + 1}" for i in range(len(e))]
    shown = [(part, t) for sample, t in zip(e, titles, strict=True) for part in by_input(sample)]
    return [Saved(shrunk(part, LONGEST), t, name, known) for part, t in shown]


def _versions(given: Any) -> dict[str, str]:
    return {str(k): str(v) for k, v in given.items()} if isinstance(given, dict) else {}


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        if b'"schema_version"' in path.read_bytes()[:200] or path.name == "report.json":
            raise LoadError(f"damaged: {error}") from error
        raise _NotOurs("not valid JSON") from error


def nothing(sources: Sequence[Path], contents: Contents) -> InputError:
    """The error where there is nothing to report: what was looked for, and what was found instead."""
    where = ", ".join(map(str, sources))
    wanted = (
        "saved explanations and answers (.safetensors, or .json from --format json), benchmarks (report.json) and "
        "jobs' folders"
    )
    damaged = [s for s in contents.skipped if s.damaged]
    if damaged:
        return InputError(f"nothing in {where} can be read; {damaged[0].file}: {damaged[0].why}")
    if contents.drawn:
        drawn = f"{amount(contents.drawn, 'drawing')} of whyformer"
        return InputError(
            f"there is nothing to report in {where}: {drawn} without scores; a report is made of {wanted}: "
            "explain again with --format png,json"
        )
    count = len(contents.skipped)
    others = f"{amount(count, 'file')} of other kinds {'is' if count == 1 else 'are'} there" if count else "it is empty"
    return InputError(f"there is nothing to report in {where}: a report is made of {wanted}, and {others}")

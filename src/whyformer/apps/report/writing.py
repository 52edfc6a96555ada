"""Write a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from whyformer.apps.report.inputs import InputSection, inputs_of
from whyformer.apps.report.models import models, versions_of
from whyformer.apps.report.pictures import drawn, encoded, room, thumbnail
from whyformer.apps.report.reading import Contents, Skipped, Track, nothing, read
from whyformer.errors import InputError
from whyformer.explanation.counts import amount
from whyformer.explanation.versions import versions
from whyformer.methods import METHODS
from whyformer.show import painting
from whyformer.show.files import write_all
from whyformer.show.html import render
from whyformer.show.words import target_name


@dataclass(frozen=True)
class WrittenReport:
    """A report that was written.

    Attributes:
        path: the file.
        bytes: its size.
        inputs: number of different pictures and sentences.
        explanations: number of maps.
        answers: number of generated texts.
        benchmarks: number of benchmarks.
        jobs: number of folders of jobs.
        skipped: files that are not in it.
    """

    path: Path
    bytes: int
    inputs: int
    explanations: int
    answers: int
    benchmarks: int
    jobs: int
    skipped: list[Skipped]


def write_report(
    sources: str | Path | Sequence[str | Path],
    out: str | Path = "report.html",
    *,
    title: str = "Why the models said so",
    track: Track = lambda work, description, total: work,
) -> WrittenReport:
    """Put saved explanations and benchmark results into one self-contained HTML file.

    Args:
        sources: files and folders (with all below them): explanations as :meth:`whyformer.Explanation.save` or
            ``whyformer explain --format json`` wrote them, answers as :meth:`whyformer.Generation.save` did, or
            that JSON where the prompt had no pictures, the folders of ``whyformer benchmark``, and those of
            ``whyformer run``: words, mean maps, and what changed between runs over the same input.
        out: the file, ending in ``.html``; it appears whole or not at all.
        title: its heading.
        track: wraps the work in a progress bar.

    Raises:
        InputError: there is nothing to report.
        LoadError: a source is missing, or the file cannot be written.
    """
    places = [Path(s) for s in ([sources] if isinstance(sources, str | Path) else sources)]
    target = Path(out)
    if target.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"a report is an .html file, not {target.name!r}")
    if target.is_dir():
        raise InputError(f"{target} is a folder: name a file in it")
    contents = read(places, target, track)
    if not contents.saved and not contents.answers and not contents.benchmarks:
        raise nothing(places, contents)
    inputs = inputs_of(contents.saved)
    counts = {
        "inputs": len(inputs), "explanations": len(contents.saved), "answers": len(contents.answers),
        "benchmarks": sum(one.kind == "benchmark" for one in contents.benchmarks), "jobs": len(contents.jobs),
    }  # fmt: skip
    page = _page(contents, inputs, counts, title, track).encode("utf-8", "backslashreplace")
    (path,) = write_all(target.parent, {target.name: page})
    return WrittenReport(path, len(page), **counts, skipped=contents.skipped)


def _page(
    contents: Contents, inputs: Sequence[InputSection], counts: Mapping[str, int], title: str, track: Track
) -> str:
    """Return the whole document; the inputs are drawn one after the other."""
    saved, answers, benchmarks = contents.saved, contents.answers, contents.benchmarks
    nouns = ("input", "map", "answer", "benchmark", "data set")
    summary = ", ".join(amount(count, noun) for count, noun in zip(counts.values(), nouns, strict=True) if count)
    # section -> its content; empty sections are left out
    facts = {
        "explanations": inputs, "answers": answers, "benchmarks": benchmarks,
        "models": models(saved, benchmarks, answers),
        "methods": [*(one.e.method for one in saved), *(one.g.method for one in answers)],
        "conventions": [*inputs, *answers], "versions": versions_of([*saved, *answers], benchmarks),
        "left-out": sorted(contents.skipped, key=lambda one: not one.damaged),
    }  # fmt: skip
    names = {"left-out": "Files left out"}
    if contents.jobs:
        names["benchmarks"] = "Benchmarks and data sets" if counts["benchmarks"] else "Data sets"
    pictures = sum(painting.base(one.first) is not None for one in inputs)
    most = room(pictures + sum(painting.drawable(one.e) for one in saved), len(inputs))
    return render(
        "report/page.html", title=title, version=versions()["whyformer"], summary=f"{summary}.",
        sections=[(key, names.get(key, key.capitalize())) for key, content in facts.items() if content],
        inputs=inputs, maps=[one for section in inputs for one in section.maps],
        targets=[target_name(one.e) for one in saved], known=METHODS, skipped=facts.pop("left-out"),
        track=lambda work: track(work, "drawing", len(inputs)),
        drawn=partial(drawn, most=most), encoded=partial(encoded, most=most), thumbnail=thumbnail, **facts,
    )  # fmt: skip

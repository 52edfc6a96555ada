"""Write a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whyformer.apps.report.inputs import InputSection, SavedMap, inputs_of
from whyformer.apps.report.pictures import drawn, encoded, room, thumbnail
from whyformer.apps.report.reading import Contents, SavedAnswer, Skipped, nothing, read
from whyformer.apps.report.sections import BenchmarkSection
from whyformer.errors import InputError
from whyformer.explanation.counts import amount
from whyformer.explanation.versions import versions
from whyformer.methods import METHODS
from whyformer.progress import Track
from whyformer.show import painting
from whyformer.show.files import write_all
from whyformer.show.html import render
from whyformer.show.words import model_title, target_name

if TYPE_CHECKING:
    from whyformer.explanation.result import Explanation


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

    @property
    def content(self) -> str:
        """Numbers of results in words, without those that are 0."""
        counts = (self.inputs, self.explanations, self.answers, self.benchmarks, self.jobs)
        nouns = ("input", "map", "answer", "benchmark", "data set")
        return ", ".join(amount(count, noun) for count, noun in zip(counts, nouns, strict=True) if count)


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
    benchmarks = sum(section.kind == "benchmark" for section in contents.benchmarks)
    report = WrittenReport(
        target, 0, len(inputs), len(contents.saved), len(contents.answers), benchmarks, len(contents.jobs),
        contents.skipped,
    )
    page = _page(contents, inputs, report, title, track).encode("utf-8", "backslashreplace")
    write_all(target.parent, {target.name: page})
    return replace(report, bytes=len(page))


def _page(
    contents: Contents, inputs: Sequence[InputSection], report: WrittenReport, title: str, track: Track
) -> str:
    """Return the whole document; the inputs are drawn one after the other."""
    saved, answers, benchmarks = contents.saved, contents.answers, contents.benchmarks
    # section -> its content; empty sections are left out
    facts = {
        "explanations": inputs, "answers": answers, "benchmarks": benchmarks,
        "models": models(saved, answers, benchmarks),
        "methods": [*(item.e.method for item in saved), *(item.g.method for item in answers)],
        "conventions": [*inputs, *answers], "versions": versions_of([*saved, *answers], benchmarks),
        "left-out": sorted(contents.skipped, key=lambda item: not item.damaged),
    }
    names = {"left-out": "Files left out"}
    if contents.jobs:
        names["benchmarks"] = "Benchmarks and data sets" if report.benchmarks else "Data sets"
    pictures = sum(painting.base(item.first) is not None for item in inputs)
    most = room(pictures + sum(painting.drawable(item.e) for item in saved), len(inputs))
    return render(
        "report/page.html", title=title, version=versions()["whyformer"], summary=f"{report.content}.",
        sections=[(key, names.get(key, key.capitalize())) for key, content in facts.items() if content],
        inputs=inputs, maps=[item for section in inputs for item in section.maps],
        targets=[target_name(item.e) for item in saved], known=METHODS, skipped=facts.pop("left-out"),
        track=lambda work: track(work, "drawing", len(inputs)),
        drawn=partial(drawn, most=most), encoded=partial(encoded, most=most), thumbnail=thumbnail, **facts,
    )


# -- models and versions, as the results store them ------------------------------------------------------------------
def models(
    saved: Sequence[SavedMap], answers: Sequence[SavedAnswer], benchmarks: Sequence[BenchmarkSection]
) -> list[dict[str, Any]]:
    """Return for each model its title, kinds of inputs, names of classes, and numbers of outputs and of maps and
    answers."""
    results: list[Any] = [*(item.e for item in saved), *(item.g for item in answers), *benchmarks]
    names = [result.model for result in results]
    rows = []
    for name in filter(None, dict.fromkeys(names)):
        maps = [item.e for item in saved if item.e.model == name]
        inputs = [_input(e) for e in maps]
        inputs += ["text and pictures" if item.g.picture_maps else "text" for item in answers if item.g.model == name]
        labels: dict[int, str] = next((e.labels for e in maps if e.labels), {})
        rows.append({
            "title": model_title(name), "inputs": list(dict.fromkeys(inputs)), "maps": len(inputs),
            "classes": [label for _, label in sorted(labels.items())],
            "outputs": maps[0].logits.shape[-1] if maps else None,
        })
    return rows


def _input(e: Explanation) -> str:
    if e.level == "token":
        return "text" if e.texts is not None else "tokens"
    return "picture" if e.image_size is None else f"picture {e.image_size[0]} × {e.image_size[1]}"


def versions_of(saved: Sequence[SavedMap | SavedAnswer], benchmarks: Sequence[BenchmarkSection]) -> list[str]:
    """Return the versions that made the results; those of a benchmark are also among its conventions."""
    counts = Counter(
        ", ".join(f"{name} {number}" for name, number in item.versions.items()) or "not stored" for item in saved
    )
    others = dict.fromkeys(item.versions for item in benchmarks if item.versions and item.versions not in counts)
    return [*(f"{text} ({count} maps)" for text, count in counts.items()), *(f"{text} (benchmarks)" for text in others)]

"""Write a report."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from markupsafe import Markup

from whyformer.apps.report.inputs import InputSection, inputs_of, once
from whyformer.apps.report.models import models, versions_of
from whyformer.apps.report.pictures import drawn, encoded, room, thumbnail
from whyformer.apps.report.reading import Answer, Contents, Saved, Skipped, nothing, read
from whyformer.errors import InputError, WhyformerError
from whyformer.explanation.versions import versions
from whyformer.methods import METHODS
from whyformer.show import painting
from whyformer.show.files import write_all
from whyformer.show.html import asset, curves, render
from whyformer.show.html.answer import card
from whyformer.show.words import measured, remarks, target_name, words

Track = Callable[..., Iterable[Any]]


@dataclass(frozen=True)
class WrittenReport:
    """A report that was written.

    Attributes:
        bytes: its size. inputs, explanations, answers, benchmarks, jobs: what is in it. skipped: files that are not.
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
    _drop_what_cannot_be_drawn(contents)
    if not contents.saved and not contents.answers and not contents.benchmarks:
        raise nothing(places, contents)
    inputs = inputs_of(contents.saved)
    page = _page(contents, inputs, title, track).encode("utf-8", "backslashreplace")
    (path,) = write_all(target.parent, {target.name: page})
    alone = sum(one.kind == "benchmark" for one in contents.benchmarks)
    counts = len(inputs), len(contents.saved), len(contents.answers), alone, len(contents.jobs)
    return WrittenReport(path, len(page), *counts, contents.skipped)


def _drop_what_cannot_be_drawn(contents: Contents) -> None:
    """A file may be well formed and still not fit together: fewer tokens than scores, a grid of another size."""
    good: list[Saved] = []
    for one in contents.saved:
        try:
            _ = one.e.top(0, 1)[0], remarks([one.e]), (found := measured(one.e)) and curves(found)
            if one.e.level == "token":
                words(one.e)
            elif painting.drawable(one.e):
                painting.overlay(one.e, longest=8)
        except (WhyformerError, ValueError, IndexError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            contents.skipped.append(Skipped(one.file, f"damaged: it cannot be drawn ({error})", damaged=True))
        else:
            good.append(one)
    contents.saved = once(good)
    told: list[Answer] = []
    for number, answer in enumerate(contents.answers, 1):
        try:
            made = Markup(card(answer.g, f"g{number}"))
        except (WhyformerError, ValueError, IndexError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            contents.skipped.append(Skipped(answer.file, f"damaged: it cannot be drawn ({error})", damaged=True))
        else:
            told.append(replace(answer, card=made))
    contents.answers = told


def _page(contents: Contents, inputs: Sequence[InputSection], title: str, track: Track) -> str:
    """The whole document, drawn one input after the other."""
    script, version = asset("report/page.js"), versions()["whyformer"]
    saved, answers, benchmarks = contents.saved, contents.answers, contents.benchmarks
    alone = sum(one.kind == "benchmark" for one in benchmarks)
    counts = {
        "input": len(inputs), "map": len(saved), "answer": len(answers), "benchmark": alone,
        "data set": len(contents.jobs),
    }  # fmt: skip
    said = ", ".join(f"{count} {word}{'' if count == 1 else 's'}" for word, count in counts.items() if count)
    facts = {
        "explanations": inputs, "answers": answers, "benchmarks": benchmarks,
        "models": models(saved, benchmarks, answers),
        "methods": [*(one.e.method for one in saved), *(one.g.method for one in answers)],
        "conventions": [*inputs, *answers], "versions": versions_of([*saved, *answers], benchmarks),
        "left-out": sorted(contents.skipped, key=lambda s: not s.damaged),
    }  # fmt: skip
    pictures = sum(painting.base(one.first) is not None for one in inputs)
    pictures += sum(painting.drawable(one.e) for one in saved)
    most = room(pictures, len(inputs))
    together = "Benchmarks and data sets" if alone else "Data sets"
    names = {"left-out": "Files left out", "benchmarks": together if contents.jobs else "Benchmarks"}
    return render(
        "report/page.html", title=title, version=version, summary=f"{said}.", script=script, inputs=inputs,
        known=METHODS,
        digest=Markup(base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()),
        sections=[(key, names.get(key, key.capitalize())) for key, found in facts.items() if found],
        maps=[one for its in inputs for one in its.maps], targets=[target_name(one.e) for one in saved],
        skipped=facts.pop("left-out"),
        track=lambda work: track(work, "drawing", len(inputs)),
        drawn=partial(drawn, most=most), encoded=partial(encoded, most=most), thumbnail=thumbnail, **facts,
    )  # fmt: skip

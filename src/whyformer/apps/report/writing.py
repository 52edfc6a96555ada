"""Write a report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from whyformer.apps.report import pictures
from whyformer.apps.report.inputs import Input, inputs_of
from whyformer.apps.report.material import Map, Material, Skipped
from whyformer.apps.report.page import page
from whyformer.apps.report.reading import nothing, read
from whyformer.errors import InputError, WhyformerError
from whyformer.show import painting
from whyformer.show.files import write_all
from whyformer.show.words import words

Track = Callable[..., Iterable[Any]]


@dataclass(frozen=True)
class Written:
    """A report that was written.

    Attributes:
        bytes: its size. inputs, explanations, benchmarks: what is in it. skipped: files that are not.
    """

    path: Path
    bytes: int
    inputs: int
    explanations: int
    benchmarks: int
    skipped: list[Skipped]


def write_report(
    sources: str | Path | Sequence[str | Path],
    out: str | Path = "report.html",
    *,
    title: str = "Why the models said so",
    track: Track = lambda work, description, total: work,
) -> Written:
    """Put saved explanations and benchmark results into one self-contained HTML file.

    Args:
        sources: files and folders (with all below them): explanations as :meth:`whyformer.Explanation.save` or
            ``whyformer explain --format json`` wrote them, and the folders of ``whyformer benchmark``.
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
    material = read(places, target, track)
    _drop_what_cannot_be_drawn(material)
    if not material.maps and not material.results:
        raise nothing(places, material)
    inputs = inputs_of(material.maps)
    content = page(material, inputs, _size(inputs), title, track).encode("utf-8", "backslashreplace")
    (path,) = write_all(target.parent, {target.name: content})
    shown = sum(len(i.maps) for i in inputs)
    return Written(path, len(content), len(inputs), shown, len(material.results), material.skipped)


def _drop_what_cannot_be_drawn(material: Material) -> None:
    """A file may be well formed and still not fit together: fewer tokens than scores, a grid of another size."""
    good: list[Map] = []
    for one in material.maps:
        try:
            _ = one.e.top(0, 1)[0]
            if one.e.level == "token":
                words(one.e)
            elif one.e.level == "pixel" or one.e.grid is not None:
                painting.overlay(one.e, longest=8)
        except (WhyformerError, ValueError, IndexError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            material.skipped.append(Skipped(one.file, f"damaged: it cannot be drawn ({error})", damaged=True))
        else:
            good.append(one)
    material.maps = good


def _size(inputs: Sequence[Input]) -> pictures.Size:
    """How small the pictures have to be."""
    bases = [painting.base(i.first) for i in inputs if i.first.level != "token"]
    plain = [partial(_plain, base) for base in bases if base is not None]
    maps = [
        partial(pictures.overlay, m.e)
        for i in inputs
        for m in i.maps
        if m.e.level == "pixel" or (m.e.level == "patch" and m.e.grid is not None)
    ]
    return pictures.fitting([*plain, *maps], len(inputs))


def _plain(picture: Any, size: pictures.Size) -> Any:
    return picture

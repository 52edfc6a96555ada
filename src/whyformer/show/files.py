"""Results as JSON values, and as a set of files that is written completely or not at all."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whyformer.errors import LoadError
from whyformer.explanation.display import actual_method
from whyformer.explanation.versions import record, versions
from whyformer.show import figures, grid, html, painting, paper
from whyformer.show.film import film
from whyformer.show.html import answer
from whyformer.show.words import agnostic, target_name

if TYPE_CHECKING:
    from whyformer.explanation.generation import Generation
    from whyformer.explanation.result import Explanation


_LONGEST = 672  # pixels, of the picture in a JSON file


def record_of(command: str, results: Sequence[Explanation], model: str, title: str) -> dict[str, Any]:
    """Return explanations of an input as JSON values, the same for Python, command line and server."""
    explanations = [e.to_dict() for e in results]
    return record(command, versions=versions(), model=model, input=title, explanations=explanations)


def _picture_of(results: Sequence[Explanation]) -> dict[str, Any]:
    """Return the picture of the results for their JSON file, which can then be drawn without other files."""
    picture = next((base for e in results if (base := painting.base(e)) is not None), None)
    if picture is None:
        return {}
    picture = picture.convert("RGB")
    picture.thumbnail((_LONGEST, _LONGEST))
    return {"picture": str(html.data_uri(painting.encoded(picture)))}


def slug(*parts: str, limit: int = 80) -> str:
    """Return a file name without suffix for texts: letters, digits and ``_ . -`` only, never hidden or empty.

    It has at most ``limit`` characters, and 200 bytes: file systems accept 255, of which a suffix takes some.
    """
    cleaned = [re.sub(r"[^\w.-]+", "_", part).strip("._-") for part in parts]
    joined = "-".join(c for c in cleaned if c)[:limit].encode()[:200].decode(errors="ignore")
    return joined.rstrip("._-") or "explanation"


def contents(
    results: Sequence[Explanation], name: str, title: str, facts: Mapping[str, Any], kinds: Sequence[str], **look: Any
) -> dict[str, bytes]:
    """Return explanations as ``{file name: content}``, a file for each kind ("png", "svg", "pdf", "html", "json").

    A file name consists of ``name``, the method (for ``auto`` its choice) and the classes. ``facts`` are the values of
    a JSON file, to which the picture is added; ``look`` are options of :class:`~whyformer.show.look.Look`.
    """
    methods = list(dict.fromkeys(e.method for e in results))
    specific = [e for e in results if not agnostic(e)]
    subjects = list(dict.fromkeys(target_name(e) for e in specific or results))
    stem = slug(name[:40], actual_method(results[0]) if len(methods) == 1 else f"{len(methods)}_methods", *subjects)

    def content(kind: str) -> bytes:
        if kind == "html":
            return html.page(results, title, **look).encode()
        if kind == "json":
            return (json.dumps({**facts, **_picture_of(results)}) + "\n").encode()
        return paper.encode(figures.figure(results, **look), kind)

    return {f"{stem}.{kind}": content(kind) for kind in kinds}


def answer_contents(
    g: Generation, stem: str, title: str, facts: Mapping[str, Any], kinds: Sequence[str], **look: Any
) -> dict[str, bytes]:
    """Return an answer as ``{file name: content}``, as :func:`contents` does; "safetensors" is a kind too.

    A figure has the map of each word on the picture, or without a picture the matrix of tokens.
    """

    def content(kind: str) -> bytes:
        if kind == "html":
            return answer.page(g, title).encode()
        if kind == "json":
            return (json.dumps(facts) + "\n").encode()
        if kind == "safetensors":
            from whyformer.explanation.generation_files import content as saved

            return saved(g)
        return paper.encode(film(g, **look) if g.picture_maps else grid.figure(g), kind)

    return {f"{stem}.{kind}": content(kind) for kind in kinds}


def write_all(folder: Path, contents: Mapping[str, bytes]) -> list[Path]:
    """Write files, if any, into a folder, created if missing: under temporary names, then renamed together.

    Raises:
        LoadError: the folder or a file cannot be written; no file remains then.
    """
    from whyformer.explanation.serialization import written_whole

    if not contents:
        return []
    created = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as whole:
            for name, content in contents.items():
                whole.enter_context(written_whole(folder / name)).write_bytes(content)
    except OSError as error:
        for parent in created:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
        raise LoadError(f"cannot write to {folder}: {getattr(error, 'strerror', None) or error}") from error
    return [folder / name for name in contents]

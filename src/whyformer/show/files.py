"""Results as JSON values and as files, a set of which appears whole or not at all."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whyformer.errors import LoadError
from whyformer.explanation.versions import record, versions
from whyformer.show import figures, html, painting, paper
from whyformer.show.words import agnostic, made_by, target_name

if TYPE_CHECKING:
    from whyformer.explanation.result import Explanation


_LONGEST = 672  # pixels, of the picture in a JSON file


def record_of(command: str, results: Sequence[Explanation], model: str, title: str) -> dict[str, Any]:
    """Explanations of one input as JSON values, the same from every entrance."""
    made = [e.to_dict() for e in results]
    return record(command, versions=versions(), model=model, input=title, explanations=made)


def _picture_of(results: Sequence[Explanation]) -> dict[str, Any]:
    """What the maps lie on, so that a JSON file can be drawn again on its own."""
    shown = next((found for e in results if (found := painting.base(e)) is not None), None)
    if shown is None:
        return {}
    shown = shown.convert("RGB")
    shown.thumbnail((_LONGEST, _LONGEST))
    return {"picture": str(html.data_uri(painting.encoded(shown)))}


def slug(*parts: str, limit: int = 80) -> str:
    """A file name without suffix made of words a user chose: letters, digits, ``_ . -`` only, never hidden or empty."""
    cleaned = [re.sub(r"[^\w.-]+", "_", part).strip("._-") for part in parts]
    return "-".join(c for c in cleaned if c)[:limit].rstrip("._-") or "explanation"


def contents(
    results: Sequence[Explanation], name: str, title: str, facts: Mapping[str, Any], kinds: Sequence[str], **look: Any
) -> dict[str, bytes]:
    """Explanations as files: ``{file name: content}``, one for each kind ("png", "svg", "pdf", "html", "json").

    File names are made of ``name``, the method (of ``auto`` the one that it took) and the classes; ``facts`` is
    what a JSON file holds, beside the picture that the maps lie on; ``look`` are options of
    :class:`~whyformer.show.look.Look`.
    """
    methods = list(dict.fromkeys(e.method for e in results))
    specific = [e for e in results if not agnostic(e)]
    subjects = list(dict.fromkeys(target_name(e) for e in specific or results))
    stem = slug(name[:40], made_by(results[0]) if len(methods) == 1 else f"{len(methods)}_methods", *subjects)

    def made(kind: str) -> bytes:
        if kind == "html":
            return html.page(results, title, **look).encode()
        if kind == "json":
            return (json.dumps({**facts, **_picture_of(results)}) + "\n").encode()
        return paper.encode(figures.figure(results, **look), kind)

    return {f"{stem}.{kind}": made(kind) for kind in kinds}


def write_all(folder: Path, contents: Mapping[str, bytes]) -> list[Path]:
    """Write files, if there are any, into a folder, made if it is missing: first under passing names, then renamed.

    Raises:
        LoadError: the folder or a file cannot be written; then nothing is left behind.
    """
    from whyformer.explanation.storage import written_whole

    if not contents:
        return []
    made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as whole:
            for name, content in contents.items():
                whole.enter_context(written_whole(folder / name)).write_bytes(content)
    except (OSError, LoadError) as error:
        for parent in made:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
        raise LoadError(f"cannot write to {folder}: {getattr(error, 'strerror', None) or error}") from error
    return [folder / name for name in contents]

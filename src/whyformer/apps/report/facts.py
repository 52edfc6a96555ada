"""What a reader of a report must know besides: the models, the methods, and the versions that made the maps.

Of a model is told what its files on this machine say: nothing is downloaded, no weights are loaded.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open

from whyformer.show.words import visible

if TYPE_CHECKING:
    from whyformer.apps.report.benchmarks import BenchmarkSection
    from whyformer.apps.report.reading import Answer, Saved


@dataclass(frozen=True)
class Card:
    """Facts of a model; None where its files do not tell, or are not here."""

    name: str
    architecture: str | None = None
    parameters: int | None = None
    licence: str | None = None
    classes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return title(self.name)


def card(name: str, labels: dict[int, str] | None = None) -> Card:
    """The facts of a model by the name that :func:`whyformer.explain` takes.

    Args:
        labels: names of its classes as an explanation has them, for a model whose config is not here.
    """
    config = _json(name, "config.json")
    named = config.get("id2label") or labels or {}
    classes = tuple(str(v) for _, v in sorted(named.items(), key=lambda item: int(item[0])))
    architectures = config.get("architectures") or [None]
    head = re.match(r"---\n(?:.*\n)*?license:\s*(\S[^\n]*)\n(?:.*\n)*?---", _read(name, "README.md")[:4000])
    licence = head.group(1).strip("'\" ") if head else None
    return Card(name, architectures[0], _parameters(name), licence, classes)


def title(name: str) -> str:
    """What a model is called in a report that others may read: of a folder's path only its last part."""
    return visible(Path(name).name if Path(name).is_absolute() else name)


def _file(name: str, file: str) -> Path | None:
    """A file of a model: bundled, or in the hub's cache. A name comes out of a file that may be anybody's, so no folder
    that it names is opened."""
    if name.startswith("bundled:"):
        short = name.removeprefix("bundled:")
        path = Path(__file__).parents[2] / "bundled" / short / file
        return path if short.isalnum() and path.is_file() else None
    with contextlib.suppress(OSError, HFValidationError):
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and isinstance(cached := try_to_load_from_cache(name, file), str):
            return Path(cached)
    return None


def _read(name: str, file: str) -> str:
    path = _file(name, file)
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace") if path is not None else ""
    return ""


def _json(name: str, file: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        made = json.loads(_read(name, file))
        return made if isinstance(made, dict) else {}
    return {}


def _parameters(name: str) -> int | None:
    """Numbers in the weights, by the shapes in the files' headers."""
    index = _json(name, "model.safetensors.index.json")
    shards = sorted(set(index["weight_map"].values())) if "weight_map" in index else ["model.safetensors"]
    total = 0
    for shard in shards:
        path = _file(name, str(shard))
        if path is None:
            return None
        try:
            with safe_open(str(path), "np") as file:
                total += sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118
        except (SafetensorError, OSError):
            return None
    return total


def models(
    saved: Sequence[Saved], benchmarks: Sequence[BenchmarkSection], answers: Sequence[Answer] = ()
) -> list[Card]:
    """Each model of the explanations, the benchmarks and the answers (whose labels are words, not classes)."""
    labels: dict[str, dict[int, str] | None] = {}
    for one in saved:
        if one.e.model is not None:
            labels.setdefault(one.e.model, one.e.labels)
    for answer in answers:
        if answer.g.model is not None:
            labels.setdefault(answer.g.model, None)
    for benchmark in benchmarks:
        if benchmark.model:
            labels.setdefault(benchmark.model, None)
    return [card(name, known) for name, known in labels.items()]


def versions_of(saved: Sequence[Saved | Answer], benchmarks: Sequence[BenchmarkSection]) -> list[str]:
    """The versions that made the explanations; a benchmark's stand among its conventions."""
    found = Counter(
        ", ".join(f"{name} {number}" for name, number in one.versions.items()) or "not stored" for one in saved
    )
    for benchmark in benchmarks:
        if benchmark.versions:
            found[benchmark.versions] += 0
    return [f"{said}{f' ({count} maps)' if count else ' (benchmarks)'}" for said, count in found.items()]

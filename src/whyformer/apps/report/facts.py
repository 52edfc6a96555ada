"""What a reader of a report must know besides: the models, the methods, and the versions that made the maps."""

from __future__ import annotations

from collections import Counter

from whyformer.apps.report.cards import Card, card
from whyformer.apps.report.contents import Contents
from whyformer.methods import METHODS


def models(contents: Contents) -> list[Card]:
    """Each model of the explanations and the benchmarks."""
    labels: dict[str, dict[int, str] | None] = {}
    for one in contents.saved:
        if one.e.model is not None:
            labels.setdefault(one.e.model, one.e.labels)
    for benchmark in contents.benchmarks:
        name = benchmark.conventions.get("model")
        if isinstance(name, str) and name:
            labels.setdefault(name, None)
    return [card(name, known) for name, known in labels.items()]


def methods(contents: Contents) -> list[tuple[str, list[str], int]]:
    """(name, what its registry says of it, number of maps) of each method of the explanations."""
    rows = []
    for name, count in sorted(Counter(one.e.method for one in contents.saved).items()):
        known = METHODS.get(name)
        rows.append((name, [known.family, known.summary, known.citation] if known else ["unknown", "", ""], count))
    return rows


def versions_of(contents: Contents) -> list[str]:
    """The versions that made the explanations; a benchmark's stand among its conventions."""
    saved = (", ".join(f"{name} {number}" for name, number in one.versions.items()) for one in contents.saved)
    found = Counter(said or "not stored" for said in saved)
    for benchmark in contents.benchmarks:
        if benchmark.conventions.get("versions"):
            found[str(benchmark.conventions["versions"])] += 0
    return [f"{said}{f' ({count} maps)' if count else ' (benchmarks)'}" for said, count in found.items()]

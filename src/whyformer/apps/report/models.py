"""The models and the versions behind a report, as the results store them.

No file of a model is read, so a report is the same on every machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from whyformer.show.words import model_title

if TYPE_CHECKING:
    from whyformer.apps.report.benchmarks import BenchmarkSection
    from whyformer.apps.report.inputs import SavedMap
    from whyformer.apps.report.reading import SavedAnswer


@dataclass
class Model:
    """A model as far as the results describe it.

    Attributes:
        title: its name.
        inputs: kinds of inputs, such as "picture 224 x 224".
        classes: names of the classes, in the model's order.
        outputs: number of outputs.
        maps: number of maps and answers of it.
    """

    title: str
    inputs: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    outputs: int | None = None
    maps: int = 0


def models(
    saved: Sequence[SavedMap], benchmarks: Sequence[BenchmarkSection], answers: Sequence[SavedAnswer] = ()
) -> list[Model]:
    """Return each model of the explanations, the answers (whose labels are words, not classes) and the benchmarks."""
    by_name: dict[str, Model] = {}

    def of(name: str | None) -> Model | None:
        return by_name.setdefault(name, Model(model_title(name))) if name else None

    for saved_map in saved:
        if (model := of(saved_map.e.model)) is not None:
            model.maps += 1
            model.inputs = list(dict.fromkeys([*model.inputs, _input(saved_map)]))
            model.outputs = model.outputs or saved_map.e.logits.shape[-1]
            model.classes = model.classes or [name for _, name in sorted((saved_map.e.labels or {}).items())]
    for answer in answers:
        if (model := of(answer.g.model)) is not None:
            model.maps += 1
            model.inputs = list(dict.fromkeys([*model.inputs, "text and pictures" if answer.g.seen else "text"]))
    for benchmark in benchmarks:
        of(benchmark.model)
    return list(by_name.values())


def _input(one: SavedMap) -> str:
    e = one.e
    if e.level == "token":
        return "text" if e.texts is not None else "tokens"
    return "picture" if e.image_size is None else f"picture {e.image_size[0]} × {e.image_size[1]}"


def versions_of(saved: Sequence[SavedMap | SavedAnswer], benchmarks: Sequence[BenchmarkSection]) -> list[str]:
    """Return the versions that made the results; those of a benchmark are also among its conventions."""
    counts = Counter(
        ", ".join(f"{name} {number}" for name, number in one.versions.items()) or "not stored" for one in saved
    )
    for benchmark in benchmarks:
        if benchmark.versions:
            counts[benchmark.versions] += 0
    return [f"{text}{f' ({count} maps)' if count else ' (benchmarks)'}" for text, count in counts.items()]

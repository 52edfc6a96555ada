"""Benchmark ``arbitration``: choosing by measured faithfulness compared with fixed methods (Mylonas et al. 2022)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whyformer.benchmarks.batches import PictureBatch
from whyformer.benchmarks.configurations import RANDOM, Configuration, generator_for
from whyformer.benchmarks.published import CONVENTIONS, conventions
from whyformer.benchmarks.report import Cell, Report, Results, Table
from whyformer.benchmarks.study import Batch, Benchmark, Exclusion, Maps, Measured, Study
from whyformer.errors import InputError
from whyformer.evaluation.metrics.faithfulness import FRACTIONS, ranked_faithfulness, removal_masks
from whyformer.evaluation.statistics import Interval, bootstrap

CRITERIA = ("rft", "steps", "features")
"""Criteria of the choice (option ``by``): RFT of single features, every other step of curves, or half the features."""


def measure(batch: Batch, configurations: Sequence[Configuration]) -> Iterator[Measured]:
    """Measure the criterion of the choice, and a held-out figure of other perturbations."""
    if isinstance(batch, PictureBatch):
        batch = replace(batch, nearest=True)
    maps = batch.maps(configurations, batch.predicted)
    if batch.study.options["by"] == "rft":
        yield from _by_single_features(batch, maps)
        return

    def requests() -> Iterator[tuple[Any, int, NDArray[np.bool_], str]]:
        for (c, i), scores in maps.items():
            if not isinstance(scores, Exclusion):
                for kind, masks in _halves(batch, i, batch.features(i, scores)).items():
                    yield (c, i, kind), i, batch.covered(i, masks), batch.baseline

    logits = batch.outputs(requests())
    for (c, i), scores in maps.items():
        if isinstance(scores, Exclusion):
            yield batch.samples[i].id, c, scores
            continue
        figures = {}
        for half in ("criterion", "held_out"):
            highest, lowest = (
                batch.study.probabilities(logits[c, i, (half, first)])[:, batch.predicted[i]] for first in (True, False)
            )
            figures[half] = float((lowest - highest).mean())
        yield batch.samples[i].id, c, figures


def _halves(batch: Batch, index: int, scores: NDArray[np.float64]) -> dict[tuple[str, bool], NDArray[np.bool_]]:
    """Return (half, highest first) -> masks ``[F, n]``: every other step, or all steps of a random half of features."""
    masks_by_half = {}
    if batch.study.options["by"] == "steps":
        for first in (True, False):
            masks = removal_masks(scores, FRACTIONS, highest_first=first)
            masks_by_half["criterion", first], masks_by_half["held_out", first] = masks[::2], masks[1::2]
        return masks_by_half
    order = generator_for(f"{batch.samples[index].id}/halves", batch.study.seed).permutation(scores.size)
    parts = {"criterion": order[: -(-scores.size // 2)], "held_out": order[-(-scores.size // 2) :]}
    for half, part in parts.items():
        for first in (True, False):
            masks = np.zeros((len(FRACTIONS), scores.size), dtype=bool)
            masks[:, np.sort(part)] = removal_masks(scores[np.sort(part)], FRACTIONS, highest_first=first)
            masks_by_half[half, first] = masks
    return masks_by_half


def _by_single_features(batch: Batch, maps: Maps) -> Iterator[Measured]:
    """Measure RFT, whose forward passes without one feature serve all configurations, and held-out AOPC."""
    clean = batch.probabilities.max(1)

    def drops(i: int, removed: np.ndarray) -> np.ndarray:
        return clean[i] - batch.study.probabilities(batch.without(i, removed))[:, batch.predicted[i]]

    single = [drops(i, np.eye(batch.count(i), dtype=bool)) for i in range(len(batch.samples))]
    for (c, i), scores in maps.items():
        if isinstance(scores, Exclusion):
            yield batch.samples[i].id, c, scores
            continue
        features = batch.features(i, scores)
        held_out = float(drops(i, removal_masks(features, FRACTIONS)).mean())
        yield batch.samples[i].id, c, {"criterion": ranked_faithfulness(features, single[i]), "held_out": held_out}


def prepare(study: Study) -> None:
    study.limit()
    if len(study.configurations) < 2:
        raise InputError("arbitration needs at least two methods to choose from")


COLUMNS = {
    "rft": ("Held-out AOPC ↑", "Prime − this", "criterion RFT ↑", "chosen in % of samples"),
    "steps": ("Held-out gap ↑", "Prime − this", "criterion gap ↑", "chosen in % of samples"),
}
COLUMNS["features"] = COLUMNS["steps"]


def summarize(study: Study, results: Results) -> Report:
    choosable = [c.label for c in study.configurations if c.kind == "method"]
    complete = sorted(set.intersection(*(set(results[label]) for label in choosable)))
    cells: dict[tuple[str, str], Cell] = {}
    rows = [c.label for c in study.configurations]
    remarks, by = [], study.options["by"]
    columns = COLUMNS[by]

    def row(label: str, *figures: Interval) -> None:
        cells.update({(label, column): Cell(figure) for column, figure in zip(columns, figures, strict=False)})

    if complete:
        criterion, heldout = (
            np.array([[results[label][s][key] for label in choosable] for s in complete])
            for key in ("criterion", "held_out")
        )
        picks, best = criterion.argmax(1), int(criterion.mean(0).argmax())
        prime = heldout[np.arange(len(heldout)), picks]
        gains = {label: bootstrap(prime - heldout[:, n]) for n, label in enumerate(choosable)}
        for n, (label, gain) in enumerate(gains.items()):
            row(label, bootstrap(heldout[:, n]), gain, bootstrap(criterion[:, n]), bootstrap(100.0 * (picks == n)))
        fixed = f"Batch (best on average: {choosable[best]})"
        for label, figures in (("Prime (best of each sample)", prime), (fixed, heldout[:, best])):
            rows.append(label)
            row(label, bootstrap(figures), bootstrap(prime - figures))
        if floor := list(results[RANDOM].values()):
            cells[RANDOM, columns[0]] = Cell(bootstrap([v["held_out"] for v in floor]))
            cells[RANDOM, columns[2]] = Cell(bootstrap([v["criterion"] for v in floor]))
        beaten = [label for label, gain in gains.items() if gain.low > 0]
        ahead = [label for label, gain in gains.items() if gain.high < 0]
        remarks.append(
            f"Prime beats {len(beaten)} of {len(choosable)} fixed configurations on the held-out figure beyond "
            f"the interval ({', '.join(beaten) or 'none'}), and is behind {len(ahead)} ({', '.join(ahead) or 'none'})."
        )
    title = "Choosing by measured faithfulness (Mylonas et al. 2022)"
    table = Table("arbitration", title, "Configuration", tuple(rows), columns, cells, digits=3)
    removed = "patches black" if study.modality == "image" else "tokens replaced by [UNK]; special tokens stay"
    texts = CONVENTIONS["arbitration_by"]
    convention_texts = conventions(
        "arbitration", removed=removed, criterion=texts[by], held_out=texts[f"{by} held out"], samples=len(complete)
    )
    return Report((table,), (), convention_texts, tuple(remarks))


BENCHMARK = Benchmark(
    "arbitration", "does the choice by measured faithfulness beat each fixed configuration? (Mylonas et al. 2022)",
    "both", "transformer_attribution,gae,rollout,raw_attention,gradcam_attention,input_x_gradient", {},
    {"by": "rft", "resample": None, "longest": 128, "count": None, "files": None},
    prepare, measure, summarize, choices={"by": CRITERIA},
)  # fmt: skip

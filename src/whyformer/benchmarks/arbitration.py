"""Benchmark ``arbitration``: does choosing by measured faithfulness beat one fixed method? (Mylonas et al. 2022)"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from whyformer.benchmarks.configurations import RANDOM, Configuration
from whyformer.benchmarks.published import conventions
from whyformer.benchmarks.report import Cell, Report, Results, Table
from whyformer.benchmarks.study import Batch, Benchmark, Measured, Study, Unusable
from whyformer.errors import InputError
from whyformer.evaluate.metrics.faithfulness import FRACTIONS, ranked_faithfulness, removal_masks
from whyformer.evaluate.statistics import Interval, bootstrap


def measure(batch: Batch, configurations: Sequence[Configuration]) -> Iterator[Measured]:
    """The criterion's forwards, one feature gone in each, serve all configurations; the held-out figure's only one."""
    clean = batch.probabilities.max(1)

    def drops(i: int, removed: np.ndarray) -> np.ndarray:
        return clean[i] - batch.study.probabilities(batch.without(i, removed))[:, batch.predicted[i]]

    alone = [drops(i, np.eye(batch.count(i), dtype=bool)) for i in range(len(batch.samples))]
    for (c, i), scores in batch.maps(configurations, batch.predicted).items():
        if isinstance(scores, Unusable):
            yield batch.samples[i].id, c, scores
            continue
        features = batch.features(i, scores)
        together = float(drops(i, removal_masks(features, FRACTIONS)).mean())
        yield batch.samples[i].id, c, {"criterion": ranked_faithfulness(features, alone[i]), "held_out": together}


def prepare(study: Study) -> None:
    study.limit()
    if len(study.configurations) < 2:
        raise InputError("arbitration needs at least two methods to choose from")


COLUMNS = ("Held-out AOPC ↑", "Prime − this", "criterion RFT ↑", "chosen in % of samples")


def summarize(study: Study, results: Results) -> Report:
    choosable = [c.label for c in study.configurations if c.kind == "method"]
    complete = sorted(set.intersection(*(set(results[label]) for label in choosable)))
    cells: dict[tuple[str, str], Cell] = {}
    rows = [c.label for c in study.configurations]
    remarks = []

    def row(label: str, *figures: Interval) -> None:
        cells.update({(label, column): Cell(figure) for column, figure in zip(COLUMNS, figures, strict=False)})

    if complete:
        criterion, held = (
            np.array([[results[label][s][key] for label in choosable] for s in complete])
            for key in ("criterion", "held_out")
        )
        picks, best = criterion.argmax(1), int(criterion.mean(0).argmax())
        prime = held[np.arange(len(held)), picks]
        gains = {label: bootstrap(prime - held[:, n]) for n, label in enumerate(choosable)}
        for n, (label, gain) in enumerate(gains.items()):
            share = 100 * float((picks == n).mean())
            chosen = Interval(share, share, share, len(complete))
            row(label, bootstrap(held[:, n]), gain, bootstrap(criterion[:, n]), chosen)
        fixed = f"Batch (best on average: {choosable[best]})"
        for label, figures in (("Prime (best of each sample)", prime), (fixed, held[:, best])):
            rows.append(label)
            row(label, bootstrap(figures), bootstrap(prime - figures))
        if floor := list(results[RANDOM].values()):
            cells[RANDOM, COLUMNS[0]] = Cell(bootstrap([v["held_out"] for v in floor]))
            cells[RANDOM, COLUMNS[2]] = Cell(bootstrap([v["criterion"] for v in floor]))
        beaten = [label for label, gain in gains.items() if gain.low > 0]
        remarks.append(
            f"Prime beats {len(beaten)} of {len(choosable)} fixed configurations on the held-out figure beyond "
            f"the interval: {', '.join(beaten) or 'none'}."
        )
    title = "Choosing by measured faithfulness (Mylonas et al. 2022)"
    table = Table("arbitration", title, "Configuration", tuple(rows), COLUMNS, cells, digits=3)
    removed = "patches black" if study.modality == "image" else "tokens replaced by [UNK]; special tokens stay"
    stated = conventions("arbitration", removed=removed, samples=len(complete))
    return Report((table,), (), stated, tuple(remarks))


BENCHMARK = Benchmark(
    "arbitration", "does the choice by measured faithfulness beat each fixed configuration? (Mylonas et al. 2022)",
    "both", "transformer_attribution,gae,rollout,raw_attention,gradcam_attention,input_x_gradient", {},
    {"resample": None, "longest": 128, "count": None, "files": None},
    prepare, measure, summarize,
)  # fmt: skip

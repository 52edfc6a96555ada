"""Benchmark ``arbitration``: does choosing by measured faithfulness beat always taking one configuration? (Mylonas
et al. 2022)"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whyformer.benchmarks.configurations import Configuration
from whyformer.benchmarks.explaining import Unusable
from whyformer.benchmarks.pictures import geometry, limit, maps, patch_size, pool, read_batch
from whyformer.benchmarks.report import Cell, Report, Table
from whyformer.benchmarks.sanity import removed_logits
from whyformer.benchmarks.sentences import read_texts, token_scores
from whyformer.benchmarks.study import Benchmark, Measured, Study, counts_of
from whyformer.errors import InputError
from whyformer.evaluate.metrics.faithfulness import FRACTIONS, aopc, ranked_faithfulness, removal_masks
from whyformer.evaluate.statistics import Interval, bootstrap
from whyformer.jobs.records import Record


def measure(study: Study, samples: Sequence[Any], configurations: Sequence[Configuration]) -> Iterator[Measured]:
    image = study.modality == "image"
    batch: Any = read_batch(study, samples) if image else read_texts(study, samples)
    found = {c.label: _features(study, batch, c) for c in configurations}
    for i, sample in enumerate(samples):
        usable = [scores[i] for scores in found.values() if not isinstance(scores[i], Unusable)]
        if not usable:
            yield from ((sample.id, c, found[c.label][i]) for c in configurations)
            continue
        size = usable[0].size
        top = batch.predicted[i]
        clean = float(batch.probabilities[i, top])
        drops = clean - study.probabilities(removed_logits(study, batch, i, np.eye(size, dtype=bool)))[:, top]
        for c in configurations:
            scores = found[c.label][i]
            if isinstance(scores, Unusable):
                yield sample.id, c, scores
                continue
            kept = _aopc(study, batch, i, scores, clean, top)
            yield sample.id, c, {"criterion": ranked_faithfulness(scores, drops), "held_out": kept}


def _features(study: Study, batch: Any, configuration: Configuration) -> list[Any]:
    if study.modality == "image":
        found = maps(study, batch, configuration, batch.predicted)
        return [f if isinstance(f, Unusable) else pool(f, *patch_size(study)).reshape(-1) for f in found]
    found = token_scores(study, batch, configuration, batch.predicted)
    return [
        f if isinstance(f, Unusable) else f[~np.asarray(e.special)] for f, e in zip(found, batch.encoded, strict=True)
    ]


def _aopc(study: Study, batch: Any, index: int, scores: NDArray[np.float64], clean: float, top: int) -> float:
    """The held-out figure: what is lost as many features go together, highest first; each forward serves one order
    alone."""
    masks = removal_masks(scores, FRACTIONS)
    return float(aopc(clean, study.probabilities(removed_logits(study, batch, index, masks))[:, top]))


def prepare(study: Study) -> None:
    limit(study)
    if len(study.configurations) < 2:
        raise InputError("arbitration needs at least two methods to choose from")


def summarize(study: Study, records: dict[str, dict[str, Record]]) -> Report:
    choosable = [c.label for c in study.configurations if c.kind == "method"]
    complete = sorted(
        set.intersection(*({s for s, r in records.get(la, {}).items() if "values" in r} for la in choosable))
    )
    cells: dict[tuple[str, str], Cell] = {}
    columns = ("Held-out AOPC ↑", "Prime − this", "criterion RFT ↑", "chosen in % of samples")
    rows: list[str] = [c.label for c in study.configurations]
    remarks = list(study.remarks)
    if complete:
        read = {
            la: {k: np.array([records[la][s]["values"][k] for s in complete]) for k in ("criterion", "held_out")}
            for la in choosable
        }
        criterion, held = (np.stack([read[la][k] for la in choosable], 1) for k in ("criterion", "held_out"))
        picks, best = criterion.argmax(1), int(criterion.mean(0).argmax())
        prime = held[np.arange(len(held)), picks]
        for n, label in enumerate(choosable):
            cells[label, columns[0]] = Cell(bootstrap(held[:, n]))
            cells[label, columns[1]] = Cell(bootstrap(prime - held[:, n]))
            cells[label, columns[2]] = Cell(bootstrap(criterion[:, n]))
            share = 100 * float((picks == n).mean())
            cells[label, columns[3]] = Cell(Interval(share, share, share, len(complete)))
        arbitrated = {
            "Prime (best of each sample)": prime,
            f"Batch (best on average: {choosable[best]})": held[:, best],
        }
        for row, figures in arbitrated.items():
            rows.append(row)
            cells[row, columns[0]] = Cell(bootstrap(figures))
            cells[row, columns[1]] = Cell(bootstrap(prime - figures))
        floor = {s: r["values"] for s, r in records.get("random", {}).items() if "values" in r}
        if floor:
            cells["random", columns[0]] = Cell(bootstrap(np.array([v["held_out"] for v in floor.values()])))
            cells["random", columns[2]] = Cell(bootstrap(np.array([v["criterion"] for v in floor.values()])))
        beaten = [la for n, la in enumerate(choosable) if bootstrap(prime - held[:, n]).low > 0]
        remarks.append(
            f"Prime beats {len(beaten)} of {len(choosable)} fixed configurations on the held-out figure beyond "
            f"the interval: {', '.join(beaten) or 'none'}."
        )
    table = Table(
        "arbitration",
        "Choosing by measured faithfulness (Mylonas et al. 2022)",
        "Configuration",
        tuple(rows),
        columns,
        cells,
        digits=3,
    )
    conventions = {
        "class explained": "predicted",
        "criterion": "RFT = Σ_t term/rank over single features removed; N forwards shared by all configurations",
        "held-out": "AOPC of the probability, 10 … 90 % of the features removed together, highest first: other "
        "forwards than the criterion's",
        "removed": "patches black" if study.modality == "image" else "tokens replaced by [UNK]; special tokens stay",
        "Prime, Batch": "best configuration of each sample; best on average over these samples. Both by the criterion",
        "samples": f"{len(complete)} with a figure from every method",
        **(geometry(study) if study.modality == "image" else {}),
    }
    return Report("arbitration", (table,), (), conventions, counts_of(study, records), tuple(remarks))


BENCHMARK = Benchmark(
    "arbitration",
    "does the choice by measured faithfulness beat each fixed configuration? (Mylonas et al. 2022)",
    "both",
    "transformer_attribution,gae,rollout,raw_attention,gradcam_attention,input_x_gradient",
    {},
    {"resample": None, "longest": 128, "count": None, "files": None},
    prepare,
    measure,
    summarize,
    lambda study: float(len(FRACTIONS)),
)

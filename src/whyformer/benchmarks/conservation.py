"""Benchmark ``conservation``: Σ relevance against the explained logit, per method (Ali et al. 2022, Figure 2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from whyformer.benchmarks.configurations import Configuration, generator_for
from whyformer.benchmarks.explaining import Unusable, explain_ids, explain_pixels
from whyformer.benchmarks.pictures import limit, read_batch
from whyformer.benchmarks.report import Cell, Curves, Report, Table
from whyformer.benchmarks.sentences import read_texts
from whyformer.benchmarks.study import Benchmark, Measured, Study, counts_of, values_of
from whyformer.evaluate.metrics.relevance import ConservationFit, conservation_fit, relevance_sum
from whyformer.evaluate.statistics import Interval
from whyformer.jobs.records import Record


def measure(study: Study, samples: Sequence[Any], configurations: Sequence[Configuration]) -> Iterator[Measured]:
    image = study.modality == "image"
    batch: Any = read_batch(study, samples) if image else read_texts(study, samples)
    for configuration in configurations:
        if configuration.kind != "method":
            for i, sample in enumerate(samples):
                drawn = float(generator_for(sample.id, study.seed).choice(batch.logits[i]))
                yield (
                    sample.id,
                    configuration,
                    {"sum": drawn, "logit": float(batch.logits[i, batch.predicted[i]]), "source": "drawn"},
                )
            continue
        if image:
            found = explain_pixels(study.model, study.processor, configuration, batch.pixels, batch.predicted)
        else:
            rows = [e.ids for e in batch.encoded]
            found = explain_ids(study.model, study.processor, configuration, rows, batch.predicted, study.forwards.pad)
        for i, (sample, one) in enumerate(zip(samples, found, strict=True)):
            try:
                one.scores()
            except Unusable as error:
                yield sample.id, configuration, error
                continue
            assert one.explanation is not None
            total, source = relevance_sum(one.explanation)
            yield (
                sample.id,
                configuration,
                {"sum": total, "logit": float(batch.logits[i, batch.predicted[i]]), "source": source},
            )


def prepare(study: Study) -> None:
    limit(study)


def summarize(study: Study, records: dict[str, dict[str, Record]]) -> Report:
    labels = tuple(c.label for c in study.configurations)
    columns = ("slope (1)", "intercept (0)", "error (0)", "correlation (1)")
    cells, lines, sources = {}, {}, {}
    for label in labels:
        vs = values_of(study, records, label)
        if not vs:
            continue
        x, y = np.array([v["logit"] for v in vs]), np.array([v["sum"] for v in vs])
        lines[label] = (x.tolist(), y.tolist())
        sources[label] = vs[0]["source"]
        for column, interval in zip(columns, _intervals(y, x), strict=True):
            cells[label, column] = Cell(interval)
    table = Table(
        "conservation",
        "Σ relevance against the logit (the value of exact conservation in brackets)",
        "Method",
        labels,
        columns,
        cells,
        digits=3,
    )
    conventions = {
        "class explained": "predicted",
        "sum": "; ".join(f"{k}: {v}" for k, v in sources.items()),
        "error": "mean |ΣR − f| / mean |f|",
        "biases": "the model's own; a rule set that conserves exactly without biases may not with them "
        "(methods.md §8 #21)",
        "floor": "random: the logit of a class drawn at random",
    }
    panels = [Curves(label, label, "logit", "Σ relevance", {label: line}, points=True) for label, line in lines.items()]
    return Report("conservation", (table,), tuple(panels), conventions, counts_of(study, records), tuple(study.remarks))


def _intervals(y: Any, x: Any, draws: int = 500) -> list[Interval]:
    """Fit with percentile intervals over samples."""
    fit = conservation_fit(y, x)
    generator = np.random.default_rng(0)
    again = [conservation_fit(y[p], x[p]) for p in generator.integers(len(x), size=(draws, len(x)))]
    made = []
    for name in ConservationFit.__dataclass_fields__:
        drawn = np.array([getattr(a, name) for a in again])
        low, high = np.nanquantile(drawn, [0.025, 0.975]) if np.isfinite(drawn).any() else (float("nan"), float("nan"))
        made.append(Interval(getattr(fit, name), float(low), float(high), len(x)))
    return made


BENCHMARK = Benchmark(
    "conservation",
    "Σ relevance against the logit: slope and error (Ali et al. 2022)",
    "both",
    "input_x_gradient,lrp_ah,lrp_ln,lrp_ah_ln,transformer_attribution",
    {},
    {"resample": None, "longest": 256, "count": None, "files": None},
    prepare,
    measure,
    summarize,
    lambda study: 1.0,
)

"""Benchmark ``conservation``: Σ relevance against the explained logit, per method (Ali et al. 2022, Figure 2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from whyformer.benchmarks.configurations import Configuration, generator_for
from whyformer.benchmarks.pictures import Pictures
from whyformer.benchmarks.report import Curves, Report, Results, Values, method_table
from whyformer.benchmarks.study import Benchmark, Measured, Study, Unusable, usable
from whyformer.benchmarks.texts import Texts
from whyformer.evaluate.metrics.relevance import conservation_fit, relevance_sum
from whyformer.evaluate.statistics import Interval
from whyformer.explanation.result import Explanation


def measure(batch: Pictures | Texts, configurations: Sequence[Configuration]) -> Iterator[Measured]:
    logits = [float(row.max()) for row in batch.logits]
    for configuration in configurations:
        if configuration.kind != "method":
            for i, sample in enumerate(batch.samples):
                drawn = float(generator_for(sample.id, batch.study.seed).choice(batch.logits[i]))
                yield sample.id, configuration, {"sum": drawn, "logit": logits[i], "source": "drawn"}
            continue
        for i, found in enumerate(batch.explanations(configuration, batch.predicted)):
            judged = found if isinstance(found, Unusable) else usable(found.scores[0].double().numpy())
            if isinstance(judged, Unusable):
                yield batch.samples[i].id, configuration, judged
            elif isinstance(found, Explanation):
                total, source = relevance_sum(found)
                yield batch.samples[i].id, configuration, {"sum": total, "logit": logits[i], "source": source}


COLUMNS = {"slope (1)": "slope", "intercept (0)": "intercept", "error (0)": "error", "correlation (1)": "correlation"}


def _fitted(values: Sequence[Values], name: str, draws: int = 500) -> Interval:
    """A figure of the fit, with its percentile interval over samples."""
    x, y = np.array([v["logit"] for v in values]), np.array([v["sum"] for v in values])
    generator = np.random.default_rng(0)
    again = [conservation_fit(y[p], x[p]) for p in generator.integers(len(x), size=(draws, len(x)))]
    drawn = np.array([getattr(fit, name) for fit in again])
    low, high = np.nanquantile(drawn, [0.025, 0.975]) if np.isfinite(drawn).any() else (float("nan"), float("nan"))
    return Interval(getattr(conservation_fit(y, x), name), float(low), float(high), len(x))


def summarize(study: Study, results: Results) -> Report:
    table = method_table(
        "conservation", "Σ relevance against the logit (the value of exact conservation in brackets)", "Method",
        study.configurations, results, {title: partial(_fitted, name=name) for title, name in COLUMNS.items()},
        digits=3, down=True,
    )  # fmt: skip
    scored = {label: list(values.values()) for label, values in results.items() if values}
    stated = {
        "class explained": "predicted",
        "sum": "; ".join(f"{label}: {values[0]['source']}" for label, values in scored.items()),
        "error": "mean |ΣR − f| / mean |f|",
        "biases": "the model's own; a rule set that conserves exactly without biases may not with them "
        "(methods.md §8 #21)",
        "floor": "random: the logit of a class drawn at random",
    }
    panels = []
    for label, values in scored.items():
        line = [float(v["logit"]) for v in values], [float(v["sum"]) for v in values]
        panels.append(Curves(label, label, "logit", "Σ relevance", {label: line}, points=True))
    return Report((table,), tuple(panels), stated)


BENCHMARK = Benchmark(
    "conservation", "Σ relevance against the logit: slope and error (Ali et al. 2022)", "both",
    "input_x_gradient,lrp_ah,lrp_ln,lrp_ah_ln,transformer_attribution", {},
    {"resample": None, "longest": 256, "count": None, "files": None},
    Study.limit, measure, summarize,
)  # fmt: skip

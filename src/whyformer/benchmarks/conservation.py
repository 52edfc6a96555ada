"""Benchmark ``conservation``: Σ relevance against the explained logit (Ali et al. 2022, Figure 2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from whyformer.benchmarks.configurations import Configuration, generator_for
from whyformer.benchmarks.published import conventions
from whyformer.benchmarks.report import Curves, Report, Results, Values, method_table
from whyformer.benchmarks.study import Batch, Benchmark, Exclusion, Measured, Study, usable
from whyformer.evaluation.metrics.relevance import conservation_fit, relevance_sum
from whyformer.evaluation.statistics import Interval, bootstrap_of
from whyformer.explanation.result import Explanation


def measure(batch: Batch, configurations: Sequence[Configuration]) -> Iterator[Measured]:
    for c in configurations:
        explanations = batch.explanations(c, batch.predicted) if c.kind == "method" else None
        for i, sample in enumerate(batch.samples):
            logit, random = float(batch.logits[i].max()), generator_for(sample.id, batch.study.seed)
            drawn = {"sum": float(random.choice(batch.logits[i])), "source": "drawn"}
            result = _summed(explanations[i], logit) if explanations else drawn
            yield sample.id, c, result if isinstance(result, Exclusion) else {**result, "logit": logit}


def _summed(explanation: Explanation | Exclusion, logit: float) -> Values | Exclusion:
    if isinstance(explanation, Exclusion):
        return explanation
    checked = usable(explanation.scores[0].double().numpy())
    if isinstance(checked, Exclusion):
        return checked
    total, source = relevance_sum(explanation, logit)
    return {"sum": total, "source": source}


COLUMNS = {"slope (1)": "slope", "intercept (0)": "intercept", "error (0)": "error", "correlation (1)": "correlation"}


def _fitted(values: Sequence[Values], name: str) -> Interval:
    """Return a figure of the fit with its interval over samples."""
    pairs = [(v["sum"], v["logit"]) for v in values]
    return bootstrap_of(lambda samples: getattr(conservation_fit(*samples.T), name), pairs)


def summarize(study: Study, results: Results) -> Report:
    table = method_table(
        "conservation", "Σ relevance against the logit (the value of exact conservation in brackets)", "Method",
        study.configurations, results, {title: partial(_fitted, name=name) for title, name in COLUMNS.items()},
        digits=3, down=True,
    )  # fmt: skip
    scored = {label: list(values.values()) for label, values in results.items() if values}
    sources = "; ".join(f"{label}: {values[0]['source']}" for label, values in scored.items())
    panels = []
    for label, values in scored.items():
        line = [float(v["logit"]) for v in values], [float(v["sum"]) for v in values]
        panels.append(Curves(label, label, "logit", "Σ relevance", {label: line}, points=True))
    return Report((table,), tuple(panels), conventions("conservation", sources=sources))


BENCHMARK = Benchmark(
    "conservation", "Σ relevance against the logit: slope and error (Ali et al. 2022)", "both",
    "input_x_gradient,lrp_ah,lrp_ln,lrp_ah_ln,transformer_attribution", {},
    {"resample": None, "longest": 256, "count": None, "files": None},
    Study.limit, measure, summarize,
)  # fmt: skip

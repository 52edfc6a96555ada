"""Benchmark ``leaderboard``: quality and cost of all applicable methods, with paired differences to the best."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from whyformer import explaining
from whyformer.benchmarks import ablation, activation, perturbation, segmentation
from whyformer.benchmarks.batches import PictureBatch
from whyformer.benchmarks.configurations import Configuration
from whyformer.benchmarks.published import conventions
from whyformer.benchmarks.report import FRONT, Cell, Curves, Report, Results, Table, Values, method_table
from whyformer.benchmarks.study import Batch, Benchmark, Exclusion, Measured, Study, seconds
from whyformer.errors import InputError, WhyformerError
from whyformer.evaluation.metrics.faithfulness import accuracy_auc, au_mse, auac, curve_fractions
from whyformer.evaluation.statistics import bootstrap, bootstrap_of
from whyformer.models.readout import plain_logits

PICTURES = (
    "transformer_attribution:start_layer=1,gae,gae:composite=libra,libragrad,rollout,"
    "raw_attention,gradcam,gradcam_attention,attnlrp,attnlrp:share=1.0,cp_lrp,gim,lrp_ah_ln:secant=True,"
    "input_x_gradient,lrp,partial_lrp,gae:composite=libra:affinity=True,transformer_attribution:start_layer=1:affinity=True"
)


def per_sample(values: Values, row: str) -> float | None:
    """Return a sample's top-1 AUC in % for ``row``, "direction/explained class"; None if it was not measured."""
    if "clean" not in values:
        return None
    return float(accuracy_auc(curve_fractions(), perturbation.correct(values, row)))


# title -> (figure of a sample, True if higher is better)
READ: dict[str, tuple[Callable[[Values], float | None], bool]] = {
    "Positive ↓": (partial(per_sample, row="positive/predicted"), False),
    "Negative ↑": (partial(per_sample, row="negative/predicted"), True),
    "AUAC ↑": (lambda v: 100 * float(auac(v["probability"])) if "probability" in v else None, True),
    "AU-MSE ↓": (lambda v: float(au_mse(v["change"])) if "change" in v else None, False),
    "mAP ↑": (lambda v: 100 * v["segmentation"]["average_precision"] if "segmentation" in v else None, True),
    "Energy in mask ↑": (lambda v: 100 * v["segmentation"]["energy"] if "segmentation" in v else None, True),
}
SCENES = "scenes"
"""The reader whose pictures show several objects each; they are compared with masks only."""


def prepare(study: Study) -> None:
    if study.reader == SCENES:
        if study.options["masks"]:
            raise InputError("digit scenes have masks: leave out --option masks")
        study.options["explained"] = "target"
        segmentation.prepare(study)
    elif study.modality == "image":
        study.options["baseline"] = study.options["baseline"] or "black"
        ablation.prepare(study)
    else:
        study.configurations = [c for c in study.configurations if not c.settings.get("affinity")]
        activation.prepare(study)


def measure(batch: Batch, configurations: Sequence[Configuration]) -> Iterator[Measured]:
    """Measure what the other benchmarks do, and cost and condition for the first sample of each batch."""
    first = batch.samples[0].id if batch.samples else None
    costs = {c: _cost(batch, c) for c in configurations if c.kind == "method"}
    for sample, c, values in _measured(batch, configurations):
        if sample == first and not isinstance(values, Exclusion):
            values = {**values, **costs.get(c, {})}
        yield sample, c, values


def _measured(batch: Batch, configurations: Sequence[Configuration]) -> Iterator[Measured]:
    if not isinstance(batch, PictureBatch):
        yield from activation.measure(batch, configurations)
    elif batch.study.reader != SCENES:
        yield from ablation.measure(batch, configurations)
    else:
        for sample, c, values in segmentation.measure(batch, configurations):
            if isinstance(values, Exclusion):
                yield sample, c, values
            else:
                constant = {k: values[k] for k in ("constant",) if k in values}
                yield sample, c, {"segmentation": values, **constant}


def _cost(batch: Batch, configuration: Configuration) -> Values:
    """Measure, for the first sample, the time of an explanation in forward passes and its sensitivity to noise."""
    study, target = batch.study, [batch.predicted[0]]

    def explained(inputs: Any) -> torch.Tensor:
        method, settings = configuration.method, configuration.settings
        return explaining.explain(study.model, inputs, method, target, study.processor, **settings).scores

    inputs = batch.inputs([0])
    fed = ((), inputs[0]) if isinstance(inputs, list) else ((inputs,), {})
    try:
        explained(inputs)  # warm-up: one-time measurements of the model are not part of the cost
        plain, began = [], seconds(study.model)
        scores = explained(inputs)
        duration = seconds(study.model) - began
        for _ in range(3):
            began = seconds(study.model)
            plain_logits(study.model, *fed)
            plain.append(seconds(study.model) - began)
    except WhyformerError:
        return {}
    figures: Values = {"cost": duration / statistics.median(plain)}
    if isinstance(batch, PictureBatch):
        noise = torch.rand(inputs.shape, generator=torch.Generator().manual_seed(study.seed)) - 0.5
        offset = noise / 255 / batch.spec.std[None, :, None, None]
        perturbed = explained(inputs + offset.to(inputs))
        figures["condition"] = float((perturbed - scores).norm() / scores.norm().clamp(min=1e-30))
    return figures


# -- the report ----------------------------------------------------------------------------------------------------
def summarize(study: Study, results: Results) -> Report:
    image = study.modality == "image"
    rows = [title for title, (read, _) in READ.items() if any(_figures(v, read) for v in results.values())]
    table = _quality(study, results, rows)
    inner: dict[str, Any] = {}
    if image and "mAP ↑" in rows:
        masked = ablation.of_masks(results)
        more = method_table("leaderboard", "", "", study.configurations, masked, segmentation.FIGURES, down=True)
        columns = tuple(title for title in segmentation.FIGURES if title not in rows)
        table = replace(table, columns=table.columns + columns, cells=more.cells | table.cells)
        inner |= segmentation.summarize(study, masked).conventions if study.reader == SCENES else {}
    panels = tuple(_pareto(results, title) for title in rows)
    if image and "Positive ↓" in rows:
        inner |= perturbation.summarize(study, ablation.of_curves(results)).conventions
    if not image:
        inner |= activation.summarize(study, results).conventions
    return Report((table,), panels, {**inner, **conventions("leaderboard")})


def _figures(values: dict[str, Values], read: Callable[[Values], float | None]) -> dict[str, float]:
    by_sample = {sample: read(v) for sample, v in values.items()}
    return {sample: figure for sample, figure in by_sample.items() if figure is not None and np.isfinite(figure)}


def _quality(study: Study, results: Results, rows: Sequence[str]) -> Table:
    """Return each figure with its paired difference to the best row, cost and condition, sorted by the first figure."""
    cells: dict[tuple[str, str], Cell] = {}
    columns: list[str] = []
    for title in rows:
        read, higher_is_better = READ[title]
        figures = {c.label: _figures(results[c.label], read) for c in study.configurations}
        means = {
            c.label: float(np.mean(list(figures[c.label].values())))
            for c in study.configurations
            if c.kind == "method" and figures[c.label]
        }
        if not means:
            continue
        best = (max if higher_is_better else min)(means, key=lambda label: means[label])
        columns += [title, f"{title[:-2]}: behind the best"]
        for label, by_sample in figures.items():
            sign, others = (-1 if higher_is_better else 1), figures[best]
            differences = [sign * (by_sample[s] - others[s]) for s in by_sample if s in others]
            cells[label, title] = Cell(bootstrap(list(by_sample.values())) if by_sample else None)
            cells[label, columns[-1]] = Cell(bootstrap(differences) if differences and label != best else None)
    for label, values in results.items():
        for title, name, scale in (("Cost, forwards", "cost", 1), ("Condition, %", "condition", 100)):
            measured_values = [scale * v[name] for v in values.values() if name in v]
            if measured_values:
                cells[label, title] = Cell(bootstrap_of(np.median, measured_values))
    columns += ["Cost, forwards", *(["Condition, %"] if study.modality == "image" else [])]
    labels = [c.label for c in study.configurations]
    if columns and rows:
        sign = -1 if READ[rows[0]][1] else 1
        labels.sort(key=lambda label: sign * _value(cells.get((label, rows[0]))))
    units = {"%": [t[:-2] for t in rows if t != "AU-MSE ↓"], "logits²": [t[:-2] for t in rows if t == "AU-MSE ↓"]}
    stated = [f"{', '.join(titles)} in {unit}" for unit, titles in units.items() if titles]
    heading = "; ".join(["Methods, the best first", *stated])
    return Table("leaderboard", heading, "Method", tuple(labels), tuple(columns), cells)


def _value(cell: Cell | None) -> float:
    return cell.measured.value if cell is not None and cell.measured is not None else float("inf")


def _pareto(results: Results, title: str) -> Curves:
    """Return quality against cost, with a line through the Pareto front."""
    read, higher_is_better = READ[title]
    points: dict[str, tuple[float, float]] = {}
    for label, values in results.items():
        figures, costs = _figures(values, read), [v["cost"] for v in values.values() if "cost" in v]
        if figures and costs:
            points[label] = (statistics.median(costs), float(np.mean(list(figures.values()))))
    best = [
        (x, y)
        for x, y in sorted(points.values())
        if not any(u <= x and (v > y if higher_is_better else v < y) for u, v in points.values())
    ]
    lines = {label: ([x], [y]) for label, (x, y) in points.items()}
    if best:
        lines[FRONT] = ([x for x, _ in best], [y for _, y in best])
    return Curves(title.split()[0].lower(), title, "cost, plain forward passes", title, lines)


BENCHMARK = Benchmark(
    "leaderboard", "every method that applies: quality, cost, paired differences to the best", "both",
    PICTURES, {},
    {**perturbation.OPTIONS, "explained": ("predicted",), "measures": ("positive", "negative"), "masks": None,
     "longest": 256, "column": None, "baseline": None},
    prepare, measure, summarize, choices={k: v for k, v in perturbation.CHOICES.items() if k != "baseline"},
)  # fmt: skip

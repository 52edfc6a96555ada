"""Benchmark ``perturbation``: Table 1 of Chefer et al. 2021, and AOPC, LOdds, insertion and deletion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from whyformer.benchmarks import published
from whyformer.benchmarks.configurations import Configuration
from whyformer.benchmarks.pictures import Pictures, conventions
from whyformer.benchmarks.report import Curves, Figure, Report, Results, Values, mean, mean_lines, method_table, percent
from whyformer.benchmarks.study import CONSTANT, Benchmark, Measured, Scores, Study, Unusable, constant_remarks
from whyformer.errors import InputError
from whyformer.evaluate.metrics import faithfulness
from whyformer.evaluate.metrics.faithfulness import FRACTIONS
from whyformer.evaluate.statistics import Interval, bootstrap
from whyformer.inputs.removal import PICTURE_BASELINES

EXPLAINED = ("predicted", "target")
DIRECTIONS = ("negative", "positive")
MEASURES = ("positive", "negative", "deletion", "insertion")
TIES = ("index", "topk")
"""Which of equal scores goes first: the lower index, or what ``torch.topk`` picks (option ``ties``)."""
Job = tuple[int, str, NDArray[Any]]
"""(picture, measure, order): what several maps may ask for and is run once."""


def measure(batch: Pictures, configurations: Sequence[Configuration]) -> Iterator[Measured]:
    options = batch.study.options
    maps = {(c.label, i): found for c in configurations for i, found in enumerate(_maps_by_class(batch, c))}
    jobs: dict[tuple[int, str, bytes], Job] = {}
    needs: dict[tuple[str, int, str, str], tuple[int, str, bytes]] = {}
    for (label, i), by_class in maps.items():
        for explained, found in by_class.items():
            scores = found.scores if isinstance(found, Unusable) else found
            for name in options["measures"] if scores is not None else ():
                order = _order(scores, name != "negative", options["ties"])
                place = (i, "remove" if name in DIRECTIONS else name, order.tobytes())
                jobs.setdefault(place, (i, name, order))
                needs[label, i, explained, name] = place
    logits = dict(zip(jobs, _run(batch, list(jobs.values())), strict=True))
    for c in configurations:
        for i, sample in enumerate(batch.samples):
            by_class = maps[c.label, i]
            unusable = [found for found in by_class.values() if isinstance(found, Unusable)]
            if error := next((u for u in unusable if u.scores is None), None):
                yield sample.id, c, error
                continue
            top, probability = batch.predicted[i], float(batch.probabilities[i, batch.predicted[i]])
            clean = {"correct": int(top == sample.label), "probability": probability, "predicted": top}
            values: Values = {"clean": clean}
            for name in by_class:
                values[name] = {m: _curve(batch, i, logits[needs[c.label, i, name, m]]) for m in options["measures"]}
            yield sample.id, c, {**values, "constant": 1} if unusable else values


def _maps_by_class(batch: Pictures, configuration: Configuration) -> Iterator[dict[str, Scores]]:
    """The map for the predicted and for the target class; run once where they are one."""
    explained = batch.study.options["explained"]
    predicted, truth = batch.predicted, [s.label for s in batch.samples]
    first = batch.scores(configuration, predicted)
    other: dict[int, Scores] = {}
    if "target" in explained and configuration.class_specific and configuration.kind == "method":
        differ = [i for i, (p, t) in enumerate(zip(predicted, truth, strict=True)) if p != t]
        other = dict(zip(differ, batch.scores(configuration, truth, differ), strict=True))
    for i, one in enumerate(first):
        yield {name: other.get(i, one) if name == "target" else one for name in explained}


def topk_mask(scores: ArrayLike, count: int, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """True at the ``count`` highest scores, equal ones as ``torch.topk`` picks them on a CPU (Chefer's code does).

    Deterministic, but the sets of two counts need not be nested, and no order is documented. For comparisons alone.
    """
    flat = torch.from_numpy(np.asarray(scores, dtype=np.float32).reshape(-1))
    mask = np.zeros(flat.numel(), dtype=bool)
    mask[torch.topk(flat, count).indices.numpy()] = True
    return mask.reshape(shape)


def _order(scores: Any, highest_first: bool, ties: str) -> NDArray[Any]:
    """Flat indices in the order of removal; with ``ties="topk"`` the scores, highest to be removed first."""
    if ties == "index":
        return faithfulness.removal_order(scores, highest_first=highest_first).astype(np.int32)
    flat = np.asarray(scores, dtype=np.float32).reshape(-1)
    low, high = flat.min(), flat.max()
    scaled = (flat - low) / (high - low) if high > low else np.zeros_like(flat)  # its rounding makes ties, too
    return scaled if highest_first else -scaled


def _run(batch: Pictures, jobs: Sequence[Job]) -> list[NDArray[np.float64]]:
    """Logits ``[F, C]`` of each job, all in full batches."""
    options, shape = batch.study.options, batch.spec.size
    steps = [FRACTIONS if m in DIRECTIONS else np.linspace(0, 1, options["steps"] + 1) for _, m, _ in jobs]

    def removed() -> Iterator[tuple[int, NDArray[np.bool_], str]]:
        for (i, name, order), fractions in zip(jobs, steps, strict=True):
            baseline = options["baseline" if name in DIRECTIONS else f"{name}_baseline"]
            for fraction in fractions:
                count = faithfulness.removed_count(order.size, fraction)
                mask = (faithfulness.removal_mask if options["ties"] == "index" else topk_mask)(order, count, shape)
                yield i, ~mask if name == "insertion" else mask, baseline

    return np.split(batch.run(removed()), np.cumsum([len(s) for s in steps])[:-1]) if jobs else []


def _curve(batch: Pictures, index: int, logits: NDArray[np.float64]) -> Values:
    """Whether the label comes out, and the probability of the class first predicted, at each step."""
    return {
        "correct": [int(i == batch.samples[index].label) for i in logits.argmax(-1)],
        "probability": batch.study.probabilities(logits)[:, batch.predicted[index]].tolist(),
    }


def prepare(study: Study) -> None:
    study.limit()
    study.check_some("measures", MEASURES)
    study.check_some("explained", EXPLAINED)
    for name in ("baseline", "deletion_baseline", "insertion_baseline"):
        study.check_one(name, PICTURE_BASELINES)
    study.check_one("ties", TIES)
    study.check_one("constant", CONSTANT)
    if not isinstance(study.options["steps"], int) or study.options["steps"] < 1:
        raise InputError(f"steps must be a whole number from 1, not {study.options['steps']!r}")
    study.check_labels()


def _correct(v: Values, row: str) -> list[int]:
    """Top-1 along the curve, from the clean picture."""
    direction, explained = row.split("/")
    return [v["clean"]["correct"], *v[explained][direction]["correct"]]


def auc(values: Sequence[Values], row: str) -> Interval:
    """AUC of the top-1 accuracy for "direction/explained class", with its interval over samples."""
    return bootstrap(faithfulness.accuracy_auc(faithfulness.curve_fractions(), [_correct(v, row) for v in values]))


def summarize(study: Study, results: Results) -> Report:
    options, titles = study.options, published.TABLE_1_ROWS
    rows = [f"{d}/{e}" for d in DIRECTIONS if d in options["measures"] for e in EXPLAINED if e in options["explained"]]
    tables = []
    if rows:
        paper = {titles[r]: published.TABLE_1[r] for r in rows} if options["baseline"] == "black" else {}
        heading = "Top-1 accuracy under perturbation, AUC in % (CVPR 2021, Table 1)"
        corner, figures = "Perturbation, class explained", {titles[r]: partial(auc, row=r) for r in rows}
        tables.append(method_table("auc", heading, corner, study.configurations, results, figures, published=paper))
    if more := _probability_figures(study):
        heading = f"Probability of the predicted class ({options['explained'][0]} class explained)"
        tables.append(method_table("probability", heading, "Figure", study.configurations, results, more, digits=3))
    curves = []
    for row in rows:
        heading = "{} perturbation, {} class".format(*row.split("/"))
        lines = mean_lines(results, faithfulness.curve_fractions(), partial(_correct, row=row))
        curves.append(Curves(row, heading, "fraction of pixels removed", "top-1 accuracy", lines))
    stated = {
        "class explained": ", ".join(options["explained"]) + "; accuracy always against the label",
        "removed": "per pixel, exactly ⌊f · pixels⌋ at f = 0.1 … 0.9; positive: highest scores first, negative: "
        "lowest first",
        "baseline": {
            "black": "0 before normalisation (black)",
            "zero": "0 after normalisation (mean colour)",
            "mean": "each channel's mean over the picture",
            "blur": "Gaussian blur, kernel 11, σ 5",
        }[options["baseline"]],
        "AUC": "100 · trapezoid of top-1 accuracy over f = 0 … 0.9 from the clean point, not divided by 0.9; at "
        "most 90",
        "AOPC, LOdds": "probability of the class first predicted, mean over f = 0.1 … 0.9, positive perturbation",
        "clean accuracy": percent(list(next(iter(results.values())).values()), lambda v: v["clean"]["correct"]),
        **conventions(study),
    }
    remarks = constant_remarks(results, "their pixels go row by row")
    return Report(tuple(tables), tuple(curves), stated, tuple(remarks))


def _probability_figures(study: Study) -> dict[str, Figure]:
    explained = study.options["explained"][0]

    def along(v: Values, name: str) -> Any:
        return v[explained][name]["probability"]

    figures: dict[str, Figure] = {}
    if "positive" in study.options["measures"]:
        figures["AOPC ↑"] = mean(lambda v: faithfulness.aopc(v["clean"]["probability"], along(v, "positive")))
        figures["LOdds ↓"] = mean(lambda v: faithfulness.log_odds(v["clean"]["probability"], along(v, "positive")))
    if "deletion" in study.options["measures"]:
        figures["Deletion ↓"] = mean(lambda v: faithfulness.mean_curve_area(along(v, "deletion")))
    if "insertion" in study.options["measures"]:
        figures["Insertion ↑"] = mean(lambda v: faithfulness.mean_curve_area(along(v, "insertion")))
    return figures


def has_masks(study: Study) -> bool:
    return all(s.mask is not None for s in study.pictures)


OPTIONS: dict[str, Any] = {
    "explained": EXPLAINED, "measures": ("positive", "negative"), "baseline": "black", "constant": "leave_out",
    "ties": "index", "steps": 28, "deletion_baseline": "zero", "insertion_baseline": "blur", "resample": None,
    "count": None, "files": None,
}  # fmt: skip
BENCHMARK = Benchmark(
    "perturbation", "positive and negative perturbation, top-1 AUC (CVPR 2021, Table 1)", "image",
    published.CVPR_METHODS, published.CVPR_SETTINGS, OPTIONS,
    prepare, measure, summarize, has_masks,
)  # fmt: skip

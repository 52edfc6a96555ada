"""Benchmark ``perturbation``: top-1 AUC (Chefer et al. 2021, Table 1), AOPC, LOdds, insertion and deletion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from whyformer.baselines import BASELINES, names_for
from whyformer.benchmarks.batches import PictureBatch
from whyformer.benchmarks.configurations import Configuration, settings_of
from whyformer.benchmarks.published import CONVENTIONS, PUBLISHED, conventions
from whyformer.benchmarks.report import Curves, Figure, Report, Results, Values, mean, mean_lines, method_table, percent
from whyformer.benchmarks.study import CONSTANT, Benchmark, Exclusion, Measured, Scores, Study, constant_remarks
from whyformer.evaluation.metrics import faithfulness
from whyformer.evaluation.metrics.faithfulness import FRACTIONS
from whyformer.evaluation.statistics import Interval, bootstrap

EXPLAINED = ("predicted", "target")
DIRECTIONS = ("negative", "positive")
MEASURES = ("positive", "negative", "deletion", "insertion")
PER = ("pixel", "nearest", "patch")
"""Units of removal (option ``per``): pixels of the bilinearly resized map, as published; pixels with the score of their
patch; or patches."""
TIES = ("index", "last", "topk")
"""Order of equal scores (option ``ties``): by ascending index, by descending index, or that of ``torch.topk``."""
MapsByClass = dict[tuple[Configuration, int], dict[str, Scores]]


def measure(batch: PictureBatch, configurations: Sequence[Configuration]) -> Iterator[Measured]:
    for sample, c, values in measure_conditions(batch, configurations, {"": batch.study.options}):
        if isinstance(values, Exclusion):
            yield sample, c, values
        else:
            yield sample, c, {"clean": values["clean"], **values.pop(""), **values}


def measure_conditions(
    batch: PictureBatch, configurations: Sequence[Configuration], conditions: dict[str, dict[str, Any]]
) -> Iterator[Measured]:
    """Measure the curves condition -> explained class -> measure; equal perturbed pictures run once.

    Args:
        batch: the pictures.
        configurations: the configurations.
        conditions: name -> options.
    """
    sizes = {options["per"] != "pixel" for options in conditions.values()}
    maps = {nearest: maps_by_class(replace(batch, nearest=nearest), configurations) for nearest in sizes}
    logits = batch.outputs(
        request
        for name, options in conditions.items()
        for request in _requests(batch, maps[options["per"] != "pixel"], name, options)
    )
    for c, i in next(iter(maps.values())):
        every = [map_ for by_class in maps.values() for map_ in by_class[c, i].values()]
        unusable = [map_ for map_ in every if isinstance(map_, Exclusion)]
        sample, top = batch.samples[i], batch.predicted[i]
        if error := next((u for u in unusable if u.scores is None), None):
            yield sample.id, c, error
            continue
        probability = float(batch.probabilities[i, top])
        values: Values = {"clean": {"correct": int(top == sample.label), "probability": probability, "predicted": top}}
        for name, options in conditions.items():
            values[name] = {
                explained: {m: _curve(batch, i, logits[name, c, i, explained, m]) for m in options["measures"]}
                for explained in batch.study.options["explained"]
            }
        yield sample.id, c, {**values, "constant": 1} if unusable else values


def _requests(
    batch: PictureBatch, maps: MapsByClass, condition: str, options: dict[str, Any]
) -> Iterator[tuple[Any, int, Any, str]]:
    """Yield requests for ``Batch.outputs`` with keys (condition, configuration, sample, explained class, measure)."""
    for (c, i), by_class in maps.items():
        for explained, map_ in by_class.items():
            scores = map_.scores if isinstance(map_, Exclusion) else map_
            if scores is None:
                continue
            for name in options["measures"]:
                baseline = options["baseline" if name in DIRECTIONS else f"{name}_baseline"]
                if options["per"] == "patch":  # ranked by the mean of their pixels
                    masks = batch.covered(i, _masks(batch.features(i, scores), name, options))
                else:
                    masks = _masks(scores, name, options)
                yield (condition, c, i, explained, name), i, masks, baseline


def maps_by_class(batch: PictureBatch, configurations: Sequence[Configuration]) -> MapsByClass:
    """Return the maps for the predicted and the target class, computed once if the classes are equal."""
    explained = batch.study.options["explained"]
    predicted, truth = batch.predicted, [s.label for s in batch.samples]
    first = batch.maps(configurations, predicted)
    other: dict[tuple[Configuration, int], Scores] = {}
    if "target" in explained:
        differ = [i for i, (p, t) in enumerate(zip(predicted, truth, strict=True)) if p != t]
        specific = [c for c in configurations if c.class_specific and c.kind == "method"]
        maps = batch.some(differ).maps(specific, [truth[i] for i in differ])
        other = {(c, differ[i]): map_ for (c, i), map_ in maps.items()}
    return {
        (c, i): {name: other.get((c, i), map_) if name == "target" else map_ for name in explained}
        for (c, i), map_ in first.items()
    }


def _masks(scores: NDArray[np.float64], name: str, options: dict[str, Any]) -> NDArray[np.bool_]:
    """Return masks ``[F, ...]`` that are True at the pixels or patches removed at each step of a measure."""
    fractions = FRACTIONS if name in DIRECTIONS else faithfulness.equal_steps(options["steps"])
    if options["ties"] != "topk":
        turn = -1 if options["ties"] == "last" else 1
        turned = scores.reshape(-1)[::turn]
        masks = faithfulness.removal_masks(turned, fractions, highest_first=name != "negative")[:, ::turn]
    else:
        flat = scores.astype(np.float32).reshape(-1)
        low, high = flat.min(), flat.max()
        scaled = (flat - low) / (high - low) if high > low else np.zeros_like(flat)  # its rounding makes ties, too
        counts = [faithfulness.removed_count(flat.size, f) for f in fractions]
        masks = np.stack([topk_mask(-scaled if name == "negative" else scaled, k, flat.shape) for k in counts])
    return (~masks if name == "insertion" else masks).reshape(-1, *scores.shape)


def topk_mask(scores: ArrayLike, count: int, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return a mask, True at the ``count`` highest scores, with ties as in ``torch.topk`` on a CPU (Chefer's code).

    The order of ties is deterministic but undocumented, and the sets for two counts need not be nested. Use this only
    for comparisons.
    """
    flat = torch.from_numpy(np.asarray(scores, dtype=np.float32).reshape(-1))
    mask = np.zeros(flat.numel(), dtype=bool)
    mask[torch.topk(flat, count).indices.numpy()] = True
    return mask.reshape(shape)


def _curve(batch: PictureBatch, index: int, logits: NDArray[np.float64]) -> Values:
    """Return whether the label is predicted, and the probability of the originally predicted class, at each step."""
    return {
        "correct": [int(i == batch.samples[index].label) for i in logits.argmax(-1)],
        "probability": batch.study.probabilities(logits)[:, batch.predicted[index]].tolist(),
    }


def prepare(study: Study) -> None:
    study.limit()
    faithfulness.equal_steps(study.options["steps"])
    study.check_labels()


def correct(v: Values, row: str) -> list[int]:
    """Return the top-1 correctness along the curve, from the clean picture."""
    direction, explained = row.split("/")
    return [v["clean"]["correct"], *v[explained][direction]["correct"]]


def auc(values: Sequence[Values], row: str) -> Interval:
    """Return the top-1 AUC for ``row``, "direction/explained class", with its interval over samples."""
    return bootstrap(faithfulness.accuracy_auc(faithfulness.curve_fractions(), [correct(v, row) for v in values]))


def summarize(study: Study, results: Results) -> Report:
    options = study.options
    rows = {
        f"{d.capitalize()}, {e} {'↑' if d == 'negative' else '↓'}": f"{d}/{e}"
        for d in DIRECTIONS
        for e in EXPLAINED
        if d in options["measures"] and e in options["explained"]
    }
    tables, curves = [], []
    if rows:
        heading = "Top-1 accuracy under perturbation, AUC in % (CVPR 2021, Table 1)"
        paper = PUBLISHED["perturbation"] if options["baseline"] == "black" else {}
        corner, figures = "Perturbation, class explained", {title: partial(auc, row=row) for title, row in rows.items()}
        tables.append(method_table("auc", heading, corner, study.configurations, results, figures, published=paper))
    if more := _probability_figures(study):
        heading = f"Probability of the predicted class ({options['explained'][0]} class explained)"
        tables.append(method_table("probability", heading, "Figure", study.configurations, results, more, digits=3))
    for row in rows.values():
        heading = "{} perturbation, {} class".format(*row.split("/"))
        lines = mean_lines(results, faithfulness.curve_fractions(), partial(correct, row=row))
        curves.append(Curves(row, heading, "fraction of pixels removed", "top-1 accuracy", lines))
    stated = conventions(
        "perturbation", explained=", ".join(options["explained"]), ties=CONVENTIONS["ties"][options["ties"]],
        removed=CONVENTIONS["removed"][options["per"]], baseline=BASELINES[options["baseline"]].kinds["image"],
        accuracy=percent(results, lambda v: v["clean"]["correct"]),
    )  # fmt: skip
    return Report(tuple(tables), tuple(curves), stated, constant_remarks(results, "their pixels go row by row"))


def _probability_figures(study: Study) -> dict[str, Figure]:
    explained = study.options["explained"][0]

    def along(name: str, figure: Any) -> Figure:
        return mean(lambda v: figure(v["clean"]["probability"], v[explained][name]["probability"]))

    rows: dict[str, tuple[str, Any]] = {
        "AOPC ↑": ("positive", faithfulness.aopc),
        "LOdds ↓": ("positive", faithfulness.log_odds),
        "Deletion ↓": ("deletion", lambda clean, y: faithfulness.mean_curve_area(y)),
        "Insertion ↑": ("insertion", lambda clean, y: faithfulness.mean_curve_area(y)),
    }
    return {title: along(*row) for title, row in rows.items() if row[0] in study.options["measures"]}


def has_masks(study: Study) -> bool:
    return all(s.mask is not None for s in study.samples)


OPTIONS: dict[str, Any] = {
    "explained": EXPLAINED, "measures": ("positive", "negative"), "baseline": "black", "constant": "leave_out",
    "ties": "index", "per": "pixel", "steps": 28, "deletion_baseline": "zero", "insertion_baseline": "blur",
    "resample": None, "count": None, "files": None,
}  # fmt: skip
CHOICES: dict[str, Any] = {
    "measures": MEASURES, "explained": EXPLAINED, "ties": TIES, "per": PER, "constant": CONSTANT,
    **dict.fromkeys(("baseline", "deletion_baseline", "insertion_baseline"), names_for("image")),
}  # fmt: skip
METHODS = PUBLISHED["perturbation"]["methods"]
BENCHMARK = Benchmark(
    "perturbation", "positive and negative perturbation, top-1 AUC (CVPR 2021, Table 1)", "image",
    METHODS, settings_of(METHODS), OPTIONS, prepare, measure, summarize, has_masks, choices=CHOICES,
)  # fmt: skip

"""Benchmark ``sanity``: parameter randomization, class and input sensitivity, infidelity."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from whyformer.benchmarks.batches import PictureBatch
from whyformer.benchmarks.configurations import Configuration, generator_for
from whyformer.benchmarks.published import conventions
from whyformer.benchmarks.report import Curves, Figure, Report, Results, Values, mean, mean_lines, mean_of, method_table
from whyformer.benchmarks.study import Batch, Benchmark, Exclusion, Measured, Scores, Study
from whyformer.evaluation.metrics import sanity as metrics
from whyformer.evaluation.metrics.relevance import infidelity, random_subsets

CHECKS = ("cascading", "independent", "class", "sensitivity", "infidelity")


def _scores(batch: Batch, configuration: Configuration, targets: Sequence[int]) -> list[Scores]:
    """Return maps ``[H, W]`` of pictures, or scores ``[N]`` of texts without special tokens."""
    maps = batch.scores(configuration, targets)
    return [s if batch.image or isinstance(s, Exclusion) else batch.features(i, s) for i, s in enumerate(maps)]


def measure(batch: Batch, configurations: Sequence[Configuration]) -> Iterator[Measured]:
    checks, top = batch.study.options["checks"], batch.predicted
    original = {c: _scores(batch, c, top) for c in configurations}
    values: dict[tuple[Configuration, int], Values] = {(c, i): {} for c in configurations for i in range(len(top))}
    for order in (o for o in metrics.ORDERS if o in checks):
        for stage, changed in metrics.randomized_models(batch.study.model, order, seed=batch.study.seed):
            other = replace(batch, study=replace(batch.study, model=changed))
            for c in configurations:
                for i, randomized in enumerate(_randomized(other, c, stage, original[c])):
                    values[c, i].setdefault(order, {})[stage] = _compared(_similarity, original[c][i], randomized)
    removals = [_removal(batch, i) for i in range(len(top))] if "infidelity" in checks else []
    for c in configurations:
        applicable = checks if c.kind == "method" else ()
        least = _scores(batch, c, batch.logits.argmin(-1).tolist()) if "class" in applicable else None
        noisy = "sensitivity" in applicable
        disturbed = list(_disturbed(batch, c)) if noisy and isinstance(batch, PictureBatch) else None
        for i, sample in enumerate(batch.samples):
            map_, figures = original[c][i], values[c, i]
            if isinstance(map_, Exclusion):
                yield sample.id, c, map_
                continue
            if "class" in checks:
                figures["class"] = _compared(metrics.spearman, map_, least[i]) if least else None
            if "sensitivity" in checks:
                figures["sensitivity"] = _compared(_largest, map_, *disturbed[i]) if disturbed else None
            if "infidelity" in checks:
                figures["infidelity"] = infidelity(batch.features(i, map_) if batch.image else map_, *removals[i])
            yield sample.id, c, figures


def _compared(measure: Callable[..., Any], *maps: Scores) -> Any:
    """Return ``measure(*maps)``, or None if a map is unusable."""
    return None if any(isinstance(map_, Exclusion) for map_ in maps) else measure(*maps)


def _randomized(batch: Batch, c: Configuration, stage: str, original: Sequence[Scores]) -> Sequence[Scores]:
    """Return the scores of the randomized model for the class that the original model predicts.

    The floor does not depend on the model. It is a new permutation of random scores for each stage: the similarity of
    unrelated maps.
    """
    if c.kind == "method":
        return _scores(batch, c, batch.predicted)
    generators = (generator_for(f"{s.id}/{stage}", batch.study.seed) for s in batch.samples)
    maps = [m for m in original if not isinstance(m, Exclusion)]  # all maps: random numbers are never constant
    return [g.permutation(m.reshape(-1)).reshape(m.shape) for g, m in zip(generators, maps, strict=True)]


def _similarity(first: NDArray[np.float64], second: NDArray[np.float64]) -> Values:
    figures = {"spearman": metrics.spearman(first, second), "absolute": metrics.spearman(first, second, absolute=True)}
    return {**figures, "ssim": metrics.ssim(first, second)} if first.ndim == 2 else figures


def _disturbed(batch: PictureBatch, c: Configuration) -> Iterator[tuple[Scores, ...]]:
    """Return the maps of each picture with noise δ ∈ U[−r, r] added to its normalised pixels."""
    shape, seed = tuple(batch.pixels.shape[1:]), batch.study.seed
    maps = []
    for draw in range(batch.study.options["draws"]):
        noise = [generator_for(f"{s.id}/{draw}", seed).uniform(-1, 1, shape) for s in batch.samples]
        change = batch.study.options["radius"] * torch.from_numpy(np.stack(noise)).to(batch.pixels)
        maps.append(replace(batch, pixels=batch.pixels + change).scores(c, batch.predicted))
    return zip(*maps, strict=True)


def _largest(original: NDArray[np.float64], *changed: NDArray[np.float64]) -> float:
    return metrics.max_sensitivity(original, changed)


def _removal(batch: Batch, index: int) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Return random subsets of features ``[S, n]``, and the decrease of the predicted class's logit without each."""
    options, top = batch.study.options, batch.predicted[index]
    removed = random_subsets(batch.count(index), options["subsets"], share=options["share"], seed=batch.study.seed)
    return removed, batch.logits[index, top] - batch.without(index, removed)[:, top]


def prepare(study: Study) -> None:
    study.limit()
    if set(metrics.ORDERS) & set(study.options["checks"]):
        metrics.stages(study.model)


def _along(v: Values, order: str, names: Sequence[str], kind: str) -> list[float]:
    """Return the figure at each stage; NaN if there is none."""
    stages = ((v[order].get(name) or {}).get(kind) for name in names)
    return [float("nan") if figure is None else figure for figure in stages]


def summarize(study: Study, results: Results) -> Report:
    image, checks = study.modality == "image", study.options["checks"]
    figures: dict[str, Figure] = {}
    curves = []
    for order in (o for o in metrics.ORDERS if o in checks):
        names = [s for s, _ in metrics.stages(study.model)]
        for kind in ("spearman", "absolute", "ssim") if image else ("spearman", "absolute"):
            along = partial(_along, order=order, names=names, kind=kind)
            figures[f"{order}: {kind}"] = mean(lambda v, along=along: mean_of(along(v)))  # type: ignore[misc]
        lines = mean_lines(results, range(len(names)), partial(_along, order=order, names=names, kind="spearman"))
        axis = f"stage: 0 head … {len(names) - 1} embeddings"
        curves.append(Curves(order, f"{order} randomisation, Spearman", axis, "similarity", lines))
    more = {"class": "class: Spearman (top, least)", "sensitivity": "max-sensitivity ↓", "infidelity": "infidelity ↓"}
    figures |= {title: mean(lambda v, name=name: v.get(name)) for name, title in more.items() if name in checks}  # type: ignore[misc]
    title = "Sanity checks (means over samples and stages)"
    table = method_table("sanity", title, "Method", study.configurations, results, figures, digits=3, down=True)
    return Report((table,), tuple(curves), conventions("sanity", **study.options))


BENCHMARK = Benchmark(
    "sanity", "parameter randomisation (Spearman, SSIM), class sensitivity, max-sensitivity, infidelity", "both",
    "transformer_attribution,gae,rollout,raw_attention,gradcam_attention,input_x_gradient", {},
    {"checks": CHECKS, "draws": 3, "radius": 0.1, "subsets": 50, "share": 0.2, "resample": None, "longest": 256,
     "count": None, "files": None},
    prepare, measure, summarize, choices={"checks": CHECKS},
)  # fmt: skip

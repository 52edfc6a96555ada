"""Benchmark ``sanity``: parameter randomisation, class and input sensitivity, infidelity."""

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
from whyformer.benchmarks.study import Batch, Benchmark, Measured, Scores, Study, Unusable
from whyformer.evaluation.metrics import sanity as metrics
from whyformer.evaluation.metrics.relevance import infidelity, random_subsets

CHECKS = ("cascading", "independent", "class", "sensitivity", "infidelity")


def _scores(batch: Batch, configuration: Configuration, targets: Sequence[int]) -> list[Scores]:
    """Maps ``[H, W]`` of pictures, ``[N]`` scores of text (special tokens left out)."""
    found = batch.scores(configuration, targets)
    return [s if batch.image or isinstance(s, Unusable) else batch.features(i, s) for i, s in enumerate(found)]


def measure(batch: Batch, configurations: Sequence[Configuration]) -> Iterator[Measured]:
    checks, top = batch.study.options["checks"], batch.predicted
    own = {c: _scores(batch, c, top) for c in configurations}
    values: dict[tuple[Configuration, int], Values] = {(c, i): {} for c in configurations for i in range(len(top))}
    for order in (o for o in metrics.ORDERS if o in checks):
        for stage, changed in metrics.randomized_models(batch.study.model, order, seed=batch.study.seed):
            other = replace(batch, study=replace(batch.study, model=changed))
            for c in configurations:
                for i, again in enumerate(_again(other, c, stage, own[c])):
                    values[c, i].setdefault(order, {})[stage] = _compared(_similarity, own[c][i], again)
    removals = [_removal(batch, i) for i in range(len(top))] if "infidelity" in checks else []
    for c in configurations:
        asked = checks if c.kind == "method" else ()
        least = _scores(batch, c, batch.logits.argmin(-1).tolist()) if "class" in asked else None
        disturbed = list(_disturbed(batch, c)) if "sensitivity" in asked and isinstance(batch, PictureBatch) else None
        for i, sample in enumerate(batch.samples):
            mine, figures = own[c][i], values[c, i]
            if isinstance(mine, Unusable):
                yield sample.id, c, mine
                continue
            if "class" in checks:
                figures["class"] = _compared(metrics.class_sensitivity, mine, least[i]) if least else None
            if "sensitivity" in checks:
                figures["sensitivity"] = _compared(_largest, mine, *disturbed[i]) if disturbed else None
            if "infidelity" in checks:
                figures["infidelity"] = infidelity(batch.features(i, mine) if batch.image else mine, *removals[i])
            yield sample.id, c, figures


def _compared(measure: Callable[..., Any], *maps: Scores) -> Any:
    """What a function makes of the maps, None where one of them cannot be used."""
    return None if any(isinstance(one, Unusable) for one in maps) else measure(*maps)


def _again(batch: Batch, c: Configuration, stage: str, own: Sequence[Scores]) -> Sequence[Scores]:
    """The scores on the changed model, for the class first predicted.

    The floor does not look at the model, so that it is drawn anew for each: what unrelated maps have in common.
    """
    if c.kind == "method":
        return _scores(batch, c, batch.predicted)
    generators = (generator_for(f"{s.id}/{stage}", batch.study.seed) for s in batch.samples)
    maps = [m for m in own if not isinstance(m, Unusable)]  # all of them: random numbers are never constant
    return [g.permutation(m.reshape(-1)).reshape(m.shape) for g, m in zip(generators, maps, strict=True)]


def _similarity(one: NDArray[np.float64], other: NDArray[np.float64]) -> Values:
    made = {"spearman": metrics.spearman(one, other), "absolute": metrics.spearman(one, other, absolute=True)}
    return {**made, "ssim": metrics.ssim(one, other)} if one.ndim == 2 else made


def _disturbed(batch: PictureBatch, c: Configuration) -> Iterator[tuple[Scores, ...]]:
    """The maps of each picture for δ ∈ U[−r, r] on its normalised pixels."""
    shape, seed = tuple(batch.pixels.shape[1:]), batch.study.seed
    drawn = []
    for draw in range(batch.study.options["draws"]):
        noise = [generator_for(f"{s.id}/{draw}", seed).uniform(-1, 1, shape) for s in batch.samples]
        change = batch.study.options["radius"] * torch.from_numpy(np.stack(noise)).to(batch.pixels)
        drawn.append(replace(batch, pixels=batch.pixels + change).scores(c, batch.predicted))
    return zip(*drawn, strict=True)


def _largest(original: NDArray[np.float64], *changed: NDArray[np.float64]) -> float:
    return metrics.max_sensitivity(original, changed)


def _removal(batch: Batch, index: int) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Random subsets of features ``[S, n]``, and what the logit of the predicted class loses without each."""
    options, top = batch.study.options, batch.predicted[index]
    removed = random_subsets(batch.count(index), options["subsets"], share=options["share"], seed=batch.study.seed)
    return removed, batch.logits[index, top] - batch.without(index, removed)[:, top]


def prepare(study: Study) -> None:
    study.limit()
    if set(metrics.ORDERS) & set(study.options["checks"]):
        metrics.stages(study.model)


def _along(v: Values, order: str, names: Sequence[str], kind: str) -> list[float]:
    """The figure at each stage, NaN where there is none."""
    found = ((v[order].get(name) or {}).get(kind) for name in names)
    return [float("nan") if figure is None else figure for figure in found]


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

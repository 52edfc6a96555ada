"""Benchmark ``sanity``: parameter randomisation, class and input sensitivity, infidelity."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from whyformer.benchmarks.configurations import Configuration, generator_for
from whyformer.benchmarks.encoding import fill_id
from whyformer.benchmarks.explaining import Unusable
from whyformer.benchmarks.pictures import geometry, limit, maps, patch_size, pool, read_batch
from whyformer.benchmarks.report import Cell, Curves, Report, Table
from whyformer.benchmarks.sentences import read_texts, token_scores
from whyformer.benchmarks.study import Benchmark, Measured, Study, Values, counts_of, values_of
from whyformer.errors import InputError
from whyformer.evaluate.metrics.relevance import infidelity, random_subsets
from whyformer.evaluate.metrics.sanity import (
    ORDERS,
    class_sensitivity,
    max_sensitivity,
    randomized_models,
    spearman,
    ssim,
    stages,
)
from whyformer.evaluate.statistics import bootstrap
from whyformer.inputs.removal import picture_filler
from whyformer.jobs.records import Record

CHECKS = ("cascading", "independent", "class", "sensitivity", "infidelity")


def _scores(study: Study, batch: Any, configuration: Configuration, targets: Sequence[int]) -> list[Any]:
    """Maps ``[H, W]`` of pictures, ``[N]`` scores of text (special tokens left out)."""
    if study.modality == "image":
        return maps(study, batch, configuration, targets)
    found = token_scores(study, batch, configuration, targets)
    return [
        f if isinstance(f, Unusable) else f[~np.asarray(e.special)] for f, e in zip(found, batch.encoded, strict=True)
    ]


def measure(study: Study, samples: Sequence[Any], configurations: Sequence[Configuration]) -> Iterator[Measured]:
    image = study.modality == "image"
    batch: Any = read_batch(study, samples) if image else read_texts(study, samples)
    top, least = batch.predicted, [int(i) for i in batch.logits.argmin(-1)]
    own = {c.label: _scores(study, batch, c, top) for c in configurations}
    values: dict[tuple[str, int], Values] = {(c.label, i): {} for c in configurations for i in range(len(samples))}
    for order in (o for o in ORDERS if o in study.options["checks"]):
        for stage, changed in randomized_models(study.model, order, seed=study.seed):
            other = _with_model(study, changed)
            for c in configurations:
                again = own[c.label] if c.kind == "ground_truth" else _scores(other, batch, c, top)
                if c.kind == "random":
                    again = [_redrawn(study, s.id, stage, o) for s, o in zip(samples, own[c.label], strict=True)]
                for i, (a, b) in enumerate(zip(own[c.label], again, strict=True)):
                    values[c.label, i].setdefault(order, {})[stage] = _similarity(a, b)
    for c in configurations:
        extra = {"class": _by_class, "sensitivity": _by_input, "infidelity": _by_removal}
        for name, check in extra.items():
            if name in study.options["checks"]:
                for i, figure in enumerate(check(study, batch, c, own[c.label], least)):
                    values[c.label, i][name] = figure
        for i, sample in enumerate(samples):
            yield sample.id, c, own[c.label][i] if isinstance(own[c.label][i], Unusable) else values[c.label, i]


def _with_model(study: Study, model: Any) -> Study:
    return Study(
        model,
        study.processor,
        study.modality,
        study.samples,
        study.configurations,
        study.options,
        study.forwards,
        seed=study.seed,
    )


def _redrawn(study: Study, sample: str, stage: str, like: Any) -> Any:
    """The floor does not look at the model, so that it is drawn anew for each: what unrelated maps have in common."""
    if isinstance(like, Unusable):
        return like
    return generator_for(f"{sample}/{stage}", study.seed).permutation(like.reshape(-1)).reshape(like.shape)


def _similarity(one: Any, other: Any) -> Values | None:
    if isinstance(one, Unusable) or isinstance(other, Unusable):
        return None
    made = {"spearman": spearman(one, other), "absolute": spearman(one, other, absolute=True)}
    return {**made, "ssim": ssim(one, other)} if one.ndim == 2 else made


def _by_class(
    study: Study, batch: Any, c: Configuration, own: Sequence[Any], least: Sequence[int]
) -> list[float | None]:
    if c.kind != "method":
        return [None] * len(own)
    other = _scores(study, batch, c, least)
    return [
        None if isinstance(a, Unusable) or isinstance(b, Unusable) else class_sensitivity(a, b)
        for a, b in zip(own, other, strict=True)
    ]


def _by_input(
    study: Study, batch: Any, c: Configuration, own: Sequence[Any], least: Sequence[int]
) -> list[float | None]:
    """δ ∈ U[−r, r] on the normalised pixels; token ids cannot be disturbed a little, so text has no figure."""
    if c.kind != "method" or study.modality != "image":
        return [None] * len(own)
    changed: list[list[Any]] = [[] for _ in own]
    for draw in range(study.options["draws"]):
        noise = torch.stack(
            [
                torch.from_numpy(
                    generator_for(f"{s.id}/{draw}", study.seed).uniform(-1, 1, tuple(batch.pixels.shape[1:]))
                )
                for s in batch.samples
            ]
        )
        pixels = batch.pixels + study.options["radius"] * noise.to(batch.pixels)
        for i, one in enumerate(maps(study, replace(batch, pixels=pixels), c, batch.predicted)):
            changed[i].append(one)
    return [
        None if isinstance(a, Unusable) or any(isinstance(b, Unusable) for b in bs) else max_sensitivity(a, bs)
        for a, bs in zip(own, changed, strict=True)
    ]


def _by_removal(
    study: Study, batch: Any, c: Configuration, own: Sequence[Any], least: Sequence[int]
) -> list[float | None]:
    made: list[float | None] = []
    for i, scores in enumerate(own):
        if isinstance(scores, Unusable):
            made.append(None)
            continue
        features = pool(scores, *patch_size(study)).reshape(-1) if study.modality == "image" else scores
        removed = random_subsets(features.size, study.options["subsets"], share=study.options["share"], seed=study.seed)
        logits = _without(study, batch, i, removed)
        drops = batch.logits[i, batch.predicted[i]] - logits[:, batch.predicted[i]]
        made.append(infidelity(features, removed, drops))
    return made


def _without(study: Study, batch: Any, index: int, removed: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Logits ``[S, C]`` with each subset of patches black, or of tokens [UNK]; the same for every method, so kept."""
    kept = study.__dict__.setdefault("_removed", {})
    key = (batch.samples[index].id, removed.tobytes())
    if key not in kept:
        if len(kept) > 64:
            kept.clear()
        kept[key] = removed_logits(study, batch, index, removed)
    return kept[key]


def removed_logits(study: Study, batch: Any, index: int, removed: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Logits ``[S, C]`` of one sample with some patches black, or some tokens [UNK]."""
    if study.modality == "text":
        encoded = batch.encoded[index]
        fill = fill_id(study.processor)
        content = np.flatnonzero(~np.asarray(encoded.special))
        rows = []
        for subset in removed:
            at = np.zeros(len(encoded.ids), dtype=bool)
            at[content[subset]] = True
            rows.append(encoded.replaced(at, fill))
        return study.forwards.ids(rows)
    height, width = patch_size(study)
    grid = (batch.spec.size[0] // height, batch.spec.size[1] // width)
    empty = picture_filler("black", batch.pixels[index], -batch.spec.mean / batch.spec.std)
    gone = (np.kron(s.reshape(grid), np.ones((height, width), dtype=bool)) for s in removed)
    return study.forwards.pixels(
        torch.where(torch.from_numpy(g).to(empty.device), empty, batch.pixels[index]) for g in gone
    )


def prepare(study: Study) -> None:
    limit(study)
    given = study.options["checks"]
    study.options["checks"] = tuple(given.split(",")) if isinstance(given, str) else tuple(given)
    unknown = [g for g in study.options["checks"] if g not in CHECKS]
    if unknown or not study.options["checks"]:
        raise InputError(f"checks must be some of {', '.join(CHECKS)}, not {', '.join(unknown) or 'nothing'}")
    if set(ORDERS) & set(study.options["checks"]):
        stages(study.model)


def summarize(study: Study, records: dict[str, dict[str, Record]]) -> Report:
    labels = tuple(c.label for c in study.configurations)
    values = {label: values_of(study, records, label) for label in labels}
    cells: dict[tuple[str, str], Cell] = {}
    curves = []
    measures = ("spearman", "absolute", "ssim") if study.modality == "image" else ("spearman", "absolute")
    columns = []
    for order in (o for o in ORDERS if o in study.options["checks"]):
        names = [s for s, _ in stages(study.model)]
        for kind in measures:
            columns.append(f"{order}: {kind}")
            lines = {}
            for label, vs in values.items():
                rows = np.array([[_number(v[order].get(n), kind) for n in names] for v in vs], dtype=float)
                if rows.size:
                    cells[label, columns[-1]] = Cell(bootstrap(_means(rows)))
                    lines[label] = ([float(i) for i in range(len(names))], _columns(rows))
            if kind == "spearman":
                curves.append(
                    Curves(
                        order,
                        f"{order} randomisation, Spearman",
                        f"stage: 0 head … {len(names) - 1} embeddings",
                        "similarity",
                        lines,
                    )
                )
    for name, title in (
        ("class", "class: Spearman (top, least)"),
        ("sensitivity", "max-sensitivity ↓"),
        ("infidelity", "infidelity ↓"),
    ):
        if name in study.options["checks"]:
            columns.append(title)
            for label, vs in values.items():
                found = np.array([v[name] for v in vs if v.get(name) is not None], dtype=float)
                cells[label, title] = Cell(bootstrap(found)) if found.size else Cell(None)
    table = Table(
        "sanity", "Sanity checks (means over samples and stages)", "Method", labels, tuple(columns), cells, digits=3
    )
    conventions = {
        "class explained": "the class first predicted, also on the randomised models",
        "randomisation": "each tensor redrawn from a normal of its own mean and spread; cascading: from the head "
        "down, independent: one stage alone; near 0 is good",
        "class": "Spearman of the maps of the most and the least likely class; 1 = the map does not depend on "
        "the class",
        "max-sensitivity": f"largest ‖E(x+δ) − E(x)‖/‖E(x)‖ of {study.options['draws']} δ ∈ U[−r, r], r = "
        f"{study.options['radius']} in normalised pixels; no figure for text",
        "infidelity": f"{study.options['subsets']} random subsets of {study.options['share']:.0%} of the "
        f"features, black or [UNK]; best scale; 1 = as bad as zeros",
        **(geometry(study) if study.modality == "image" else {}),
    }
    return Report("sanity", (table,), tuple(curves), conventions, counts_of(study, records), tuple(study.remarks))


def _number(found: Values | None, kind: str) -> float:
    return float("nan") if not found or found.get(kind) is None else float(found[kind])


def _means(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean over the stages of each sample, without samples that have none."""
    good = np.isfinite(rows)
    kept = good.any(1)
    return np.where(good, rows, 0).sum(1)[kept] / good.sum(1)[kept]


def _columns(rows: NDArray[np.float64]) -> list[float]:
    return [float(np.mean(c[np.isfinite(c)])) if np.isfinite(c).any() else float("nan") for c in rows.T]


BENCHMARK = Benchmark(
    "sanity",
    "parameter randomisation (Spearman, SSIM), class sensitivity, max-sensitivity, infidelity",
    "both",
    "transformer_attribution,gae,rollout,raw_attention,gradcam_attention,input_x_gradient",
    {},
    {
        "checks": CHECKS,
        "draws": 3,
        "radius": 0.1,
        "subsets": 50,
        "share": 0.2,
        "resample": None,
        "longest": 256,
        "count": None,
        "files": None,
    },
    prepare,
    measure,
    summarize,
    lambda study: float(study.options["subsets"]),
)

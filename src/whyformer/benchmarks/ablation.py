"""Benchmark ``ablation``: variants of Transformer Attribution (Chefer et al. 2021, Table 3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from whyformer.benchmarks import perturbation, segmentation
from whyformer.benchmarks.batches import PictureBatch
from whyformer.benchmarks.configurations import Configuration, settings_of
from whyformer.benchmarks.published import PUBLISHED, conventions
from whyformer.benchmarks.report import Report, Results, method_table
from whyformer.benchmarks.study import Benchmark, Exclusion, Measured, Study
from whyformer.errors import InputError

MASKED = {title: segmentation.FIGURES[title] for title in ("Pixel accuracy ↑", "mAP ↑", "mIoU ↑")}
PERTURBED = {
    "Positive ↓": partial(perturbation.auc, row="positive/predicted"),
    "Negative ↑": partial(perturbation.auc, row="negative/predicted"),
}


def prepare(study: Study) -> None:
    if study.options["masks"]:
        from whyformer.datasets.readers import open_pictures

        reader, more = open_pictures(study.options["masks"])
        study.limit()
        study.samples = [*study.samples, *more]
        study.reader = f"{study.reader} and {reader}"
        study.options = {**study.options, "count": None, "files": None}
    perturbation.prepare(study)
    if not any(s.mask is not None for s in study.samples):
        study.remarks.append("No picture has a mask, so columns of segmentation are empty; use --option masks=FOLDER.")
    if study.options["explained"] != ("predicted",):
        raise InputError("ablation explains the predicted class, as Table 3: use --option explained=predicted")


def measure(batch: PictureBatch, configurations: Sequence[Configuration]) -> Iterator[Measured]:
    """Measure segmentation of pictures with a mask, and perturbation of all pictures, or without those of ``masks``."""
    masked = [i for i, s in enumerate(batch.samples) if s.mask is not None]
    plain = [i for i in range(len(batch.samples)) if i not in masked or not batch.study.options["masks"]]
    figures = {(sample, c): values for sample, c, values in perturbation.measure(batch.some(plain), configurations)}
    for sample, c, values in segmentation.measure(batch.some(masked), configurations):
        perturbed = figures.get((sample, c), {})
        if isinstance(values, Exclusion):
            figures[sample, c] = values
        elif not isinstance(perturbed, Exclusion):
            figures[sample, c] = {**perturbed, "segmentation": values}
    for (sample, c), values in figures.items():
        yield sample, c, values


def of_curves(results: Results) -> Results:
    """Return the measurements of perturbation, for samples that have them."""
    return {label: {s: v for s, v in values.items() if "clean" in v} for label, values in results.items()}


def of_masks(results: Results) -> Results:
    """Return the measurements of segmentation, for samples that have them."""
    return {
        label: {s: v["segmentation"] for s, v in values.items() if "segmentation" in v}
        for label, values in results.items()
    }


def summarize(study: Study, results: Results) -> Report:
    perturbed, masked = of_curves(results), of_masks(results)
    title = "Variants of Transformer Attribution (CVPR 2021, Table 3)"
    columns = partial(
        method_table, "ablation", title, "Variant", study.configurations, published=PUBLISHED["ablation"], down=True
    )
    masks, curves = columns(masked, MASKED), columns(perturbed, PERTURBED)
    table = replace(masks, columns=masks.columns + curves.columns, cells=masks.cells | curves.cells)
    inner = perturbation.summarize(study, perturbed)
    return Report((table,), inner.curves, {**inner.conventions, **conventions("ablation")})


METHODS = PUBLISHED["ablation"]["methods"]
BENCHMARK = Benchmark(
    "ablation", "three variants of Transformer Attribution (CVPR 2021, Table 3)", "image",
    METHODS, settings_of(METHODS), {**perturbation.OPTIONS, "explained": ("predicted",), "masks": None},
    prepare, measure, summarize, perturbation.has_masks, choices=perturbation.CHOICES,
)  # fmt: skip

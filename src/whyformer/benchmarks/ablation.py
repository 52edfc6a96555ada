"""Benchmark ``ablation``: Table 3 of Chefer et al. 2021, the variants of the method under perturbation and
segmentation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from whyformer.benchmarks import perturbation, published, segmentation
from whyformer.benchmarks.configurations import Configuration
from whyformer.benchmarks.pictures import Pictures
from whyformer.benchmarks.report import Report, Results, Values, method_table
from whyformer.benchmarks.study import Benchmark, Measured, Study, Unusable
from whyformer.errors import InputError

COLUMNS = {
    "pixel_accuracy": "Pixel accuracy ↑",
    "map": "mAP ↑",
    "miou": "mIoU ↑",
    "positive/predicted": "Positive ↓",
    "negative/predicted": "Negative ↑",
}


def prepare(study: Study) -> None:
    if study.options["masks"]:
        from whyformer.datasets.opening import open_pictures

        reader, more = open_pictures(study.options["masks"])
        study.limit()
        study.samples = [*study.samples, *more]
        study.reader = f"{study.reader} and {reader}"
        study.options = {**study.options, "count": None, "files": None}
    perturbation.prepare(study)
    if not any(s.mask is not None for s in study.pictures):
        study.remarks.append(
            "No picture has a mask, so the segmentation columns are empty; give --option masks=FOLDER."
        )
    if study.options["explained"] != ("predicted",):
        raise InputError("Table 3 explains the predicted class")


def measure(batch: Pictures, configurations: Sequence[Configuration]) -> Iterator[Measured]:
    """Perturbation of all pictures, or of those of the data alone where others bring the masks."""
    masked = [i for i, s in enumerate(batch.samples) if s.mask is not None]
    plain = [i for i in range(len(batch.samples)) if i not in masked or not batch.study.options["masks"]]
    found: dict[tuple[str, str], Values | Unusable] = {}
    for sample, configuration, values in perturbation.measure(batch.some(plain), configurations) if plain else ():
        found[sample, configuration.label] = values
    for sample, configuration, values in segmentation.measure(batch.some(masked), configurations) if masked else ():
        before = found.get((sample, configuration.label), {})
        if isinstance(values, Unusable) or isinstance(before, Unusable):
            found[sample, configuration.label] = values if isinstance(values, Unusable) else before
        else:
            found[sample, configuration.label] = {**before, "segmentation": values}
    for configuration in configurations:
        for s in batch.samples:
            yield s.id, configuration, found[s.id, configuration.label]


def summarize(study: Study, results: Results) -> Report:
    perturbed = {label: {s: v for s, v in values.items() if "clean" in v} for label, values in results.items()}
    masked = {
        label: {s: v["segmentation"] for s, v in values.items() if "segmentation" in v}
        for label, values in results.items()
    }
    title = "Variants of Transformer Attribution (CVPR 2021, Table 3)"
    paper = {title: published.TABLE_3[name] for name, title in COLUMNS.items()}
    columns = partial(method_table, "ablation", title, "Variant", study.configurations, published=paper, down=True)
    left = columns(masked, {COLUMNS[n]: figure for n, figure in segmentation.FIGURES.items() if n in COLUMNS})
    right = columns(perturbed, {COLUMNS[n]: partial(perturbation.auc, row=n) for n in COLUMNS if "/" in n})
    table = replace(left, columns=left.columns + right.columns, cells=left.cells | right.cells)
    inner = perturbation.summarize(study, perturbed)
    stated = {
        **inner.conventions,
        "without gradient": "as the reference code has it, R alone; the paper's text says A ⊙ R "
        "(weighting='attention')",
        "first block": "the paper's ∇A^(B−1)R, taken from block 1 counted from 0, as in the reference code",
        "foreground": "scores above the map's mean; figures pooled over the data set",
    }
    return Report((table,), inner.curves, stated)


BENCHMARK = Benchmark(
    "ablation", "three variants of Transformer Attribution (CVPR 2021, Table 3)", "image",
    published.ABLATION_METHODS, published.ABLATION_SETTINGS,
    {**perturbation.OPTIONS, "explained": ("predicted",), "masks": None},
    prepare, measure, summarize, perturbation.has_masks,
)  # fmt: skip

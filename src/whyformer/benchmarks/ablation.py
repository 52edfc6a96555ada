"""Benchmark ``ablation``: Table 3 of Chefer et al. 2021, the variants of the method under perturbation and
segmentation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from whyformer.benchmarks import curves, perturbation, published, segmentation
from whyformer.benchmarks.configurations import Configuration
from whyformer.benchmarks.explaining import Unusable
from whyformer.benchmarks.pictures import check_labels, limit, read_batch
from whyformer.benchmarks.report import Cell, Report, Table
from whyformer.benchmarks.study import Benchmark, Measured, Study, Values, counts_of, values_of
from whyformer.errors import InputError
from whyformer.jobs.records import Record

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
        limit(study)
        study.samples = [*study.samples, *more]
        study.reader = f"{study.reader} and {reader}"
        study.options = {**study.options, "count": None, "files": None}
    perturbation.prepare(study)
    if not any(s.mask is not None for s in study.pictures):
        study.remark("No picture has a mask, so the segmentation columns are empty; give --option masks=FOLDER.")
    check_labels(study)
    if study.options["explained"] != ("predicted",):
        raise InputError("Table 3 explains the predicted class")


def measure(study: Study, samples: Sequence[Any], configurations: Sequence[Configuration]) -> Iterator[Measured]:
    masked = [s for s in samples if s.mask is not None]
    plain = [s for s in samples if s.mask is None] if study.options["masks"] else list(samples)
    found: dict[tuple[str, str], Values | Unusable] = {}
    order: list[tuple[str, Configuration]] = [(s.id, c) for c in configurations for s in samples]
    if plain:
        for sample, configuration, values in perturbation.measure(study, plain, configurations):
            found[sample, configuration.label] = values
    if masked:
        batch = read_batch(study, masked)
        for configuration in configurations:
            for sample, _, values in segmentation.measure_batch(study, batch, configuration):
                before = found.get((sample, configuration.label), {})
                if isinstance(values, Unusable) or isinstance(before, Unusable):
                    found[sample, configuration.label] = values if isinstance(values, Unusable) else before
                else:
                    found[sample, configuration.label] = {**before, "segmentation": values}
    for sample, configuration in order:
        yield sample, configuration, found[sample, configuration.label]


def summarize(study: Study, records: dict[str, dict[str, Record]]) -> Report:
    cells = {}
    for c in study.configurations:
        values = values_of(study, records, c.label)
        pooled = segmentation.figures([v["segmentation"] for v in values if "segmentation" in v])
        perturbed = [v for v in values if "clean" in v]
        for column, title in COLUMNS.items():
            direction, _, explained = column.partition("/")
            found = (
                curves.auc_interval(perturbed, explained, direction) if explained and perturbed else pooled.get(column)
            )
            cells[c.label, title] = Cell(found, published.TABLE_3.get(c.published or "", {}).get(column))
    table = Table(
        "ablation",
        "Variants of Transformer Attribution (CVPR 2021, Table 3)",
        "Variant",
        tuple(c.label for c in study.configurations),
        tuple(COLUMNS.values()),
        cells,
    )
    inner = curves.summarize(
        study, {k: {s: r for s, r in v.items() if "clean" in r.get("values", {})} for k, v in records.items()}
    )
    conventions = {
        **inner.conventions,
        "without gradient": "as the reference code has it, R alone; the paper's text says A ⊙ R "
        "(weighting='attention')",
        "first block": "the paper's ∇A^(B−1)R, taken from block 1 counted from 0, as in the reference code",
        "foreground": "scores above the map's mean; figures pooled over the data set",
    }
    return Report("ablation", (table,), inner.curves, conventions, counts_of(study, records), tuple(study.remarks))


OPTIONS: dict[str, Any] = {**perturbation.OPTIONS, "explained": ("predicted",), "masks": None}

BENCHMARK = Benchmark(
    "ablation",
    "three variants of Transformer Attribution (CVPR 2021, Table 3)",
    "image",
    published.ABLATION_METHODS,
    published.ABLATION_SETTINGS,
    OPTIONS,
    prepare,
    measure,
    summarize,
    perturbation.forwards_per_sample,
    perturbation.has_masks,
)

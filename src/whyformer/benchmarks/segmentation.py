"""Benchmark ``segmentation``: Table 2 of Chefer et al. 2021, with the pointing game and the energy in the mask."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whyformer.benchmarks import published
from whyformer.benchmarks.configurations import Configuration
from whyformer.benchmarks.explaining import Unusable
from whyformer.benchmarks.pictures import Batch, check_labels, geometry, limit, maps, read_batch
from whyformer.benchmarks.report import Cell, Report, Table
from whyformer.benchmarks.study import (
    Benchmark,
    Measured,
    Study,
    Values,
    check_constant,
    constant_remarks,
    counts_of,
    values_of,
)
from whyformer.errors import InputError
from whyformer.evaluate.metrics.localisation import average_precision, counts, mean_iou, pixel_accuracy
from whyformer.evaluate.statistics import Interval, bootstrap
from whyformer.jobs.records import Record


def explained_class(study: Study) -> str:
    """The option, or where it is left open: the target on digit scenes (several objects a picture), else the
    predicted class."""
    return study.options["explained"] or ("target" if study.reader == "scenes" else "predicted")


def measure(study: Study, samples: Sequence[Any], configurations: Sequence[Configuration]) -> Iterator[Measured]:
    batch = read_batch(study, samples)
    for configuration in configurations:
        yield from measure_batch(study, batch, configuration)


def measure_batch(study: Study, batch: Batch, configuration: Configuration) -> Iterator[Measured]:
    targets = batch.predicted if explained_class(study) == "predicted" else [s.label or 0 for s in batch.samples]
    for i, (sample, found) in enumerate(zip(batch.samples, maps(study, batch, configuration, targets), strict=True)):
        mask = batch.mask(i)
        if mask is None or not mask.any():
            yield sample.id, configuration, Unusable("failed", "the mask is empty")
        elif isinstance(found, Unusable) and found.kind == "constant":
            made = {**background(mask), "constant": 1}
            yield sample.id, configuration, {**made, "correct_class": int(batch.predicted[i] == sample.label)}
        elif isinstance(found, Unusable):
            yield sample.id, configuration, found
        else:
            made = counts(found, mask).to_dict()
            yield sample.id, configuration, {**made, "correct_class": int(batch.predicted[i] == sample.label)}


def background(mask: NDArray[np.bool_]) -> Values:
    """What the reference code makes of a constant map: scores of 0, background everywhere ."""
    inside, size = int(mask.sum()), int(mask.size)
    outside = size - inside
    return {
        "correct": outside,
        "labelled": size,
        "intersection": (outside, 0),
        "union": (size, inside),
        "average_precision": average_precision(np.repeat([1.0, 0.0], size), np.concatenate([~mask, mask], axis=None)),
        "hit": 0,
        "energy": 0.0,
        "foreground": inside / size,
    }


def prepare(study: Study) -> None:
    limit(study)
    missing = [s.id for s in study.pictures if s.mask is None]
    if missing:
        raise InputError(
            f"{len(missing)} of {len(study.samples)} pictures have no mask, {missing[0]} among them: "
            f"segmentation needs one each"
        )
    if study.options["explained"] not in (None, "predicted", "target"):
        raise InputError(f"explained must be predicted or target, not {study.options['explained']!r}")
    check_constant(study)
    if explained_class(study) == "target":
        check_labels(study)
    empty = [s.id for s in study.pictures if s.mask is not None and not s.mask().any()]
    if empty:
        study.samples = [s for s in study.samples if s.id not in set(empty)]
        study.remark(f"{len(empty)} pictures with an empty mask were left out: {', '.join(empty[:5])}")
        if not study.samples:
            raise InputError("every mask is empty")


def figures(values: Sequence[Values]) -> dict[str, Interval]:
    """Pooled figures with intervals over pictures."""
    if not values:
        return {}
    rows = np.array(
        [
            [
                v["correct"],
                v["labelled"],
                *v["intersection"],
                *v["union"],
                v["average_precision"],
                v["hit"],
                v["energy"],
            ]
            for v in values
        ],
        dtype=np.float64,
    )
    return {
        "pixel_accuracy": bootstrap(rows, lambda m: pixel_accuracy(m[..., 0], m[..., 1])),
        "map": bootstrap(rows, lambda m: 100 * m[..., 6]),
        "miou": bootstrap(rows, lambda m: mean_iou(m[..., 2:4], m[..., 4:6])),
        "pointing": bootstrap(rows, lambda m: 100 * m[..., 7]),
        "energy": bootstrap(rows, lambda m: 100 * m[..., 8]),
    }


MORE_ROWS = {"pointing": "Pointing game ↑", "energy": "Energy in mask ↑"}


def summarize(study: Study, records: dict[str, dict[str, Record]]) -> Report:
    names = published.TABLE_2_ROWS | MORE_ROWS
    labels = tuple(c.label for c in study.configurations)
    cells = {}
    for c in study.configurations:
        found = figures(values_of(study, records, c.label))
        for row, title in names.items():
            figure = (
                published.TABLE_2.get(row, {}).get(c.published or "") if explained_class(study) == "predicted" else None
            )
            cells[title, c.label] = Cell(found.get(row), figure)
    any_values = values_of(study, records, labels[0])
    share = float(np.mean([v["foreground"] for v in any_values])) if any_values else float("nan")
    right = float(np.mean([v["correct_class"] for v in any_values])) if any_values else float("nan")
    table = Table(
        "segmentation",
        "Agreement with the object's mask, in % (CVPR 2021, Table 2)",
        "Figure",
        tuple(names.values()),
        labels,
        cells,
    )
    conventions = {
        "class explained": explained_class(study),
        "foreground": "scores above the map's mean, after min–max scaling over the picture",
        "pixel accuracy, mIoU": "numerators and denominators summed over the data set first; mIoU over "
        "{background, foreground}",
        "mAP": "per picture, average precision of (1 − s, s) against (background, foreground), then the mean "
        "over pictures",
        "pointing game": "the highest score lies in the mask, no tolerance; energy: share of the positive scores "
        "in the mask",
        "masks": f"nearest neighbour; the object covers {100 * share:.1f} % of a picture on average",
        "predicted class is the object's": f"{100 * right:.1f} %"
        if any(s.label is not None for s in study.samples)
        else "unknown: the data have no classes of the model",
        **geometry(study),
    }
    remarks = [*study.remarks, *constant_remarks(study, records, "background everywhere, as in the reference code")]
    if len(any_values) < 100:
        remarks.append(
            f"{len(any_values)} pictures: the intervals are wide, and small differences between methods mean nothing."
        )
    return Report("segmentation", (table,), (), conventions, counts_of(study, records), tuple(remarks))


BENCHMARK = Benchmark(
    "segmentation",
    "pixel accuracy, mAP, mIoU, pointing game, energy in mask (CVPR 2021, Table 2)",
    "image",
    published.CVPR_METHODS,
    published.CVPR_SETTINGS,
    {"explained": None, "constant": "leave_out", "resample": None, "count": None, "files": None},
    prepare,
    measure,
    summarize,
    lambda study: 1 / max(1, len(study.configurations)),
    lambda study: True,
)

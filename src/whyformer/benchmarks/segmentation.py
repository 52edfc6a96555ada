"""Benchmark ``segmentation``: agreement with masks (Chefer et al. 2021, Table 2), pointing game and energy in mask."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from whyformer.benchmarks.batches import PictureBatch
from whyformer.benchmarks.configurations import Configuration, settings_of
from whyformer.benchmarks.published import PUBLISHED, conventions
from whyformer.benchmarks.report import Figure, Report, Results, mean, method_table, percent, scored
from whyformer.benchmarks.study import CONSTANT, Benchmark, Exclusion, Measured, Study, constant_remarks
from whyformer.errors import InputError
from whyformer.evaluation.metrics import localisation
from whyformer.evaluation.metrics.localisation import SegmentationCounts, counts, mean_iou, pixel_accuracy
from whyformer.evaluation.statistics import bootstrap


def explained_class(study: Study) -> str:
    """Return the option; by default "target" for digit scenes, which have several objects, else "predicted"."""
    return study.options["explained"] or ("target" if study.reader == "scenes" else "predicted")


def measure(batch: PictureBatch, configurations: Sequence[Configuration]) -> Iterator[Measured]:
    predicted = explained_class(batch.study) == "predicted"
    targets = batch.predicted if predicted else [s.label or 0 for s in batch.samples]
    masks = [batch.mask(i) for i in range(len(batch.samples))]
    for (c, i), map_ in batch.maps(configurations, targets).items():
        sample, mask = batch.samples[i], masks[i]
        right = {"correct_class": int(batch.predicted[i] == sample.label)}
        if mask is None or not mask.any():
            yield sample.id, c, Exclusion("failed", "the mask is empty")
        elif not isinstance(map_, Exclusion):
            yield sample.id, c, {**asdict(counts(map_, mask)), **right}
        elif map_.kind == "constant":
            yield sample.id, c, {**asdict(background(mask)), "constant": 1, **right}
        else:
            yield sample.id, c, map_


def background(mask: NDArray[np.bool_]) -> SegmentationCounts:
    """Return the counts of a constant map in the reference code: scores of 0, background everywhere."""
    inside, size = int(mask.sum()), int(mask.size)
    outside = size - inside
    both = np.concatenate([~mask, mask], axis=None)
    precision = localisation.average_precision(np.repeat([1.0, 0.0], size), both)
    return SegmentationCounts(outside, size, (outside, 0), (size, inside), precision, 0, 0.0, inside / size)


def prepare(study: Study) -> None:
    study.limit()
    missing = [s.id for s in study.samples if s.mask is None]
    if missing:
        raise InputError(
            f"{len(missing)} of {len(study.samples)} pictures have no mask, such as {missing[0]}: segmentation needs a "
            "mask for each picture"
        )
    if explained_class(study) == "target":
        study.check_labels()
    study.leave_out({s.id for s in study.samples if not s.mask().any()}, "pictures with an empty mask")


FIGURES: dict[str, Figure] = {
    "Pixel accuracy ↑": lambda values: bootstrap(
        [(v["correct"], v["labelled"]) for v in values], lambda m: pixel_accuracy(m[..., 0], m[..., 1])
    ),
    "mAP ↑": mean(lambda v: 100 * v["average_precision"]),
    "mIoU ↑": lambda values: bootstrap(
        [(*v["intersection"], *v["union"]) for v in values], lambda m: mean_iou(m[..., :2], m[..., 2:])
    ),
    "Pointing game ↑": mean(lambda v: 100 * v["hit"]),
    "Energy in mask ↑": mean(lambda v: 100 * v["energy"]),
}
"""Figures pooled over pictures, with intervals over pictures."""


def summarize(study: Study, results: Results) -> Report:
    explained, samples = explained_class(study), scored(results)
    table = method_table(
        "segmentation", "Agreement with the object's mask, in % (CVPR 2021, Table 2)", "Figure", study.configurations,
        results, FIGURES, published=PUBLISHED["segmentation"] if explained == "predicted" else {},
    )  # fmt: skip
    share = float(np.mean([v["foreground"] for v in samples])) if samples else float("nan")
    labelled = any(s.label is not None for s in study.samples)
    accuracy = percent(results, lambda v: v["correct_class"])
    texts = conventions(
        "segmentation", explained=explained, share=100 * share,
        accuracy=accuracy if labelled else "unknown: the data have no labels of the model",
    )  # fmt: skip
    remarks = constant_remarks(results, "background everywhere, as in the reference code")
    if len(samples) < 100:
        note = f"With {len(samples)} pictures, intervals are wide and small differences are not meaningful."
        remarks = (*remarks, note)
    return Report((table,), (), texts, remarks)


METHODS = PUBLISHED["perturbation"]["methods"]
BENCHMARK = Benchmark(
    "segmentation", "pixel accuracy, mAP, mIoU, pointing game, energy in mask (CVPR 2021, Table 2)", "image",
    METHODS, settings_of(METHODS),
    {"explained": None, "constant": "leave_out", "resample": None, "count": None, "files": None},
    prepare, measure, summarize, lambda study: True,
    choices={"explained": (None, "predicted", "target"), "constant": CONSTANT},
)  # fmt: skip

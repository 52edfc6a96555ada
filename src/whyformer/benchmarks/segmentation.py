"""Benchmark ``segmentation``: Table 2 of Chefer et al. 2021, with the pointing game and the energy in the mask."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from whyformer.benchmarks.batches import PictureBatch
from whyformer.benchmarks.configurations import Configuration, settings_of
from whyformer.benchmarks.published import PUBLISHED, conventions
from whyformer.benchmarks.report import Figure, Report, Results, mean, method_table, percent, scored
from whyformer.benchmarks.study import CONSTANT, Benchmark, Measured, Study, Unusable, constant_remarks
from whyformer.errors import InputError
from whyformer.evaluation.metrics import localisation
from whyformer.evaluation.metrics.localisation import SegmentationCounts, counts, mean_iou, pixel_accuracy
from whyformer.evaluation.statistics import bootstrap


def explained_class(study: Study) -> str:
    """The option, or by default the target on digit scenes (several objects a picture), else the predicted class."""
    return study.options["explained"] or ("target" if study.reader == "scenes" else "predicted")


def measure(batch: PictureBatch, configurations: Sequence[Configuration]) -> Iterator[Measured]:
    predicted = explained_class(batch.study) == "predicted"
    targets = batch.predicted if predicted else [s.label or 0 for s in batch.samples]
    masks = [batch.mask(i) for i in range(len(batch.samples))]
    for (c, i), found in batch.maps(configurations, targets).items():
        sample, mask = batch.samples[i], masks[i]
        right = {"correct_class": int(batch.predicted[i] == sample.label)}
        if mask is None or not mask.any():
            yield sample.id, c, Unusable("failed", "the mask is empty")
        elif not isinstance(found, Unusable):
            yield sample.id, c, {**asdict(counts(found, mask)), **right}
        elif found.kind == "constant":
            yield sample.id, c, {**asdict(background(mask)), "constant": 1, **right}
        else:
            yield sample.id, c, found


def background(mask: NDArray[np.bool_]) -> SegmentationCounts:
    """What the reference code makes of a constant map: scores of 0, background everywhere."""
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
            f"{len(missing)} of {len(study.samples)} pictures have no mask, {missing[0]} among them: "
            f"segmentation needs one each"
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
"""Pooled over the pictures, with intervals over these."""


def summarize(study: Study, results: Results) -> Report:
    explained, some = explained_class(study), scored(results)
    table = method_table(
        "segmentation", "Agreement with the object's mask, in % (CVPR 2021, Table 2)", "Figure", study.configurations,
        results, FIGURES, published=PUBLISHED["segmentation"] if explained == "predicted" else {},
    )  # fmt: skip
    share = float(np.mean([v["foreground"] for v in some])) if some else float("nan")
    labelled = any(s.label is not None for s in study.samples)
    accuracy = percent(results, lambda v: v["correct_class"])
    stated = conventions(
        "segmentation", explained=explained, share=100 * share,
        accuracy=accuracy if labelled else "unknown: the data have no classes of the model",
    )  # fmt: skip
    remarks = constant_remarks(results, "background everywhere, as in the reference code")
    if len(some) < 100:
        few = f"{len(some)} pictures: the intervals are wide, and small differences between methods mean nothing."
        remarks = (*remarks, few)
    return Report((table,), (), stated, remarks)


METHODS = PUBLISHED["perturbation"]["methods"]
BENCHMARK = Benchmark(
    "segmentation", "pixel accuracy, mAP, mIoU, pointing game, energy in mask (CVPR 2021, Table 2)", "image",
    METHODS, settings_of(METHODS),
    {"explained": None, "constant": "leave_out", "resample": None, "count": None, "files": None},
    prepare, measure, summarize, lambda study: True,
    choices={"explained": (None, "predicted", "target"), "constant": CONSTANT},
)  # fmt: skip

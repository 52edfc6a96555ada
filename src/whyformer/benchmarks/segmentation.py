"""Benchmark ``segmentation``: Table 2 of Chefer et al. 2021, with the pointing game and the energy in the mask."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from whyformer.benchmarks import published
from whyformer.benchmarks.configurations import Configuration
from whyformer.benchmarks.pictures import Pictures, conventions
from whyformer.benchmarks.report import Figure, Report, Results, Values, mean, method_table, percent
from whyformer.benchmarks.study import CONSTANT, Benchmark, Measured, Study, Unusable, constant_remarks
from whyformer.errors import InputError
from whyformer.evaluate.metrics.localisation import average_precision, counts, mean_iou, pixel_accuracy
from whyformer.evaluate.statistics import bootstrap


def explained_class(study: Study) -> str:
    """The option, or where it is left open: the target on digit scenes (several objects a picture), else the
    predicted class."""
    return study.options["explained"] or ("target" if study.reader == "scenes" else "predicted")


def measure(batch: Pictures, configurations: Sequence[Configuration]) -> Iterator[Measured]:
    predicted = explained_class(batch.study) == "predicted"
    targets = batch.predicted if predicted else [s.label or 0 for s in batch.samples]
    for configuration in configurations:
        for i, found in enumerate(batch.scores(configuration, targets)):
            sample, mask = batch.samples[i], batch.mask(i)
            right = {"correct_class": int(batch.predicted[i] == sample.label)}
            if mask is None or not mask.any():
                yield sample.id, configuration, Unusable("failed", "the mask is empty")
            elif not isinstance(found, Unusable):
                yield sample.id, configuration, {**counts(found, mask).to_dict(), **right}
            elif found.kind == "constant":
                yield sample.id, configuration, {**background(mask), "constant": 1, **right}
            else:
                yield sample.id, configuration, found


def background(mask: NDArray[np.bool_]) -> Values:
    """What the reference code makes of a constant map: scores of 0, background everywhere."""
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
    study.limit()
    missing = [s.id for s in study.pictures if s.mask is None]
    if missing:
        raise InputError(
            f"{len(missing)} of {len(study.samples)} pictures have no mask, {missing[0]} among them: "
            f"segmentation needs one each"
        )
    study.check_one("explained", (None, "predicted", "target"))
    study.check_one("constant", CONSTANT)
    if explained_class(study) == "target":
        study.check_labels()
    empty = {s.id for s in study.pictures if s.mask is not None and not s.mask().any()}
    study.leave_out(empty, "pictures with an empty mask")


FIGURES: dict[str, Figure] = {
    "pixel_accuracy": lambda values: bootstrap(
        [(v["correct"], v["labelled"]) for v in values], lambda m: pixel_accuracy(m[..., 0], m[..., 1])
    ),
    "map": mean(lambda v: 100 * v["average_precision"]),
    "miou": lambda values: bootstrap(
        [(*v["intersection"], *v["union"]) for v in values], lambda m: mean_iou(m[..., :2], m[..., 2:])
    ),
    "pointing": mean(lambda v: 100 * v["hit"]),
    "energy": mean(lambda v: 100 * v["energy"]),
}
"""Pooled over the pictures, with intervals over these."""
TITLES = published.TABLE_2_ROWS | {"pointing": "Pointing game ↑", "energy": "Energy in mask ↑"}


def summarize(study: Study, results: Results) -> Report:
    explained = explained_class(study)
    paper = {TITLES[row]: figures for row, figures in published.TABLE_2.items()} if explained == "predicted" else {}
    table = method_table(
        "segmentation", "Agreement with the object's mask, in % (CVPR 2021, Table 2)", "Figure",
        study.configurations, results, {TITLES[row]: figure for row, figure in FIGURES.items()}, published=paper,
    )  # fmt: skip
    some = list(next(iter(results.values())).values())
    share = float(np.mean([v["foreground"] for v in some])) if some else float("nan")
    labelled = any(s.label is not None for s in study.samples)
    stated = {
        "class explained": explained,
        "foreground": "scores above the map's mean, after min–max scaling over the picture",
        "pixel accuracy, mIoU": "numerators and denominators summed over the data set first; mIoU over "
        "{background, foreground}",
        "mAP": "per picture, average precision of (1 − s, s) against (background, foreground), then the mean "
        "over pictures",
        "pointing game": "the highest score lies in the mask, no tolerance; energy: share of the positive scores "
        "in the mask",
        "masks": f"nearest neighbour; the object covers {100 * share:.1f} % of a picture on average",
        "predicted class is the object's": percent(some, lambda v: v["correct_class"])
        if labelled
        else "unknown: the data have no classes of the model",
        **conventions(study),
    }
    remarks = constant_remarks(results, "background everywhere, as in the reference code")
    if len(some) < 100:
        remarks.append(
            f"{len(some)} pictures: the intervals are wide, and small differences between methods mean nothing."
        )
    return Report((table,), (), stated, tuple(remarks))


BENCHMARK = Benchmark(
    "segmentation", "pixel accuracy, mAP, mIoU, pointing game, energy in mask (CVPR 2021, Table 2)", "image",
    published.CVPR_METHODS, published.CVPR_SETTINGS,
    {"explained": None, "constant": "leave_out", "resample": None, "count": None, "files": None},
    prepare, measure, summarize, lambda study: True,
)  # fmt: skip

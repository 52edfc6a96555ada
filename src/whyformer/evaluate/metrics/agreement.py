"""The metrics of one explanation against a mask or a human rationale."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from whyformer.errors import InputError
from whyformer.evaluate.case import Case
from whyformer.evaluate.metrics import localisation as segmentation
from whyformer.evaluate.metrics.localisation import counts
from whyformer.evaluate.metrics.plausibility import auprc as auprc_of
from whyformer.evaluate.metrics.plausibility import f1, token_counts, top_words
from whyformer.evaluate.registry import metric


def _masks(case: Case, mask: Any) -> NDArray[np.bool_]:
    masks = np.asarray(mask).astype(bool)
    masks = masks[None] if masks.ndim == 2 else masks
    if masks.shape != case.scores.shape:
        raise InputError(
            f"the mask has the shape {list(masks.shape)} and the maps {list(case.scores.shape)}: give it at the "
            f"model's input size"
        )
    if not masks.any((1, 2)).all():
        raise InputError("a mask is empty: there is no object in this picture")
    return masks


def _against_mask(case: Case, mask: Any) -> list[segmentation.SegmentationCounts]:
    return [counts(s, m) for s, m in zip(case.scores, _masks(case, mask), strict=True)]


@metric("pixel accuracy in %, foreground = above the mean", better="higher", modality="image", needs=("mask",))
def pixel_accuracy(case: Case, *, mask: Any) -> NDArray[np.float64]:
    return np.array([segmentation.pixel_accuracy(c.correct, c.labelled) for c in _against_mask(case, mask)])


@metric("mean IoU of background and foreground in %", better="higher", modality="image", needs=("mask",))
def miou(case: Case, *, mask: Any) -> NDArray[np.float64]:
    """Of each picture; over a data set the benchmark sums numerators and denominators first, as the paper does."""
    return np.array([segmentation.mean_iou(c.intersection, c.union) for c in _against_mask(case, mask)])


@metric(
    "average precision of (1 − s, s) in % (the paper's mAP is its mean)",
    better="higher",
    modality="image",
    needs=("mask",),
    name="map",
)
def average_precision(case: Case, *, mask: Any) -> NDArray[np.float64]:
    return np.array([100 * c.average_precision for c in _against_mask(case, mask)])


@metric("1 if the highest score lies on the object", better="higher", modality="image", needs=("mask",))
def pointing_game(case: Case, *, mask: Any) -> NDArray[np.float64]:
    return np.array([float(c.hit) for c in _against_mask(case, mask)])


@metric("share of the positive scores that lies on the object", better="higher", modality="image", needs=("mask",))
def energy(case: Case, *, mask: Any) -> NDArray[np.float64]:
    return np.array([c.energy for c in _against_mask(case, mask)])


def _flags(case: Case, rationale: Any) -> NDArray[np.bool_]:
    flags = np.asarray(rationale).astype(bool)
    flags = flags[None] if flags.ndim == 1 else flags
    if flags.shape != case.scores.shape:
        raise InputError(
            f"the rationale has the shape {list(flags.shape)} and the scores {list(case.scores.shape)}: give one "
            f"flag a token"
        )
    return flags


@metric(
    "token-F1 of the k highest tokens against a rationale", better="higher", modality="text", needs=("rationale",), k=10
)
def token_f1(case: Case, *, rationale: Any, k: int) -> NDArray[np.float64]:
    """One flag a token; the benchmark ``rationales`` works on words."""
    rows = []
    for i, flags in enumerate(_flags(case, rationale)):
        content = case.content[i] if case.content is not None else np.ones_like(flags)
        rows.append(float(f1(*token_counts(top_words(case.features(i), k), flags[content]))))
    return np.array(rows)


@metric(
    "area under the precision-recall curve against a rationale", better="higher", modality="text", needs=("rationale",)
)
def auprc(case: Case, *, rationale: Any) -> NDArray[np.float64]:
    flags = _flags(case, rationale)
    content = np.ones_like(flags) if case.content is None else case.content
    return np.array([auprc_of(case.features(i), flags[i][content[i]]) for i in range(len(case))])

"""Segmentation metrics by scikit-learn and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, average_precision_score, jaccard_score

from whyformer.evaluation.metrics.localisation import (
    average_precision,
    counts,
    energy_in_mask,
    mean_iou,
    minmax,
    pixel_accuracy,
    pointing_hit,
)


def random_maps_and_masks(count: int = 6, ties: bool = False) -> list[tuple[np.ndarray, np.ndarray]]:
    generator = np.random.default_rng(3)
    pairs = []
    for _ in range(count):
        scores = generator.normal(size=(12, 9))
        scores = np.round(scores) if ties else scores
        mask = generator.random((12, 9)) < generator.uniform(0.1, 0.6)
        pairs.append((scores, mask))
    return pairs


@pytest.mark.parametrize("ties", [False, True])
def test_pooled_metrics_equal_scikit_learn(ties: bool) -> None:
    data = random_maps_and_masks(ties=ties)
    per_image = [counts(s, m) for s, m in data]
    predicted = np.concatenate([(minmax(s) > minmax(s).mean()).ravel() for s, _ in data])
    truth = np.concatenate([m.ravel() for _, m in data])
    sums = {k: np.sum([getattr(c, k) for c in per_image], axis=0) for k in ("correct", "labelled", "intersection", "union")}
    assert pixel_accuracy(sums["correct"], sums["labelled"]) == pytest.approx(100 * accuracy_score(truth, predicted))
    # over the concatenation of all images, not a mean over images
    assert mean_iou(sums["intersection"], sums["union"]) == pytest.approx(
        100 * jaccard_score(truth, predicted, average="macro")
    )
    for (s, m), c in zip(data, per_image, strict=True):
        scaled = minmax(s).ravel()
        both = average_precision_score(np.concatenate([~m.ravel(), m.ravel()]), np.concatenate([1 - scaled, scaled]))
        assert c.average_precision == pytest.approx(both)


@pytest.mark.parametrize("ties", [False, True])
def test_average_precision_equals_scikit_learn(ties: bool) -> None:
    for scores, mask in random_maps_and_masks(ties=ties):
        assert average_precision(scores, mask) == pytest.approx(average_precision_score(mask.ravel(), scores.ravel()))


def test_counts_by_hand() -> None:
    # scores 0, 0, 1, 3 -> scaled 0, 0, 1/3, 1; mean 1/3, so only the last is foreground (not >= the mean)
    result = counts([[0, 0], [1, 3]], [[0, 0], [1, 1]])
    assert (result.correct, result.labelled) == (3, 4)
    assert result.intersection == (2, 1)
    assert result.union == (3, 2)
    assert mean_iou(result.intersection, result.union) == pytest.approx(100 * (2 / 3 + 1 / 2) / 2)
    assert result.hit == 1
    assert result.energy == 1
    # channels: background scores 1, 1, 2/3, 0 (true, true, false, false), foreground 0, 0, 1/3, 1 (false, false, true, true)
    # sorted: 1 ×3 (3 true), 2/3 (false), 1/3 (true), 0 ×3 (0 true): 3/4 · 1 + 1/4 · 4/5
    assert result.average_precision == pytest.approx(0.95)
    assert result.foreground == 0.5


def test_mask_as_scores_is_perfect() -> None:
    mask = np.zeros((8, 8), dtype=bool)
    mask[2:5, 3:6] = True
    result = counts(mask.astype(float), mask)
    assert result.correct == result.labelled == 64
    assert mean_iou(result.intersection, result.union) == 100
    assert result.average_precision == 1


def test_constant_or_nan_maps_raise() -> None:
    mask = np.eye(3, dtype=bool)
    with pytest.raises(ValueError, match="constant"):
        counts(np.ones((3, 3)), mask)
    with pytest.raises(ValueError, match="NaN"):
        counts(np.full((3, 3), np.nan), mask)
    with pytest.raises(ValueError, match="empty"):
        counts(np.arange(9.0).reshape(3, 3), np.zeros((3, 3)))
    with pytest.raises(ValueError, match="mask"):
        counts(np.arange(9.0).reshape(3, 3), np.ones((2, 2)))


def test_pointing_game_and_energy_by_hand() -> None:
    assert pointing_hit([[5, 5], [0, 0]], [[1, 0], [0, 0]]) == 1  # the first of ties
    assert pointing_hit([[0, 5], [5, 0]], [[0, 0], [1, 0]]) == 0
    assert energy_in_mask([[1, -9], [3, 4]], [[1, 1], [1, 0]]) == pytest.approx(4 / 8)
    assert energy_in_mask([[-1, -2]], [[1, 0]]) == 0


def test_mean_iou_with_small_or_empty_union() -> None:
    assert mean_iou([1, 1], [1, 2]) == pytest.approx(100 * (1 + 1 / 2) / 2)
    assert mean_iou([0, 3], [0, 3]) == pytest.approx(100 * (0 + 1) / 2)

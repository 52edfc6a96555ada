"""Perturbation metrics: exactly k features, ties by index, and values by hand and by reference loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whyformer.evaluation.metrics.faithfulness import (
    FRACTIONS,
    SHARES,
    accuracy_auc,
    aopc,
    area,
    curve_fractions,
    first_masks,
    log_odds,
    mean_curve_area,
    removal_order,
    removed_count,
)


def reference_order(scores: list[float], highest_first: bool) -> list[int]:
    """Pick the best remaining feature, the first of ties, until none remains."""
    remaining = list(range(len(scores)))
    order = []
    while remaining:
        best = remaining[0]
        for i in remaining[1:]:
            if (scores[i] > scores[best]) if highest_first else (scores[i] < scores[best]):
                best = i
        order.append(best)
        remaining.remove(best)
    return order


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=30), st.booleans(), st.sampled_from(FRACTIONS))
def test_order_and_masks_equal_a_reference_loop_with_ties(values: list[int], highest: bool, fraction: float) -> None:
    order = removal_order(np.array(values, dtype=float), highest_first=highest)
    assert order.tolist() == reference_order([float(v) for v in values], highest)
    k = removed_count(len(values), fraction)
    (mask,) = first_masks(order, [k])
    assert mask.sum() == k
    assert set(np.flatnonzero(mask)) == set(order[:k].tolist())


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_mask_has_exactly_k_pixels_despite_ties(fraction: float) -> None:
    scores = np.zeros((224, 224))
    scores[100:120, 50:90] = 1
    order = removal_order(scores)
    mask = first_masks(order, [removed_count(50176, fraction)])[0].reshape(224, 224)
    assert mask.sum() == int(50176 * fraction)
    assert mask.shape == (224, 224)
    # the object is removed first, then the background row by row
    assert mask[100:120, 50:90].all()
    assert mask[0, 0] and not mask[-1, -1]


def test_ties_are_ordered_by_index_in_both_directions() -> None:
    assert removal_order([1, 1, 2]).tolist() == [2, 0, 1]
    assert removal_order([1, 1, 2], highest_first=False).tolist() == [0, 1, 2]


def test_removed_count_is_the_exact_floor() -> None:
    assert removed_count(100, 0.29) == 29  # 28.999999999999996 in floating point
    assert removed_count(50176, 0.1) == 5017
    assert removed_count(7, 0.0) == 0
    assert removed_count(7, 1.0) == 7
    with pytest.raises(ValueError, match="between 0 and 1"):
        removed_count(7, 1.2)


def test_nan_raises() -> None:
    with pytest.raises(ValueError, match="NaN"):
        removal_order([1.0, float("nan")])


def test_accuracy_auc_by_hand() -> None:
    # correct at f = 0 and 0.1, wrong from 0.2: area 0.1, then a triangle of 0.1 · 1/2
    correct = [1, 1, 0, 0, 0, 0, 0, 0, 0, 0]
    assert accuracy_auc(curve_fractions(), correct) == pytest.approx(15.0)
    # never wrong: 90, not 100
    assert accuracy_auc(curve_fractions(), [1] * 10) == pytest.approx(90.0)
    assert curve_fractions() == (0.0, *FRACTIONS)


def test_accuracy_auc_is_a_mean_over_images() -> None:
    generator = np.random.default_rng(0)
    correct = generator.integers(0, 2, (20, 10))
    whole = 100 * np.trapezoid(correct.mean(0), curve_fractions())
    assert accuracy_auc(curve_fractions(), correct).mean() == pytest.approx(whole)


def test_area_with_wrong_number_of_values_raises() -> None:
    with pytest.raises(ValueError, match="fractions"):
        area([0, 1], [1, 2, 3])
    with pytest.raises(ValueError, match="3 fractions for 2 values"):  # numpy would broadcast the values
        area([0, 0.5, 1], [1, 2])


def test_mean_curve_area_is_the_causal_metric_of_rise() -> None:
    y = [0.9, 0.5, 0.4, 0.1]
    n = 3
    assert mean_curve_area(y) == pytest.approx((sum(y) - y[0] / 2 - y[-1] / 2) / n)


def test_aopc_and_log_odds_by_hand() -> None:
    assert aopc(0.8, [0.4, 0.2]) == pytest.approx(0.5)
    assert log_odds(0.8, [0.4, 0.2]) == pytest.approx((math.log(1 / 2) + math.log(1 / 4)) / 2)
    assert np.isfinite(log_odds(0.8, [0.0]))
    # the sign is kept if the removal raises the probability
    assert aopc(0.5, [0.7]) == pytest.approx(-0.2)


def test_shares_are_those_of_eraser() -> None:
    assert SHARES == (0.01, 0.05, 0.1, 0.2, 0.5)  # DeYoung et al. 2020, section 4: B = {1, 5, 10, 20, 50} %


@pytest.mark.parametrize(("given_fractions", "expected"), [((), (0,)), ((0.5, 1), (0, 0.5, 1)), ((0, 0.5), (0, 0.5)), ((0.5, 0), (0, 0.5, 0))])
def test_curve_begins_with_the_clean_point(given_fractions: tuple[float, ...], expected: tuple[float, ...]) -> None:
    assert curve_fractions(given_fractions) == expected

"""Perturbation: exactly k features, ties by index, and the figures by hand and by slow loops."""

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


def slow_order(scores: list[float], highest_first: bool) -> list[int]:
    """Pick the best remaining one, the first of equals, until none is left."""
    left = list(range(len(scores)))
    found = []
    while left:
        best = left[0]
        for i in left[1:]:
            if (scores[i] > scores[best]) if highest_first else (scores[i] < scores[best]):
                best = i
        found.append(best)
        left.remove(best)
    return found


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=30), st.booleans(), st.sampled_from(FRACTIONS))
def test_order_and_masks_against_a_slow_loop_with_many_ties(values: list[int], highest: bool, fraction: float) -> None:
    order = removal_order(np.array(values, dtype=float), highest_first=highest)
    assert order.tolist() == slow_order([float(v) for v in values], highest)
    k = removed_count(len(values), fraction)
    (mask,) = first_masks(order, [k])
    assert mask.sum() == k
    assert set(np.flatnonzero(mask)) == set(order[:k].tolist())


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_exactly_k_pixels_even_of_a_map_with_large_equal_areas(fraction: float) -> None:
    scores = np.zeros((224, 224))
    scores[100:120, 50:90] = 1
    order = removal_order(scores)
    mask = first_masks(order, [removed_count(50176, fraction)])[0].reshape(224, 224)
    assert mask.sum() == int(50176 * fraction)
    assert mask.shape == (224, 224)
    # the object goes first, then the ground row by row
    assert mask[100:120, 50:90].all()
    assert mask[0, 0] and not mask[-1, -1]


def test_both_directions_take_equal_scores_by_index() -> None:
    assert removal_order([1, 1, 2]).tolist() == [2, 0, 1]
    assert removal_order([1, 1, 2], highest_first=False).tolist() == [0, 1, 2]


def test_count_is_the_floor_of_whole_products() -> None:
    assert removed_count(100, 0.29) == 29  # 28.999999999999996 in floating point
    assert removed_count(50176, 0.1) == 5017
    assert removed_count(7, 0.0) == 0
    assert removed_count(7, 1.0) == 7
    with pytest.raises(ValueError, match="between 0 and 1"):
        removed_count(7, 1.2)


def test_nan_gives_no_order() -> None:
    with pytest.raises(ValueError, match="NaN"):
        removal_order([1.0, float("nan")])


def test_auc_by_hand() -> None:
    # right at f = 0 and 0.1, wrong from 0.2: 0.1 full, then a triangle of 0.1 · 1/2
    correct = [1, 1, 0, 0, 0, 0, 0, 0, 0, 0]
    assert accuracy_auc(curve_fractions(), correct) == pytest.approx(15.0)
    # never wrong: 90, not 100
    assert accuracy_auc(curve_fractions(), [1] * 10) == pytest.approx(90.0)
    assert curve_fractions() == (0.0, *FRACTIONS)


def test_auc_is_the_mean_over_pictures_of_their_own() -> None:
    generator = np.random.default_rng(0)
    correct = generator.integers(0, 2, (20, 10))
    whole = 100 * np.trapezoid(correct.mean(0), curve_fractions())
    assert accuracy_auc(curve_fractions(), correct).mean() == pytest.approx(whole)


def test_area_refuses_a_wrong_number_of_values() -> None:
    with pytest.raises(ValueError, match="fractions"):
        area([0, 1], [1, 2, 3])
    with pytest.raises(ValueError, match="3 fractions for 2 values"):  # what numpy would stretch over the steps
        area([0, 0.5, 1], [1, 2])


def test_insertion_area_is_the_causal_metric_of_rise() -> None:
    y = [0.9, 0.5, 0.4, 0.1]
    n = 3
    assert mean_curve_area(y) == pytest.approx((sum(y) - y[0] / 2 - y[-1] / 2) / n)


def test_aopc_and_log_odds_by_hand() -> None:
    assert aopc(0.8, [0.4, 0.2]) == pytest.approx(0.5)
    assert log_odds(0.8, [0.4, 0.2]) == pytest.approx((math.log(1 / 2) + math.log(1 / 4)) / 2)
    assert np.isfinite(log_odds(0.8, [0.0]))
    # a map whose removal raises the probability loses points: the sign is kept
    assert aopc(0.5, [0.7]) == pytest.approx(-0.2)


def test_the_shares_of_eraser() -> None:
    assert SHARES == (0.01, 0.05, 0.1, 0.2, 0.5)  # DeYoung et al. 2020, section 4: B = {1, 5, 10, 20, 50} %


@pytest.mark.parametrize(("given_fractions", "wanted"), [((), (0,)), ((0.5, 1), (0, 0.5, 1)), ((0, 0.5), (0, 0.5)), ((0.5, 0), (0, 0.5, 0))])
def test_the_clean_point_comes_first_and_once(given_fractions: tuple[float, ...], wanted: tuple[float, ...]) -> None:
    assert curve_fractions(given_fractions) == wanted

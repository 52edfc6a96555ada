"""Activation, conservation, randomisation, sensitivity, infidelity, RFT and the bootstrap."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import bootstrap as scipy_bootstrap
from scipy.stats import linregress, pearsonr, rankdata, spearmanr
from skimage.metrics import structural_similarity

from whyformer.errors import InputError
from whyformer.evaluation.metrics.faithfulness import (
    STEPS,
    au_mse,
    auac,
    prune_masks,
    ranked_faithfulness,
    reveal_masks,
    revealed_count,
    squared_change,
    worst_ranks,
)
from whyformer.evaluation.metrics.relevance import conservation_fit, infidelity, random_subsets, relevance_sum
from whyformer.evaluation.metrics.sanity import (
    max_sensitivity,
    randomized_models,
    ranks,
    relative_change,
    spearman,
    ssim,
    stages,
)
from whyformer.evaluation.statistics import bootstrap, bootstrap_of
from whyformer.explanation.result import Explanation
from zoo_evaluate import tiny_vit


# -- activation --------------------------------------------------------------------------------------------------
def test_reveal_and_prune_masks_by_hand() -> None:
    shown = reveal_masks([0.1, -2.0, 3.0], (0.0, 1 / 3, 0.5, 1.0))
    assert shown.tolist() == [[0, 0, 0], [0, 0, 1], [1, 0, 1], [1, 1, 1]]
    gone = prune_masks([0.1, -2.0, 3.0], (0.0, 1 / 3, 0.5, 1.0))
    assert gone.tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize("n", [1, 7, 10, 33])
def test_ceiling_of_the_fraction_is_revealed(n: int) -> None:
    masks = reveal_masks(np.zeros(n))
    for fraction, row in zip(STEPS, masks, strict=True):
        k = sum(1 for i in range(n) if i < round(fraction * n, 6))
        assert row.sum() == revealed_count(n, fraction) == k
        assert row[:k].all()  # equal scores by index


def test_auac_and_au_mse_by_hand() -> None:
    assert auac([0.5] * 11) == pytest.approx(0.5)
    assert auac(np.linspace(0, 1, 11)) == pytest.approx(0.5)
    change = squared_change([1.0, 2.0], [[1.0, 2.0], [0.0, 4.0]])
    assert change.tolist() == [0.0, 5.0]  # a sum over classes
    assert au_mse(np.ones((3, 11))).tolist() == pytest.approx([1.0] * 3)


# -- conservation ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("figure", [np.mean, np.median, np.std])
def test_interval_of_any_figure_equals_scipy(figure: Any) -> None:
    samples = np.random.default_rng(1).exponential(size=300)
    interval, expected = bootstrap_of(figure, samples), scipy_bootstrap((samples,), figure, method="percentile", rng=0)
    assert (interval.value, interval.count) == (pytest.approx(figure(samples)), 300)
    assert (interval.low, interval.high) == pytest.approx(tuple(expected.confidence_interval), abs=0.03)


def test_draws_without_a_figure_are_left_out_of_the_interval() -> None:
    interval = bootstrap_of(lambda pairs: conservation_fit(*pairs.T).slope, [[1.0, 1.0], [3.0, 2.0]])
    assert (interval.value, interval.low, interval.high) == pytest.approx((2, 2, 2))
    none = bootstrap_of(lambda pairs: conservation_fit(*pairs.T).slope, [[1.0, 2.0], [3.0, 2.0]])
    assert np.isnan([none.value, none.low, none.high]).all()


def test_conservation_fit_equals_scipy() -> None:
    generator = np.random.default_rng(0)
    f = generator.normal(size=40)
    r = 0.7 * f + 0.2 + generator.normal(scale=0.1, size=40)
    fit, expected = conservation_fit(r, f), linregress(f, r)
    assert (fit.slope, fit.intercept) == pytest.approx((expected.slope, expected.intercept))
    assert fit.correlation == pytest.approx(pearsonr(f, r).statistic)
    assert fit.error == pytest.approx(np.abs(r - f).mean() / np.abs(f).mean())


def test_exact_conservation_has_slope_one() -> None:
    fit = conservation_fit([1.0, -2.0, 4.0], [1.0, -2.0, 4.0])
    assert (fit.slope, fit.intercept, fit.error) == pytest.approx((1, 0, 0))
    assert math.isnan(conservation_fit([1.0, 2.0], [3.0, 3.0]).slope)


# -- randomisation and sensitivity -------------------------------------------------------------------------------
@pytest.mark.parametrize("rounded", [False, True])
def test_ranks_and_spearman_equal_scipy(rounded: bool) -> None:
    generator = np.random.default_rng(0)
    a, b = generator.normal(size=(2, 60))
    if rounded:
        a, b = np.round(a), np.round(b)
    assert ranks(a) == pytest.approx(rankdata(a))
    assert spearman(a, b) == pytest.approx(spearmanr(a, b).statistic)
    assert spearman(a, b, absolute=True) == pytest.approx(spearmanr(np.abs(a), np.abs(b)).statistic)
    assert math.isnan(spearman(a, np.ones(60)))


def test_ssim_equals_scikit_image() -> None:
    generator = np.random.default_rng(0)
    a, b = generator.random((2, 20, 24))
    a, b = ((m - m.min()) / (m.max() - m.min()) for m in (a, b))
    _, expected = structural_similarity(a, b, win_size=7, data_range=1, full=True)
    assert ssim(a, b) == pytest.approx(expected[3:-3, 3:-3].mean())
    assert ssim(a, 5 * a + 2) == pytest.approx(1)  # both maps are scaled to 0..1 first
    assert math.isnan(ssim(a, np.ones_like(a)))


def test_stages_are_ordered_from_the_head_and_hold_every_parameter() -> None:
    model = tiny_vit()
    listed = stages(model)
    assert [name for name, _ in listed] == ["head", "block 1", "block 0", "embeddings"]
    names = [n for _, part in listed for n in part]
    assert sorted(names) == sorted(n for n, _ in model.named_parameters())


def test_cascading_and_independent_randomization_change_their_stages_only() -> None:
    model = tiny_vit()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    parts = dict(stages(model))
    done: list[str] = []
    for stage, changed in randomized_models(model, "cascading"):
        done += parts[stage]
        for n, p in changed.named_parameters():
            assert torch.equal(p, before[n]) == (n not in done), n
    for stage, changed in randomized_models(model, "independent"):
        for n, p in changed.named_parameters():
            assert torch.equal(p, before[n]) == (n not in parts[stage]), n
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    with pytest.raises(InputError, match="order"):
        list(randomized_models(model, "sideways"))


def test_sensitivities_by_hand() -> None:
    assert relative_change([3.0, 4.0], [3.0, 9.0]) == pytest.approx(1)
    assert max_sensitivity([3.0, 4.0], [[3.0, 4.0], [3.0, 6.5]]) == pytest.approx(0.5)
    assert math.isnan(relative_change([0.0, 0.0], [1.0, 0.0]))


# -- infidelity --------------------------------------------------------------------------------------------------
def test_random_subsets_have_the_requested_size() -> None:
    masks = random_subsets(17, 30, share=0.3, seed=1)
    assert (masks.sum(1) == 5).all()
    assert (random_subsets(17, 30, share=0.3, seed=1) == masks).all()
    assert (random_subsets(3, 4, share=0.01).sum(1) == 1).all()


def test_infidelity_is_zero_for_linear_model_and_one_for_zero_scores() -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=12)
    removed = random_subsets(12, 40)
    drops = np.array([sum(x[i] for i in range(12) if row[i]) for row in removed])
    assert infidelity(x, removed, drops, scale=False) == pytest.approx(0)
    assert infidelity(5 * x, removed, drops) == pytest.approx(0)  # the scale is free
    assert infidelity(np.zeros(12), removed, drops) == pytest.approx(1)
    assert math.isnan(infidelity(x, removed, np.zeros(40)))


# -- arbitration -------------------------------------------------------------------------------------------------
def test_rft_by_hand() -> None:
    assert worst_ranks([3.0, -3.0, 1.0]).tolist() == [2, 2, 3]  # equal magnitudes both get the worse rank
    # +: Δ = .4 / 1; −: −(−.1) / 2; 0: −|.2| / 3
    assert ranked_faithfulness([3.0, -2.0, 0.0], [0.4, -0.1, 0.2]) == pytest.approx(0.4 + 0.05 - 0.2 / 3)


# -- bootstrap ----------------------------------------------------------------------------------------------------
def test_bootstrap_of_mean_is_near_the_normal_interval() -> None:
    x = np.random.default_rng(0).normal(3, 2, 400)
    result = bootstrap(x, draws=4000)
    half = 1.96 * x.std() / 20
    assert (result.low, result.high) == pytest.approx((x.mean() - half, x.mean() + half), abs=0.03)
    assert bootstrap(x) == bootstrap(x)
    assert bootstrap([]).count == 0


def test_bootstrap_of_pooled_ratio() -> None:
    rows = np.array([[1.0, 2.0], [3.0, 4.0], [0.0, 10.0]])
    result = bootstrap(rows, lambda m: m[..., 0] / m[..., 1])
    assert result.value == pytest.approx(4 / 16)  # Σ/Σ, not the mean of the ratios
    assert result.low <= result.value <= result.high


@pytest.mark.parametrize(("sums", "outputs"), [([1.0, 2], [1.0, 2, 3]), ([1.0, 2], [3.0]), ([[1.0, 2]], [[1.0, 2]]), ([], [])])
def test_conservation_fit_requires_one_sum_and_one_output_per_sample(sums: list[Any], outputs: list[Any]) -> None:
    with pytest.raises(ValueError, match="each sample needs a sum and an output"):
        conservation_fit(sums, outputs)


@pytest.mark.parametrize(
    ("diagnostics", "expected"),
    [
        ({"conservation": {"sum": [7.0]}, "completeness": {"sum": [5.0]}}, (7.0, "all features")),
        ({"conservation": {"blocks": {"1": [9.0], "0": [3.0]}, "start": [2.0], "scale": [2.0]}}, (6.0, "input of block 0")),
        ({"conservation": {"blocks": {"0": [-0.5]}, "start": [0.0], "scale": [2.0]}}, (3.0, "input of block 0")),
        ({"completeness": {"sum": [5.0]}}, (5.0, "all features")),
        ({}, (3.0, "scored features")),
    ],
)
def test_relevance_sum_by_available_diagnostics(diagnostics: dict[str, Any], expected: tuple[float, str]) -> None:
    scores, logits = torch.tensor([[1.0, 2]]), torch.tensor([[-1.0, 4]])
    result = Explanation(scores, "token", "lrp", {}, torch.tensor([1]), logits, diagnostics=diagnostics)
    assert relevance_sum(result, 4.0) == expected

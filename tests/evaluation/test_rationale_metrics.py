"""ERASER metrics by scikit-learn and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import auc, f1_score, precision_recall_curve

from whyformer.evaluation.metrics.plausibility import (
    auprc,
    f1,
    token_counts,
    top_words,
    word_scores,
)


def test_word_score_is_the_maximum_of_its_tokens_or_nan() -> None:
    scores = word_scores([9, 0.2, 0.5, 0.1, 9], [None, 0, 0, 1, None], 3)
    assert scores[:2].tolist() == [0.5, 0.1]
    assert np.isnan(scores[2])
    with pytest.raises(ValueError, match="tokens"):
        word_scores([1.0], [0, 1], 2)


def test_top_words_exclude_words_without_score() -> None:
    scores = np.array([0.1, np.nan, 0.3, 0.3, np.nan])
    assert top_words(scores, 2).tolist() == [2, 3]
    assert top_words(scores, 10).tolist() == [2, 3, 0]


def test_f1_equals_scikit_learn() -> None:
    generator = np.random.default_rng(1)
    actual, expected, pooled = [], [], ([], [])
    for _ in range(8):
        truth = generator.random(40) < 0.3
        chosen = top_words(generator.normal(size=40), 10)
        predicted = np.zeros(40, dtype=bool)
        predicted[chosen] = True
        actual.append(token_counts(chosen, truth))
        expected.append(f1_score(truth, predicted))
        pooled[0].append(truth)
        pooled[1].append(predicted)
    assert [f1(*counts) for counts in actual] == pytest.approx(expected)
    # the counts are summed over documents first
    micro = f1_score(np.concatenate(pooled[0]), np.concatenate(pooled[1]))
    assert f1(*np.sum(actual, 0)) == pytest.approx(micro)


def test_f1_by_hand() -> None:
    # 2 true positives of 4 chosen and 6 true words: P = 1/2, R = 1/3, F = 2/5
    assert f1(2, 4, 6) == pytest.approx(0.4)
    assert f1(0, 0, 0) == 0


@pytest.mark.parametrize("rounded", [False, True])
def test_auprc_equals_scikit_learn(rounded: bool) -> None:
    generator = np.random.default_rng(2)
    for _ in range(5):
        scores = generator.normal(size=50)
        scores = np.round(scores) if rounded else scores
        truth = generator.random(50) < 0.2
        precision, recall, _ = precision_recall_curve(truth, scores)
        assert auprc(scores, truth) == pytest.approx(auc(recall, precision))


def test_auprc_excludes_words_without_score() -> None:
    assert auprc([1.0, 0.0, np.nan], [1, 0, 1]) == pytest.approx(1.0)
    assert np.isnan(auprc([1.0, 0.0], [0, 0]))

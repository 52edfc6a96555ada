"""Terms of the benchmark ``bias``: their spans, their rank, and the difference between groups."""

from __future__ import annotations

import numpy as np
import pytest

from whyformer.benchmarks.bias import TermText, fill, find_terms, group_difference, term_rank
from whyformer.datasets import Text
from whyformer.errors import InputError


def spans(texts: list[TermText]) -> list[str]:
    return [t.text[t.start : t.end] for t in texts]


def test_templates_are_filled_with_terms() -> None:
    texts = fill(["{} is here ."], {"a": ["Ann"], "b": ["Bob", "Cy"]})
    assert [t.text for t in texts] == ["Ann is here .", "Bob is here .", "Cy is here ."]
    assert [t.id for t in texts] == ["a/Ann/0@0-3", "b/Bob/0@0-3", "b/Cy/0@0-2"]
    with pytest.raises(InputError, match="once"):
        fill(["{} and {}"], {"a": ["x"]})
    assert term_rank([0.5, 0.9, 0.5], 0) == 2


def test_terms_are_found_as_whole_words() -> None:
    texts = find_terms([Text("1", "We saw ANN and Bobby"), Text("2", "bob, then ann")], {"a": ["Ann"], "b": ["Bob"]})
    assert [(t.group, t.term) for t in texts] == [("a", "Ann"), ("a", "Ann"), ("b", "Bob")]
    assert [t.id for t in texts] == ["a/Ann/1@7-10", "a/Ann/2@10-13", "b/Bob/2@0-3"]
    assert spans(texts) == ["ANN", "ann", "bob"]


def test_interval_of_group_difference_covers_true_difference() -> None:
    generator = np.random.default_rng(0)
    difference = group_difference(generator.normal(1, 1, 200), generator.normal(0, 1, 200))
    assert difference.low < 1 < difference.high
    assert difference.value == pytest.approx(1, abs=0.3)
    with pytest.raises(InputError, match="empty"):
        group_difference([], [1.0])

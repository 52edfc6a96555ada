"""The names of the benchmark ``bias``: where they stand, their rank, and the difference between groups."""

from __future__ import annotations

import numpy as np
import pytest

from whyformer.benchmarks.bias import TermText, fill, find_terms, group_difference, term_rank
from whyformer.datasets import Text
from whyformer.errors import InputError


def spans(made: list[TermText]) -> list[str]:
    return [t.text[t.start : t.end] for t in made]


def test_templates() -> None:
    made = fill(["{} is here ."], {"a": ["Ann"], "b": ["Bob", "Cy"]})
    assert [t.text for t in made] == ["Ann is here .", "Bob is here .", "Cy is here ."]
    assert [t.id for t in made] == ["a/Ann/0@0-3", "b/Bob/0@0-3", "b/Cy/0@0-2"]
    with pytest.raises(InputError, match="once"):
        fill(["{} and {}"], {"a": ["x"]})
    assert term_rank([0.5, 0.9, 0.5], 0) == 2


def test_texts_that_hold_a_term_as_a_whole_word() -> None:
    made = find_terms([Text("1", "We saw ANN and Bobby"), Text("2", "bob, then ann")], {"a": ["Ann"], "b": ["Bob"]})
    assert [(t.group, t.term) for t in made] == [("a", "Ann"), ("a", "Ann"), ("b", "Bob")]
    assert [t.id for t in made] == ["a/Ann/1@7-10", "a/Ann/2@10-13", "b/Bob/2@0-3"]
    assert spans(made) == ["ANN", "ann", "bob"]


def test_group_difference_covers_the_truth() -> None:
    generator = np.random.default_rng(0)
    found = group_difference(generator.normal(1, 1, 200), generator.normal(0, 1, 200))
    assert found.low < 1 < found.high
    assert found.value == pytest.approx(1, abs=0.3)
    with pytest.raises(InputError, match="empty"):
        group_difference([], [1.0])

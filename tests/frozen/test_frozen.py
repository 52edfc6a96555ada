"""Scores of every method on about 40 tiny models equal the stored scores (``write.py`` describes these, and when to update them)."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache

import pytest

from frozen.compare import REFUSALS, SCORES, Answer, compare_model, read_stored
from frozen.models import MODELS

# cell, or a pattern of cells (``* | lrp rule=gamma | *``) -> reason why its scores differ from the stored scores
CHANGED: dict[str, str] = {}
# every eighth model by default, every fourth with the slow tests, the others with -m whole
PARAMETERS = [
    pytest.param(name, marks=() if i % 8 == 3 else pytest.mark.slow if i % 8 == 7 else pytest.mark.whole) for i, name in enumerate(MODELS)
]


@cache
def stored_answers() -> dict[str, Answer]:
    return read_stored()


@pytest.mark.parametrize("name", PARAMETERS)
def test_scores_equal_stored_scores(name: str) -> None:
    comparison = compare_model(name, stored_answers())
    assert comparison.count > 0
    unknown = {
        cell: description for cell, description in comparison.differ.items() if not any(fnmatchcase(cell, pattern) for pattern in CHANGED)
    }
    assert unknown == {}, f"python -m tests.frozen.compare --model '{name}' shows them too"


def test_stored_scores_are_small_and_of_known_models() -> None:
    assert SCORES.stat().st_size + REFUSALS.stat().st_size < 4_000_000
    assert {cell.split(" | ")[0] for cell in stored_answers()} == set(MODELS)
    assert not [cell for cell, answer in stored_answers().items() if isinstance(answer, str) and answer.startswith("foreign")]


def test_every_known_difference_matches_a_stored_cell() -> None:
    assert [pattern for pattern in CHANGED if not any(fnmatchcase(cell, pattern) for cell in stored_answers())] == []

"""The scores of every method on about 40 tiny models are the stored ones (``write.py`` says what is stored, and when to write it anew)."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache

import pytest

from frozen.compare import REFUSALS, SCORES, Answer, compared, stored
from frozen.models import MODELS

# cell, or a pattern of cells (``* | lrp rule=gamma | *``) -> why its scores are others than the stored ones
CHANGED: dict[str, str] = {}
# every eighth one always, half of them in that and the slow tests, the others on request: -m whole
PARAMETERS = [
    pytest.param(name, marks=() if i % 8 == 3 else pytest.mark.slow if i % 2 else pytest.mark.whole) for i, name in enumerate(MODELS)
]


@cache
def before() -> dict[str, Answer]:
    return stored()


@pytest.mark.parametrize("name", PARAMETERS)
def test_scores_are_the_stored_ones(name: str) -> None:
    found = compared(name, before())
    assert found.count > 0
    unknown = {
        cell: how for cell, how in found.differ.items() if not any(fnmatchcase(cell, pattern) for pattern in CHANGED)
    }
    assert unknown == {}, f"python -m tests.frozen.compare --model '{name}' shows them too"


def test_what_is_stored_is_small_and_of_these_models() -> None:
    assert SCORES.stat().st_size + REFUSALS.stat().st_size < 4_000_000
    assert {cell.split(" | ")[0] for cell in before()} == set(MODELS)
    assert not [cell for cell, answer in before().items() if isinstance(answer, str) and answer.startswith("foreign")]


def test_every_known_difference_is_of_a_stored_cell() -> None:
    assert [pattern for pattern in CHANGED if not any(fnmatchcase(cell, pattern) for cell in before())] == []

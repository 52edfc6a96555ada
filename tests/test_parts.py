"""The default part of the cases of a parametrised test covers every value of every parameter."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import parts
from parts import covering

pytest_plugins = ["pytester"]


def cases(*lengths: int) -> list[dict[str, int]]:
    return [dict(zip("abcd", values, strict=False)) for values in product(*map(range, lengths))]


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4), times=st.integers(1, 3), without=st.sets(st.integers(0, 300), max_size=40))
def test_every_value_is_covered(lengths: list[int], times: int, without: set[int]) -> None:
    """``times`` times, or as often as it occurs; also if some cases of the product are missing."""
    available = [case for i, case in enumerate(cases(*lengths)) if i not in without]
    occurrences = Counter(value for case in available for value in case.items())
    covered = Counter(value for i in covering(available, times) for value in available[i].items())
    assert covered.keys() == occurrences.keys()
    assert all(covered[value] >= min(times, count) for value, count in occurrences.items())


@pytest.mark.parametrize(("lengths", "times", "count"), [((192, 7), 1, 192), ((7, 192), 1, 192), ((34, 8), 2, 68), ((3, 4, 5), 1, 5), ((6,), 1, 6)])
def test_part_is_no_larger_than_the_longest_axis(lengths: tuple[int, ...], times: int, count: int) -> None:
    assert len(covering(cases(*lengths), times)) == count


def test_values_and_pairs_alternate() -> None:
    product_cases = cases(12, 4)
    chosen = [product_cases[i] for i in sorted(covering(product_cases))]
    assert [case["b"] for case in chosen] == [0, 1, 2, 3] * 3
    product_cases = cases(24, 4, 2)
    assert {*Counter((product_cases[i]["b"], product_cases[i]["c"]) for i in covering(product_cases)).values()} == {3}


TEST_FILE = """
    import pytest

    @pytest.mark.part
    @pytest.mark.parametrize("name", ["a", "b", "c", "d"])
    @pytest.mark.parametrize("method", [{"of": 1}, {"of": 2}])
    def test_both(name, method):
        pass

    @pytest.mark.part(times=2)
    @pytest.mark.parametrize(("name", "method"), [(n, m) for n in "abcd" for m in "xy"])
    def test_pairs(name, method):
        pass

    @pytest.mark.parametrize("name", ["a", "b"])
    def test_all(name):
        pass
"""


@pytest.mark.parametrize(("chosen", "names"), [
    ("not whole", ["method0-a", "method1-b", "method0-c", "method1-d", *(f"{n}-{m}" for n in "abcd" for m in "xy"), "a", "b"]),
    ("whole", ["method1-a", "method0-b", "method1-c", "method0-d"]),
])  # fmt: skip
def test_remaining_cases_are_marked_whole(pytester: pytest.Pytester, chosen: str, names: list[str]) -> None:
    folder = str(Path(parts.__file__).parent)
    pytester.makeconftest(f"import sys; sys.path.insert(0, {folder!r}); from parts import leave_out as pytest_collection_modifyitems")
    pytester.makepyfile(TEST_FILE)
    result = pytester.inline_run("--collect-only", "-m", chosen, "-p", "no:cacheprovider", "-W", "ignore")
    assert sorted(item.callspec.id for item in result.getcalls("pytest_collection_finish")[0].session.items) == sorted(names)

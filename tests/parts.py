"""Choose the cases of a large parametrised test that run by default: a few that cover every value of every parameter.

The remaining cases of a test with the mark ``part`` get the mark ``whole``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations

import pytest


def covering(cases: Sequence[Mapping[str, Hashable]], times: int = 1) -> set[int]:
    """Indices of a few cases that contain each value of each parameter ``times`` times, or as often as it occurs.

    Of the cases with a value that is still missing, the one whose other values were chosen least so far is taken, so that
    models alternate over methods. The result is deterministic.
    """
    places: dict[tuple[str, Hashable], list[int]] = {}
    for i, case in enumerate(cases):
        for value in case.items():
            places.setdefault(value, []).append(i)
    sizes = Counter(name for name, _ in places)
    single, pairs = Counter[Hashable](), Counter[Hashable]()

    def frequency(i: int) -> tuple[int, int]:
        values = tuple(cases[i].items())
        return sum(single[v] for v in values), sum(pairs[p] for p in combinations(values, 2))

    chosen: set[int] = set()
    for value in sorted(places, key=lambda value: -sizes[value[0]]):
        while single[value] < min(times, len(places[value])):
            i = min((i for i in places[value] if i not in chosen), key=frequency)
            chosen.add(i)
            single.update(cases[i].items())
            pairs.update(combinations(cases[i].items(), 2))
    return chosen


def leave_out(items: Sequence[pytest.Item]) -> None:
    """Mark the cases that ``covering`` does not choose as ``whole``, in tests with the mark ``part``."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("part") and not item.get_closest_marker("whole"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        mark = cases[0].get_closest_marker("part")
        chosen = covering([values(case) for case in cases], *mark.args, **mark.kwargs)
        for i, case in enumerate(cases):
            if i not in chosen:
                case.add_marker(pytest.mark.whole)


def values(case: pytest.Function) -> dict[str, Hashable]:
    """The parameters of a case; an unhashable value is replaced by its id."""
    parameters: dict[str, Hashable] = {}
    for name, value in case.callspec.params.items():
        try:
            hash(value)
            parameters[name] = value
        except TypeError:
            parameters[name] = id(value)
    return parameters

"""Which cases of a large parametrised test run by default: a few that have every value of every parameter.

The cases of a test with the mark ``part`` that are left out get the mark ``whole``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations

import pytest


def covering(cases: Sequence[Mapping[str, Hashable]], times: int = 1) -> set[int]:
    """Indices of a few cases that have each value of each parameter ``times`` times, or as often as there is such a case.

    Among the cases of a value that is still wanted, the one whose other values occurred least so far is taken: models take
    turns over methods. The same cases give the same part.
    """
    places: dict[tuple[str, Hashable], list[int]] = {}
    for i, case in enumerate(cases):
        for value in case.items():
            places.setdefault(value, []).append(i)
    sizes = Counter(name for name, _ in places)
    single, pairs = Counter[Hashable](), Counter[Hashable]()

    def seen(i: int) -> tuple[int, int]:
        values = tuple(cases[i].items())
        return sum(single[v] for v in values), sum(pairs[p] for p in combinations(values, 2))

    taken: set[int] = set()
    for value in sorted(places, key=lambda value: -sizes[value[0]]):
        while single[value] < min(times, len(places[value])):
            i = min((i for i in places[value] if i not in taken), key=seen)
            taken.add(i)
            single.update(cases[i].items())
            pairs.update(combinations(cases[i].items(), 2))
    return taken


def leave_out(items: Sequence[pytest.Item]) -> None:
    """Mark as ``whole`` what the tests with the mark ``part`` do without."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("part") and not item.get_closest_marker("whole"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        mark = cases[0].get_closest_marker("part")
        taken = covering([values(case) for case in cases], *mark.args, **mark.kwargs)
        for i, case in enumerate(cases):
            if i not in taken:
                case.add_marker(pytest.mark.whole)


def values(case: pytest.Function) -> dict[str, Hashable]:
    """The parameters of a case; instead of one that has no hash, which object it is."""
    found: dict[str, Hashable] = {}
    for name, value in case.callspec.params.items():
        try:
            hash(value)
            found[name] = value
        except TypeError:
            found[name] = id(value)
    return found

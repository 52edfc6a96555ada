"""Known faults: forms with other scores are listed in known_faults.txt and must fail until they are fixed."""

from __future__ import annotations

from pathlib import Path

import pytest

FAULTS = frozenset((Path(__file__).parent / "known_faults.txt").read_text(encoding="utf-8").splitlines())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.partition("tests/forms/")[2] in FAULTS:
            item.add_marker(pytest.mark.xfail(reason="another explanation than the same function's", strict=True))

"""Wait in tests for conditions instead of durations, so that the speed of the machine has no effect."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

HANG = 600
"""Seconds after which a test, client, process or thread counts as hanging."""
Result = TypeVar("Result")


def wait_for(condition: Callable[[], Result], what: str, every: float = 0.02) -> Result:
    """Poll a condition until it is true, and return its value.

    Raises:
        AssertionError: the condition, described by ``what``, stayed false.
    """
    deadline = time.monotonic() + HANG
    while not (result := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {HANG} seconds for {what}")
        time.sleep(every)
    return result

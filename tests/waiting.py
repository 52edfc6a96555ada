"""Waiting in tests, on a machine of any speed: for what is to happen, not for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

HANG = 600
"""Seconds after which a test is taken to hang, with every client, process and thread that it waits for."""
Found = TypeVar("Found")


def wait_for(condition: Callable[[], Found], what: str, every: float = 0.02) -> Found:
    """Ask again and again until the condition holds; what it gave.

    Raises:
        AssertionError: it never did; ``what`` was waited for.
    """
    until = time.monotonic() + HANG
    while not (found := condition()):
        if time.monotonic() > until:
            raise AssertionError(f"waited {HANG} seconds for {what}")
        time.sleep(every)
    return found

"""Results that are kept for the next time, the most recent ones only."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

__all__ = ["Recent"]

Result = TypeVar("Result")


class Recent(Generic[Result]):
    """Keep the results that were used last, by key.

    Args:
        most: how many.
    """

    def __init__(self, most: int) -> None:
        self.most, self._results = most, OrderedDict[object, Result]()

    def get(self, key: object) -> Result | None:
        """Return the result of a key, or None."""
        result = self._results.get(key)
        if result is not None:
            self.put(key, result)
        return result

    def put(self, key: object, result: Result) -> Result:
        """Keep a result as the most recent one, and return it."""
        self._results.pop(key, None)  # so that it is the last, in several threads too
        self._results[key] = result
        while len(self._results) > self.most:
            self._results.popitem(last=False)
        return result

"""A cache of recent results."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Recent"]

Result = TypeVar("Result")


class Recent(Generic[Result]):
    """Cache of the most recently used results, by key.

    Args:
        most: maximum number of results.
    """

    def __init__(self, most: int) -> None:
        self.most, self._results = most, OrderedDict[object, Result]()

    def get(self, key: object) -> Result | None:
        """Return the result of a key, or None."""
        result = self._results.get(key)
        if result is not None:
            self.put(key, result)
        return result

    def once(self, key: object, compute: Callable[[], Result]) -> Result:
        """Return the stored result of a key; if there is none, compute and store it."""
        result = self._results[key] if key in self._results else compute()
        return self.put(key, result)

    def put(self, key: object, result: Result) -> Result:
        """Store a result as the most recent one, and return it."""
        self._results.pop(key, None)  # so that it becomes the last, also when several threads use the cache
        self._results[key] = result
        while len(self._results) > self.most:
            self._results.popitem(last=False)
        return result

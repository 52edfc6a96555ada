"""Threads that read ahead of the model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def ahead(items: Iterable[Item], read: Callable[[Item], Result], workers: int, most: int) -> Iterator[Result]:
    """Yield ``read(item)`` for each item in order, computed by ``workers`` threads, at most ``most`` ahead."""
    with ThreadPoolExecutor(workers, "whyformer-read") as pool:
        waiting: deque[Future[Result]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(read, item))
                if len(waiting) > most:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

"""Threads beside the model: several that read ahead, and one that writes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, TypeVar

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


class BackgroundWriter(ExitStack):
    """A thread that writes one result while the next is computed; at most one result waits."""

    def __init__(self) -> None:
        super().__init__()
        self._pool = self.enter_context(ThreadPoolExecutor(1, "whyformer-write"))
        self._pending: tuple[Future[Any], Callable[[Any], None] | None] | None = None

    def write(self, work: Callable[..., Result], *arguments: Any, then: Callable[[Result], None] | None = None) -> None:
        """Start writing when the previous result is written; :meth:`drain` passes the result to ``then``."""
        self.drain()
        self._pending = self._pool.submit(work, *arguments), then

    def drain(self) -> None:
        """Wait for the writer. Errors of writing are raised here."""
        if self._pending is not None:
            (future, then), self._pending = self._pending, None
            result = future.result()
            if then is not None:
                then(result)

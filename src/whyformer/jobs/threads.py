"""What runs beside the model on one machine: threads that read ahead, and one that writes what came before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, TypeVar

Item = TypeVar("Item")
Found = TypeVar("Found")


def ahead(items: Iterable[Item], read: Callable[[Item], Found], workers: int, most: int) -> Iterator[Found]:
    """What is read of items, in their order, by ``workers`` threads; at most ``most`` wait to be taken."""
    with ThreadPoolExecutor(workers, "whyformer-read") as pool:
        waiting: deque[Future[Found]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(read, item))
                if len(waiting) > most:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for one in waiting:
                one.cancel()


class Behind(ExitStack):
    """A thread that writes one thing while the next is made; more never wait."""

    def __init__(self) -> None:
        super().__init__()
        self._pool = self.enter_context(ThreadPoolExecutor(1, "whyformer-write"))
        self._pending: tuple[Future[Any], Callable[[Any], None] | None] | None = None

    def write(self, work: Callable[..., Found], *given: Any, then: Callable[[Found], None] | None = None) -> None:
        """Begin to write once the one before is written; ``then`` is told of it here, when :meth:`drain` is called."""
        self.drain()
        self._pending = self._pool.submit(work, *given), then

    def drain(self) -> None:
        """Wait for what is being written. An error of the writing is raised here."""
        if self._pending is not None:
            (future, then), self._pending = self._pending, None
            found = future.result()
            if then is not None:
                then(found)

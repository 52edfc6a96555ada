"""Requests that wait together are explained together, by one thread that has the model to itself."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from whyformer.errors import TooLarge
from whyformer.explanation.result import Explanation
from whyformer.jobs.batching import Failure, OutOfMemory, Read, Session
from whyformer.jobs.rows import Row
from whyformer.methods import find


class QueueFull(Exception):  # noqa: N818 - the client may try again
    """As many requests wait as are allowed."""


class DeadlineExceeded(Exception):  # noqa: N818 - told as such
    """The work would take longer than a request may."""


class RequestError(Exception):
    """There is no explanation; the message says why. ``large``: it would take too much memory."""

    def __init__(self, reason: str, large: bool = False) -> None:
        super().__init__(reason)
        self.large = large


@dataclass(frozen=True, eq=False)
class PendingRequest:
    """A request: its content, what is asked of it, its deadline, and the answer, which is cancelled once nobody waits
    for it."""

    content: Any
    method: str
    settings: dict[str, Any]
    target: int | str | None
    deadline: float
    answer: Future[Explanation] = field(default_factory=Future)

    @property
    def batch_key(self) -> str:
        """Requests with the same key are explained in one batch."""
        return json.dumps([type(self.content).__name__, self.method, self.settings, self.target], default=str)


class Batcher:
    """A queue with an end, and the thread that empties it.

    A request whose answer is cancelled leaves the queue at once. What is running for cancelled requests alone ends at
    its next step.

    Args:
        session: the model; methods and targets are those of each request.
        size: the most requests that are explained together; wait: seconds that the first waits for others.
        length: the most that may wait.
        seen: told of the size of every batch.
    """

    def __init__(
        self, session: Session, size: int, wait: float, length: int, seen: Callable[[int], None] = lambda size: None
    ) -> None:
        self.session, self.size, self.wait, self.length, self.seen = session, size, wait, length, seen
        self.waiting: deque[PendingRequest] = deque()
        self.open = True
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="whyformer-batches", daemon=True)
        self._thread.start()

    @property
    def full(self) -> bool:
        """Whether as many requests wait as are allowed."""
        return len(self.waiting) >= self.length

    def submit(self, request: PendingRequest) -> Future[Explanation]:
        """The explanation that will be.

        Raises:
            QueueFull: too many wait, or the server is about to end.
        """
        with self._changed:
            if not self.open or self.full:
                raise QueueFull
            self.waiting.append(request)
            self._changed.notify()
        request.answer.add_done_callback(lambda answer: self._remove(request))
        return request.answer

    def close(self, seconds: float | None = None) -> None:
        """Take no more, finish what was accepted, and end; wait at most so many seconds for it."""
        with self._changed:
            self.open = False
            self._changed.notify()
        self._thread.join(seconds)

    def _remove(self, request: PendingRequest) -> None:
        with self._changed, suppress(ValueError):  # it is no longer in the queue
            self.waiting.remove(request)

    def _work(self) -> None:
        while together := self._next():
            kinds: dict[str, list[PendingRequest]] = {}
            for one in together:
                kinds.setdefault(one.batch_key, []).append(one)
            for alike in kinds.values():
                if awaited := [one for one in alike if not one.answer.cancelled()]:
                    self._explain(awaited)

    def _next(self) -> list[PendingRequest]:
        """The requests of the next batch; none once the queue is closed and empty."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self.waiting or not self.open)
                if not self.waiting:
                    return []
                self._changed.wait_for(lambda: len(self.waiting) >= self.size or not self.open, self.wait)
                if together := [self.waiting.popleft() for _ in range(min(self.size, len(self.waiting)))]:
                    return together

    def _explain(self, alike: list[PendingRequest]) -> None:
        self.seen(len(alike))
        first = alike[0]
        try:
            session = replace(
                self.session,
                methods=((find(first.method), first.settings),),
                targets="predicted" if first.target is None else [first.target],
                progress=CancelOnDisconnect(alike),
            )
            reads = [Read(Row(i, str(i), partial(str, i)), one.content) for i, one in enumerate(alike)]
            found = self._halving(session, reads)
        except Exception as error:  # it is the answer to these requests, and the thread goes on
            for one in alike:
                _answer(one, None, error)
            return
        for one, (explanation, failure) in zip(alike, found, strict=True):
            _answer(one, explanation, None if failure is None else _reason(failure))

    def _halving(self, session: Session, reads: list[Read]) -> list[tuple[Explanation | None, Failure | None]]:
        size = len(reads)
        while True:
            try:
                found = session.explain(reads, size)
            except OutOfMemory:
                size = max(1, size // 2)
                continue
            return [(next(iter(x.explanations), None), next(iter(x.failures), None)) for x in found]


def _answer(request: PendingRequest, explanation: Explanation | None, error: Exception | None) -> None:
    if not request.answer.set_running_or_notify_cancel():
        return
    if explanation is not None:
        request.answer.set_result(explanation)
    else:
        request.answer.set_exception(error)


def _reason(failure: Failure) -> Exception:
    if failure.kind == DeadlineExceeded.__name__:
        return DeadlineExceeded()
    return RequestError(failure.reason, failure.kind == TooLarge.__name__)


@dataclass(frozen=True)
class CancelOnDisconnect:
    """A progress that ends the work once nobody waits for it."""

    requests: list[PendingRequest]

    def __call__(self, work: Iterable[Any], description: str = "working", total: int | None = None) -> Iterator[Any]:
        for item in work:
            if all(one.answer.cancelled() or time.monotonic() > one.deadline for one in self.requests):
                raise DeadlineExceeded
            yield item

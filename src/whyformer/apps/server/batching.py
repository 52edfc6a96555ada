"""Batches of waiting requests, explained by one thread that alone uses the model."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from starlette.exceptions import HTTPException

from whyformer.apps.server.limits import Limits
from whyformer.errors import TooLarge
from whyformer.explanation.result import Explanation
from whyformer.jobs.batching import RowContent, RowResult, Session
from whyformer.jobs.rows import Row
from whyformer.methods import find


@dataclass(frozen=True, eq=False)
class PendingRequest:
    """A request, the time on the monotonic clock at which it is given up, and its answer.

    The answer is cancelled once nobody waits for it.
    """

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
    """A bounded queue of requests, and the thread that explains them in batches.

    A request whose answer is cancelled leaves the queue at once. Work for cancelled requests only stops at its next
    step.

    Args:
        session: the model; methods and targets are those of each request.
        limits: size of a batch and of the queue, and seconds that the first request of a batch waits for others.
        observe: called with the size of each batch.
    """

    def __init__(self, session: Session, limits: Limits, observe: Callable[[int], None] = lambda size: None) -> None:
        self.session, self.limits, self.observe = session, limits, observe
        self.waiting: deque[PendingRequest] = deque()
        self.open = True
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="whyformer-batches", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """True if a request can be added."""
        return self.open and len(self.waiting) < self.limits.queue

    def submit(self, request: PendingRequest) -> Future[Explanation]:
        """Add a request, and return its answer.

        Raises:
            HTTPException: 429, the queue is full or closed.
        """
        with self._changed:
            if not self.ready:
                raise HTTPException(429, f"{self.limits.queue} requests wait; try again later", {"Retry-After": "1"})
            self.waiting.append(request)
            self._changed.notify()
        request.answer.add_done_callback(lambda answer: self._remove(request))
        return request.answer

    def close(self, seconds: float | None = None) -> None:
        """Accept no more requests, and wait until those in the queue are explained, at most this many seconds."""
        with self._changed:
            self.open = False
            self._changed.notify()
        self._thread.join(seconds)

    def _remove(self, request: PendingRequest) -> None:
        with self._changed, suppress(ValueError):  # it is no longer in the queue
            self.waiting.remove(request)

    def _work(self) -> None:
        while batch := self._next():
            groups: dict[str, list[PendingRequest]] = {}
            for request in batch:
                groups.setdefault(request.batch_key, []).append(request)
            for group in groups.values():
                if awaited := [request for request in group if not request.answer.cancelled()]:
                    self._explain(awaited)

    def _next(self) -> list[PendingRequest]:
        """Return the requests of the next batch; none once the queue is closed and empty."""
        size = self.limits.batch
        with self._changed:
            while self.waiting or self.open:
                self._changed.wait_for(lambda: self.waiting or not self.open)
                self._changed.wait_for(lambda: len(self.waiting) >= size or not self.open, self.limits.wait)
                if self.waiting:  # not all were cancelled meanwhile
                    return [self.waiting.popleft() for _ in range(min(size, len(self.waiting)))]
        return []

    def _explain(self, requests: list[PendingRequest]) -> None:
        """Explain requests that differ in nothing but their content, and set their answers."""
        self.observe(len(requests))
        first, answers = requests[0], list[Explanation | Exception]()
        try:
            session = replace(
                self.session,
                methods=((find(first.method), first.settings),),
                targets="predicted" if first.target is None else [first.target],
                progress=partial(while_awaited, requests),
            )
            reads = [RowContent(Row(i, str(i), partial(str, i)), request.content) for i, request in enumerate(requests)]
            answers += map(_answer, session.explain_in_memory(reads, len(reads))[0])
        except Exception as error:  # it is the answer to these requests, and the thread goes on
            answers = [error] * len(requests)
        for request, answer in zip(requests, answers, strict=True):
            with suppress(InvalidStateError):  # it was cancelled
                if isinstance(answer, Exception):
                    request.answer.set_exception(answer)
                else:
                    request.answer.set_result(answer)


def _answer(result: RowResult) -> Explanation | Exception:
    if result.explanations:
        return result.explanations[0]
    failure = result.failures[0]
    if failure.kind == TimeoutError.__name__:
        return TimeoutError()
    return HTTPException(413 if failure.kind == TooLarge.__name__ else 400, failure.reason)


def while_awaited(
    requests: list[PendingRequest], work: Iterable[Any], description: str = "working", total: int | None = None
) -> Iterator[Any]:
    """Yield the steps of work as a progress bar does.

    Raises:
        TimeoutError: each request is cancelled or past its deadline.
    """
    for step in work:
        if all(request.answer.cancelled() or time.monotonic() > request.deadline for request in requests):
            raise TimeoutError
        yield step

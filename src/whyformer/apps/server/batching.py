"""Batches of waiting requests, explained in one thread that alone uses the model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from starlette.exceptions import HTTPException

from whyformer.apps.server.limits import Limits
from whyformer.errors import InputError, TooLarge
from whyformer.explanation.result import Explanation
from whyformer.jobs.batching import RowContent, RowResult, Session
from whyformer.jobs.rows import Row
from whyformer.methods import find


@dataclass(frozen=True, eq=False)
class PendingRequest:
    """A request and its answer, which is cancelled once nobody waits for it."""

    content: Any
    method: str
    settings: dict[str, Any]
    target: int | str | None
    answer: asyncio.Future[Explanation] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @cached_property
    def batch_key(self) -> str:
        """Requests with the same key are explained in one batch."""
        return json.dumps([type(self.content).__name__, self.method, self.settings, self.target], default=str)


class Batcher:
    """A bounded queue of requests, which :meth:`run` explains in batches.

    A request whose answer is cancelled leaves the queue at once. Work for cancelled requests only stops at its next
    step.

    Args:
        session: the model; methods and targets are those of each request.
        limits: size of a batch and of the queue, and seconds that the first request of a batch waits for others.
        observe: called with the size of each batch.
    """

    def __init__(self, session: Session, limits: Limits, observe: Callable[[int], None] = lambda size: None) -> None:
        self.session, self.limits, self.observe = session, limits, observe
        self.waiting: dict[PendingRequest, None] = {}  # in order of arrival
        self.open = True
        self._changed = asyncio.Event()

    @property
    def ready(self) -> bool:
        """True if a request can be added."""
        return self.open and len(self.waiting) < self.limits.queue

    def submit(self, request: PendingRequest) -> asyncio.Future[Explanation]:
        """Add a request, and return its answer.

        Raises:
            HTTPException: 429, the queue is full or closed.
        """
        if not self.ready:
            raise HTTPException(429, f"{self.limits.queue} requests wait; try again later", {"Retry-After": "1"})
        self.waiting[request] = None
        self._changed.set()
        request.answer.add_done_callback(lambda answer: self.waiting.pop(request, None))
        return request.answer

    def close(self) -> None:
        """Accept no more requests; :meth:`run` ends once those in the queue are explained."""
        self.open = False
        self._changed.set()

    async def run(self) -> None:
        """Explain requests until the queue is closed and empty."""
        thread = ThreadPoolExecutor(1, "whyformer-batches")
        try:
            while self.open or self.waiting:
                await self._until(lambda: self.waiting or not self.open)
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.limits.wait):
                        await self._until(lambda: len(self.waiting) >= self.limits.batch or not self.open)
                while self.waiting:
                    await self._explain(self._next(), thread)
        finally:
            thread.shutdown(wait=False)

    async def _until(self, condition: Callable[[], Any]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _next(self) -> list[PendingRequest]:
        """Remove from the queue its first request and others of the same kind."""
        key = next(iter(self.waiting)).batch_key
        batch = [request for request in self.waiting if request.batch_key == key][: self.limits.batch]
        for request in batch:
            del self.waiting[request]
        return batch

    async def _explain(self, batch: list[PendingRequest], thread: ThreadPoolExecutor) -> None:
        self.observe(len(batch))
        answers = await asyncio.get_running_loop().run_in_executor(thread, explain, self.session, batch)
        for request, answer in zip(batch, answers, strict=True):
            if request.answer.cancelled():
                continue
            if isinstance(answer, Explanation):
                request.answer.set_result(answer)
            else:
                request.answer.set_exception(answer)


def explain(session: Session, requests: list[PendingRequest]) -> list[Explanation | Exception]:
    """Return the answers to requests that differ in nothing but their content."""
    first = requests[0]
    try:
        session = replace(
            session,
            methods=((find(first.method), first.settings),),
            targets="predicted" if first.target is None else [first.target],
            progress=partial(while_awaited, requests),
        )
        reads = [RowContent(Row(i, str(i), partial(str, i)), request.content) for i, request in enumerate(requests)]
        return [_answer(result) for result in session.explain_in_memory(reads, len(reads))[0]]
    except asyncio.CancelledError:
        return [TimeoutError()] * len(requests)  # nobody reads them
    except Exception as error:  # it is the answer to these requests, and the next ones are explained
        return [error] * len(requests)


def _answer(result: RowResult) -> Explanation | Exception:
    if result.explanations:
        return result.explanations[0]
    failure = result.failures[0]
    return (TooLarge if failure.kind == TooLarge.__name__ else InputError)(failure.reason)


def while_awaited(
    requests: list[PendingRequest], work: Iterable[Any], description: str = "working", total: int | None = None
) -> Iterator[Any]:
    """Yield the steps of work as a progress bar does.

    Raises:
        CancelledError: every request is cancelled. It is no ``Exception``, after which rows are tried one by one.
    """
    for step in work:
        if all(request.answer.cancelled() for request in requests):
            raise asyncio.CancelledError
        yield step

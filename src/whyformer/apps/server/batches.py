"""Requests that wait together are explained together, by one thread that has the model to itself."""

from __future__ import annotations

import json
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from whyformer.errors import TooLarge
from whyformer.explanation.result import Explanation
from whyformer.jobs.batching import Failure, OutOfMemory, Read, Session
from whyformer.jobs.rows import Row
from whyformer.methods import find


class Full(Exception):  # noqa: N818 - the client may try again
    """As many requests wait as are allowed."""


class TimeIsUp(Exception):  # noqa: N818 - told as such
    """The work would take longer than a request may."""


class Refused(Exception):  # noqa: N818 - the client can mend it
    """There is no explanation; the message says why. ``large``: it would take too much memory."""

    def __init__(self, reason: str, large: bool = False) -> None:
        super().__init__(reason)
        self.large = large


@dataclass(frozen=True, eq=False)
class Asked:
    """One request: its content, what is asked of it, until when, and who waits for the answer."""

    content: Any
    method: str
    settings: dict[str, Any]
    target: int | str | None
    until: float
    answer: Future[Explanation] = field(default_factory=Future)

    @property
    def kind(self) -> str:
        """What requests of one batch have in common."""
        return json.dumps([type(self.content).__name__, self.method, self.settings, self.target], default=str)


class Batcher:
    """A queue with an end, and the thread that empties it.

    Args:
        session: the model; methods and targets are those of each request.
        size: the most requests that are explained together; wait: seconds that the first waits for others.
        length: the most that may wait.
        seen: told of the size of every batch.
        memory: bytes that one explanation may take beside the model, as estimated for texts.
    """

    def __init__(
        self, session: Session, size: int, wait: float, length: int, seen: Callable[[int], None] = lambda size: None,
        memory: float = math.inf,
    ) -> None:  # fmt: skip
        self.memory = memory
        self.session, self.size, self.wait, self.seen = session, size, wait, seen
        self.waiting: queue.Queue[Asked | None] = queue.Queue(length)
        self.open = True
        self._thread = threading.Thread(target=self._work, name="whyformer-batches", daemon=True)
        self._thread.start()

    def submit(self, asked: Asked) -> Future[Explanation]:
        """The explanation that will be.

        Raises:
            Full: too many wait, or the server is about to end.
        """
        if not self.open:
            raise Full
        try:
            self.waiting.put_nowait(asked)
        except queue.Full:
            raise Full from None
        return asked.answer

    def close(self) -> None:
        """Take no more, finish what was accepted, and end."""
        self.open = False
        self.waiting.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (first := self.waiting.get()) is not None:
            together, last = [first], False
            until = time.monotonic() + self.wait
            while len(together) < self.size and not last:
                try:
                    one = self.waiting.get(timeout=max(0.0, until - time.monotonic()))
                except queue.Empty:
                    break
                last = one is None
                together += [] if one is None else [one]
            kinds: dict[str, list[Asked]] = {}
            for one in together:
                if one.answer.set_running_or_notify_cancel():  # not those that nobody waits for any more
                    kinds.setdefault(one.kind, []).append(one)
            for alike in kinds.values():
                self._explain(alike)
            if last:
                return

    def _explain(self, alike: list[Asked]) -> None:
        self.seen(len(alike))
        first = alike[0]
        try:
            session = replace(
                self.session, methods=((find(first.method), first.settings),),
                targets="predicted" if first.target is None else [first.target],
                progress=Until(max(one.until for one in alike), self.memory),
            )  # fmt: skip
            reads = [Read(Row(i, str(i), partial(str, i)), one.content) for i, one in enumerate(alike)]
            found = self._halving(session, reads)
        except Exception as error:
            for one in alike:
                one.answer.set_exception(error)
            return
        for one, (explanation, failure) in zip(alike, found, strict=True):
            if explanation is not None:
                one.answer.set_result(explanation)
            else:
                assert failure is not None
                late = failure.kind == TimeIsUp.__name__
                large = failure.kind == TooLarge.__name__
                one.answer.set_exception(TimeIsUp() if late else Refused(failure.reason, large))

    def _halving(self, session: Session, reads: list[Read]) -> list[tuple[Explanation | None, Failure | None]]:
        size = len(reads)
        while True:
            try:
                found = session.explain(reads, size)
            except OutOfMemory:
                size = max(1, size // 2)
                continue
            return [(next(iter(x.explanations), None), next(iter(x.failures), None)) for x in found]


@dataclass(frozen=True)
class Until:
    """A progress that ends the work when its time is over, and says how much ``memory`` (bytes) it may take."""

    end: float
    memory: float

    def __call__(self, work: Iterable[Any], description: str = "working", total: int | None = None) -> Iterator[Any]:
        for item in work:
            if time.monotonic() > self.end:
                raise TimeIsUp
            yield item

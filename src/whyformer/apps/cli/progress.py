"""What a command is at while it takes its time: on standard error, only on a terminal, gone when it is done."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from rich.progress import Progress

Track = Callable[..., Iterable[Any]]


class Working:
    """One display for all that a command does; says nothing if ``silent`` or standard error is no terminal."""

    def __init__(self, silent: bool) -> None:
        self._bars: Progress | None = None
        if not silent and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
            from rich.progress import TimeElapsedColumn as Elapsed

            columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(bar_width=20),
                       MofNCompleteColumn(), Elapsed())  # fmt: skip
            self._bars = Progress(*columns, console=Console(stderr=True), transient=True)

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    @contextmanager
    def step(self, description: str) -> Iterator[None]:
        """Work of unknown length, such as loading a model."""
        if self._bars is None:
            yield
            return
        task = self._bars.add_task(description, total=None)
        try:
            yield
        finally:
            self._bars.remove_task(task)

    def track(self, work: Iterable[Any], description: str = "working", total: int | None = None) -> Iterable[Any]:
        """An iterable with a bar around it, as ``progress=`` of the library's functions takes it."""
        return work if self._bars is None else self._bar(self._bars, work, description, total)

    @staticmethod
    def _bar(bars: Progress, work: Iterable[Any], description: str, total: int | None) -> Iterator[Any]:
        task = bars.add_task(description, total=total)
        try:
            for item in work:
                yield item
                bars.advance(task)
        finally:
            bars.remove_task(task)

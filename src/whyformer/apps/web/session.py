"""What one visitor has: the input, what was computed for it, and the flag that stops work. Never shared."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from whyformer.explanation.result import Explanation
from whyformer.inputs.argument import Argument

Track = Callable[..., Iterable[Any]]
Made = TypeVar("Made")


class Stopped(Exception):  # noqa: N818 - no error: the visitor asked for it
    """Raised inside work that the visitor cancelled."""


@dataclass(frozen=True)
class View:
    """Everything that a result depends on; the page, the files, the snippet and the command line are made of it.

    Attributes:
        model: as the catalogue names it; place: what ``explain`` takes.
        methods: (name, settings that differ from the defaults), in the order shown.
        targets: class indices, in the order shown.
        look: how maps are drawn on pictures, options of :class:`whyformer.show.look.Look`; nothing is computed from it.
    """

    model: str
    place: str
    source: Argument
    methods: tuple[tuple[str, dict[str, Any]], ...]
    targets: tuple[int, ...]
    truncate: bool = False
    look: Mapping[str, Any] = field(default_factory=dict)

    def key(self, *more: Any) -> str:
        """The name, in the session's memory, of something about this model and input."""
        return json.dumps([self.place, self.source.digest, self.truncate, *more], sort_keys=True, default=str)


class Session:
    """One visitor's memory. ``made`` holds the last results by what they depend on, so nothing is computed twice.

    No dataclass: gradio would take one apart to show it to the browser.
    """

    def __init__(self, keep: int = 512) -> None:
        self.keep = keep
        self.made: dict[str, Any] = {}
        self.view: View | None = None
        self.results: list[Explanation] = []
        self.stop = threading.Event()

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Session:
        # gradio copies the initial state for each visitor: nothing may come along
        return Session(self.keep)

    def once(self, key: str, make: Callable[[], Made]) -> Made:
        """What is remembered under ``key``, made now if it is not."""
        found: Made = self.made.pop(key) if key in self.made else make()
        self.made[key] = found  # now the youngest
        while len(self.made) > self.keep:
            del self.made[next(iter(self.made))]
        return found

    def begin(self) -> None:
        """New work begins: what still runs keeps its own flag, which stays set."""
        self.stop.set()
        self.stop = threading.Event()

    def track(self, tell: Callable[[int, int | None, str], None] = lambda done, total, what: None) -> Track:
        """A wrapper (iterable, description, total) around long work, which ends it once the visitor cancels it."""
        stop = self.stop

        def around(work: Iterable[Any], description: str = "working", total: int | None = None) -> Iterator[Any]:
            for done, item in enumerate(work):
                if stop.is_set():
                    raise Stopped
                tell(done, total, description)
                yield item

        return around

"""What one visitor has, never shared: the input, and what the library made of it, kept under what it depends on."""

from __future__ import annotations

import json
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

import whyformer
from whyformer.apps.web.sizes import held
from whyformer.comparing import Refusal, each
from whyformer.errors import InputError, WhyformerError
from whyformer.evaluation.forwards import activated
from whyformer.evaluation.trust import Trust
from whyformer.explainer import Explainer
from whyformer.explanation.result import Explanation
from whyformer.inputs.argument import Argument
from whyformer.methods import find
from whyformer.models import Loaded
from whyformer.models.structure import find_blocks, refuse_unfit
from whyformer.prepared import Prepared

MOST_BYTES = 2**30
"""Of what all visitors' sessions remember together."""
PAUSE = 0.25
"""Seconds between two words about progress."""
GONE = 600.0
"""Seconds after which a visitor who left is forgotten."""
Track = Callable[..., Iterable[Any]]
Made = TypeVar("Made")


_SESSIONS: weakref.WeakSet[VisitorSession] = weakref.WeakSet()


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
        stored: whether the result is the stored example, which no model of this server made.
        asks: whether ``source`` is a prompt, and its answer what is explained; then ``picture`` is what it is about,
            ``length`` the most tokens of the answer, ``chat`` whether it is written as a message.
    """

    model: str
    place: str
    source: Argument
    methods: tuple[tuple[str, dict[str, Any]], ...]
    targets: tuple[int, ...]
    truncate: bool = False
    look: Mapping[str, Any] = field(default_factory=dict)
    stored: bool = False
    asks: bool = False
    picture: Argument | None = None
    length: int = 0
    chat: bool = False

    def key(self, *more: Any) -> str:
        """The name, in the session's memory, of something about this model and input."""
        return json.dumps([self.place, self.source.digest, self.truncate, *more], sort_keys=True, default=str)


class VisitorSession:
    """One visitor's memory. ``made`` holds the last results by what they depend on, so nothing is computed twice.

    No dataclass: gradio would take one apart to show it to the browser.

    Args:
        most: bytes that are remembered; the oldest are forgotten first. All sessions together have :data:`MOST_BYTES`.
    """

    def __init__(self, most: int = 2**28) -> None:
        self.most = most
        self.kind = "image"  # of input: which fields are shown
        self.left: float | None = None
        self.stop = threading.Event()
        self.subject: Any = None  # of the work that runs: PageInput.subject
        self.forget()
        _SESSIONS.add(self)

    def __deepcopy__(self, memo: Mapping[int, Any]) -> VisitorSession:
        # gradio copies the initial state for each visitor: the stored example comes along, and nothing else
        fresh = VisitorSession(self.most)
        fresh.asked, fresh.seen, fresh.view, fresh.results = self.asked, self.seen, self.view, list(self.results)
        return fresh

    def forget(self) -> None:
        """Everything that was made for this visitor."""
        self.made: dict[str, Any] = {}
        self.sizes: dict[str, dict[int, int]] = {}
        self.asked: Any = None  # what the view was made of, as it was entered
        self.seen: Any = None  # the input and the model of which the page says what the model says
        self.view: View | None = None
        self.results: list[Any] = []  # Explanations, or one Generation
        self.used = time.monotonic()

    def once(self, key: str, make: Callable[[], Made]) -> Made:
        """What is remembered under ``key``, made now if it is not."""
        found: Made = self.made[key] if key in self.made else make()
        self.keep(key, found)
        return found

    def keep(self, key: str, value: Any) -> None:
        """Remember something as the youngest; what there is no room for is forgotten, the oldest first."""
        self.drop(key)
        self.made[key], self.sizes[key], self.used = value, held(value), time.monotonic()
        while self.bytes > self.most:
            self.drop(next(iter(self.made)))
        for other in sorted(_SESSIONS, key=lambda one: one.used):
            gone = other.left is not None and time.monotonic() - other.left > GONE
            if gone or (other is not self and sum(one.bytes for one in _SESSIONS) > MOST_BYTES):
                other.forget()

    @property
    def bytes(self) -> int:
        """What is remembered; what several results share is counted once."""
        shared: dict[int, int] = {}
        for own in self.sizes.values():
            shared |= own
        return sum(shared.values())

    def drop(self, key: str) -> Any:
        """Forget one thing; what it was."""
        self.sizes.pop(key, None)
        return self.made.pop(key, None)

    def begin(self) -> threading.Event:
        """End what runs, and return the event that ends the work that begins now."""
        self.stop.set()
        self.stop, self.subject = threading.Event(), None
        return self.stop

    def leave(self) -> None:
        """End what runs, because the input has changed."""
        self.seen = None
        self.begin()

    def visit(self, here: bool) -> None:
        """The visitor's tab is open, or gone: then work ends, and what was made is forgotten after a while."""
        self.left = None if here else time.monotonic()
        if not here:
            self.stop.set()

    def track(self, progress: Callable[..., Any] | None = None, seconds: float = math.inf) -> Watch:
        """What long work reports to, and is ended by once the visitor cancels it or leaves."""
        return Watch(self.stop, progress, seconds)


class Watch:
    """A wrapper (iterable, description, total) around long work, which ends it once ``stop`` is set, or once it took
    so many seconds.

    ``progress`` is gradio's, told of it a few times a second.
    """

    def __init__(self, stop: threading.Event, progress: Callable[..., Any] | None, seconds: float) -> None:
        self.stop, self.progress, self.seconds = stop, progress, seconds
        self.last, self.end = 0.0, time.monotonic() + seconds

    def __call__(self, work: Iterable[Any], description: str = "working", total: int | None = None) -> Iterator[Any]:
        for done, item in enumerate(work):
            if self.stop.is_set():
                raise Stopped
            if (now := time.monotonic()) > self.end:
                long = f"{description} took more than {self.seconds:g} s"
                raise InputError(f"{long}: choose a cheaper method or settings")
            if self.progress is not None and now - self.last > PAUSE:
                self.last = now
                self.progress((done, total) if total else None, desc=description)
            yield item


# -- what the page asks of the library -------------------------------------------------------------------------------
@dataclass(frozen=True)
class Prediction:
    """What the model says of an input: classes from the likeliest down, or the numbers of a regression.

    Attributes:
        order: of the classes, from the highest logit down; of numbers as they come.
        figures: probabilities; or, where ``numeric``, the numbers.
    """

    order: tuple[int, ...]
    figures: tuple[float, ...]
    labels: dict[int, str]
    blocks: int
    numeric: bool = False

    def label(self, index: int) -> str:
        return self.labels.get(index, f"class {index}")

    def top(self, count: int = 5) -> list[tuple[int, str, float]]:
        return [(i, self.label(i), self.figures[i]) for i in self.order[:count]]


def ready(session: VisitorSession, loaded: Loaded, view: View) -> Prepared:
    """The model with this input, prepared once."""

    def make() -> Prepared:
        refuse_unfit(loaded.model)
        return Explainer(loaded, truncate=view.truncate).prepare(view.source.content)

    return session.once(view.key("ready"), make)


def predict(session: VisitorSession, loaded: Loaded, view: View) -> Prediction:
    """One plain forward pass."""
    prepared = ready(session, loaded, view)
    logits = prepared.logits().double().cpu()
    resolver = prepared.resolver()
    activation, labels = resolver.activation(logits), resolver.names(logits) or {}
    figures, numeric = activated(logits[0].numpy(), activation).tolist(), activation == "identity"
    order = range(len(figures)) if numeric else logits[0].argsort(descending=True, stable=True).tolist()
    return Prediction(tuple(order), tuple(figures), labels, len(find_blocks(loaded.model)), numeric)


def explain(session: VisitorSession, loaded: Loaded, view: View, track: Track) -> Iterator[Explanation | Refusal]:
    """The map of each method for each class, or why there is none, as each becomes ready."""

    def once(key: tuple[str, dict[str, Any], int], make: Callable[[], Explanation]) -> Explanation:
        same, own = view.key("map", *key[:2], "any class"), view.key("map", *key)
        e: Explanation = session.made[same] if same in session.made else session.once(own, make)
        if e.diagnostics.get("class_specific") is False:
            session.keep(same, session.drop(own) or e)
        return e

    asked = [(find(name), settings) for name, settings in view.methods]
    found = each(ready(session, loaded, view), asked, view.targets, progress=track, once=once)
    yield from track(found, "explaining", len(asked) * len(view.targets))


def judge(
    session: VisitorSession, loaded: Loaded, view: View, results: list[Explanation], track: Track
) -> Iterator[tuple[Explanation, Trust | str]]:
    """How far each map may be believed, or why that cannot be measured."""
    inputs, done = ready(session, loaded, view).inputs, list[Trust]()
    for e in track(results, "measuring", len(results)):
        measure = partial(whyformer.trust, e, loaded.model, inputs, loaded.processor, known=done)
        try:
            done.append(session.once(view.key("trust", e.method, e.settings, e.target.tolist()), measure))
        except WhyformerError as error:
            yield e, str(error)
        else:
            yield e, done[-1]


def attention(session: VisitorSession, loaded: Loaded, view: View) -> Tensor:
    """``[L, N, N]`` the attention maps of all blocks on the text, averaged over heads: row = who looks."""

    def make() -> Tensor:
        maps = Explainer(loaded, truncate=view.truncate).attention_maps(view.source.content)
        return torch.stack([maps.matrix(block) for block in range(maps.blocks)])

    return session.once(view.key("attention"), make)

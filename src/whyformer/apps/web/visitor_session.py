"""The session of one visitor: the input, cached results, and the work that runs. Nothing is shared between visitors."""

from __future__ import annotations

import json
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

import whyformer
from whyformer.apps.web.page_input import PageInput
from whyformer.comparing import Refusal, explain_each
from whyformer.errors import InputError, WhyformerError
from whyformer.evaluation.trust import Trust
from whyformer.explainer import Explainer
from whyformer.explanation.candidates import MANY, likeliest
from whyformer.explanation.result import Explanation
from whyformer.inputs.argument import Argument
from whyformer.methods import find
from whyformer.models import Loaded
from whyformer.prepared import Prepared
from whyformer.progress import Track
from whyformer.targets import class_index

MOST_BYTES = 2**30
"""Bytes that the caches of all sessions may hold together."""
PAUSE = 0.25
"""Seconds between two progress updates."""
Value = TypeVar("Value")


_SESSIONS: weakref.WeakSet[VisitorSession] = weakref.WeakSet()


class Stopped(Exception):  # noqa: N818 - no error: the visitor asked for it
    """Raised in work that was cancelled."""


@dataclass(frozen=True)
class View:
    """Everything that a result depends on. The page, files, snippet and command line are derived from it.

    Attributes:
        page_input: the values of the controls, with the name of the model in the catalogue.
        place: name or folder of the model for :func:`whyformer.explain`.
        source: the input, or the prompt of an answer.
        methods: (name, settings that differ from the defaults), in the order of the page.
        targets: class indices or written targets, in the order of the page.
        picture: the picture that comes with a prompt.
        stored: True for the stored example, which no model of this server computed.
    """

    page_input: PageInput
    place: str
    source: Argument
    methods: tuple[tuple[str, dict[str, Any]], ...] = ()
    targets: tuple[int | str, ...] = ()
    picture: Argument | None = None
    stored: bool = False

    @property
    def asks(self) -> bool:
        """True if the input is a prompt and its answer is explained."""
        return self.page_input.kind == "answer"

    @property
    def content(self) -> Any:
        """The input of the model."""
        text, pair = self.source.content, self.page_input.pair
        return {"text": text, "text_pair": pair} if pair else text

    @property
    def prompt(self) -> Any:
        """The prompt of an answer: a text, or a message."""
        return [{"role": "user", "content": self.source.content}] if self.page_input.chat else self.source.content

    @property
    def look(self) -> dict[str, Any]:
        """Options of :class:`whyformer.show.look.Look` for maps on pictures; the scores do not depend on it."""
        return self.page_input.look if self.source.kind == "image" else {}

    def key(self, *more: Any) -> str:
        """Return the cache key of a value that depends on the model, the input and ``more``."""
        subject = [self.place, self.source.digest, self.page_input.pair, self.page_input.options.named]
        return json.dumps([*subject, *more], sort_keys=True, default=str)


class VisitorSession:
    """The state of one visitor. ``cache`` holds results by their keys, so that nothing is computed twice.

    This is no dataclass, because gradio would convert one to JSON for the browser.

    Args:
        most: bytes of the cache; the oldest entries are dropped first. All sessions together have :data:`MOST_BYTES`.
    """

    def __init__(self, most: int = 2**28) -> None:
        self.most = most
        self.number = 0  # of the newest input that is known: PageInput.number
        self.stop = threading.Event()
        self.forget()
        _SESSIONS.add(self)

    def __deepcopy__(self, memo: Mapping[int, Any]) -> VisitorSession:
        # gradio copies the initial state for each visitor; the copy has the stored example only
        fresh = VisitorSession(self.most)
        fresh.subject, fresh.view, fresh.results = self.subject, self.view, list(self.results)
        return fresh

    def forget(self) -> None:
        """Remove the results and the cache."""
        self.cache: dict[str, Any] = {}
        self.bytes = 0
        self.subject: Any = None  # PageInput.subject of the prediction that the page shows
        self.view: View | None = None
        self.results: list[Any] = []  # Explanations, or one Generation
        self.used = time.monotonic()

    def once(self, key: str, make: Callable[[], Value]) -> Value:
        """Return the cached value of ``key``, computed with ``make`` if there is none."""
        value: Value = self.cache[key] if key in self.cache else make()
        self.keep(key, value)
        return value

    def keep(self, key: str, value: Any) -> None:
        """Add a value to the cache, and drop the oldest values while it is too large."""
        self.cache.pop(key, None)
        self.cache[key], self.used = value, time.monotonic()
        while (size := memory_of(self.cache)) > self.most:
            del self.cache[next(iter(self.cache))]
        self.bytes = size
        for other in sorted(_SESSIONS, key=lambda session: session.used):
            if other is not self and sum(session.bytes for session in _SESSIONS) > MOST_BYTES:
                other.forget()

    def begin(self) -> None:
        """End what runs; ``stop`` ends the work that begins now."""
        self.stop.set()
        self.stop = threading.Event()

    def leave(self, number: int | None = None) -> None:
        """End what runs and waits for inputs before that of a number; by default for all inputs until now."""
        number = self.number + 1 if number is None else number
        if number > self.number:
            self.number, self.subject = number, None
            self.stop.set()

    def track(self, progress: Callable[..., Any] | None = None, seconds: float = math.inf) -> Watch:
        """Return a progress bar for the work that runs, which also ends it."""
        return Watch(self.stop, progress, seconds)


def memory_of(value: Any, counted: set[int] | None = None) -> int:
    """Return the bytes of all tensors, arrays, pictures and texts in a value; those that occur twice, by identity, are
    counted once. Models are not counted: all sessions share them."""
    counted = set() if counted is None else counted
    place = value.untyped_storage().data_ptr() if isinstance(value, Tensor) else id(value)
    if place in counted or value is None or isinstance(value, nn.Module | type | int | float):
        return 0
    counted.add(place)
    if isinstance(value, Tensor):
        return value.untyped_storage().nbytes()
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, Image.Image):
        return value.width * value.height * len(value.getbands())
    if isinstance(value, str | bytes):
        return len(value)
    if is_dataclass(value):
        return sum(memory_of(getattr(value, field.name), counted) for field in fields(value))
    if isinstance(value, Iterable) and hasattr(value, "__len__"):
        return sum(memory_of(item, counted) for item in (value.values() if isinstance(value, Mapping) else value))
    return 0


class Watch:
    """A progress bar, called with (iterable, description, total), that ends work when ``stop`` is set or time is up.

    Args:
        stop: ends the work when set.
        progress: gradio's progress, updated a few times a second.
        seconds: time limit.
    """

    def __init__(self, stop: threading.Event, progress: Callable[..., Any] | None, seconds: float) -> None:
        self.stop, self.progress, self.seconds = stop, progress, seconds
        self.last, self.end = 0.0, time.monotonic() + seconds

    def __call__(self, work: Iterable[Any], description: str = "working", total: int | None = None) -> Iterator[Any]:
        for done, item in enumerate(work):
            if self.stop.is_set():
                raise Stopped
            if (now := time.monotonic()) > self.end:
                raise InputError(
                    f"{description} took more than {self.seconds:g} s: choose a cheaper method or settings"
                )
            if self.progress is not None and now - self.last > PAUSE:
                self.last = now
                self.progress((done, total) if total else None, desc=description)
            yield item


# -- calls of the library --------------------------------------------------------------------------------------------
def ready(session: VisitorSession, loaded: Loaded, view: View) -> Prepared:
    """Return the model prepared with the input of a view, from the cache if possible."""

    def make() -> Prepared:
        return Explainer(loaded, **view.page_input.options.named).prepare(view.content)

    return session.once(view.key("ready"), make)


def predict(session: VisitorSession, loaded: Loaded, view: View) -> Explanation:
    """Return the model's prediction, from one forward pass, as an explanation without scores: the row of logits that
    the target of the page reads. Of a long row without a name for each class, such as a vocabulary, it has the
    likeliest and the chosen classes only."""
    prepared, target = ready(session, loaded, view), view.page_input.target or None
    resolver, logits = prepared.resolver(target), prepared.logits(target).double().cpu()
    names, count = resolver.names(logits, MANY) or {}, logits.shape[-1]
    facts: dict[str, Any] = {"logits": logits, "activation": resolver.activation(logits)}
    if len(names) < count:
        facts |= likeliest(logits, _chosen(view.page_input, names, count), MANY)
    row = facts["classes"][0].tolist() if "classes" in facts else range(count)
    facts["labels"] = {i: f"class {i}" for i in row} | names
    return Explanation(torch.zeros(1, 1), "token", "", {}, torch.zeros(1, dtype=torch.long), **facts)


def _chosen(page_input: PageInput, names: Mapping[int, str], count: int) -> list[Tensor]:
    """Return the classes that were chosen on the page, of a row of ``count`` logits."""
    indices = list[int]()
    for name in page_input.classes:
        with suppress(InputError):  # a written target, or a class that Explain refuses
            indices.append(class_index(name, names, count))
    return list(torch.tensor(indices, dtype=torch.long)[:, None])


def ranked(e: Explanation) -> list[tuple[int, str, float, float | None]]:
    """Return (index, name, logit, probability) of the classes from the highest logit down; of a regression (index,
    name, value, None) of its outputs in their order."""
    rows = e.top(0, e.logits.shape[-1])
    return sorted(rows) if e.numeric else rows


def explain(session: VisitorSession, loaded: Loaded, view: View, track: Track) -> Iterator[Explanation | Refusal]:
    """Yield the map of each method for each class as soon as it is computed, or the reason why it is missing."""

    def once(key: tuple[str, dict[str, Any], int | str], make: Callable[[], Explanation]) -> Explanation:
        name, settings, target = key
        row = target if isinstance(target, str) else ""  # a written target may read another row
        any_class, this_class = view.key("map", name, settings, "any class", row), view.key("map", *key)
        e: Explanation = session.cache[any_class] if any_class in session.cache else session.once(this_class, make)
        if e.diagnostics.get("class_specific") is False:
            session.cache.pop(this_class, None)
            session.keep(any_class, e)
        return e

    methods = [(find(name), settings) for name, settings in view.methods]
    results = explain_each(ready(session, loaded, view), methods, view.targets, progress=track, once=once)
    yield from track(results, "explaining", len(methods) * len(view.targets))


def judge(
    session: VisitorSession, loaded: Loaded, view: View, results: list[Explanation], track: Track
) -> Iterator[tuple[Explanation, Trust | str]]:
    """Yield each map with its faithfulness, or with the reason why that cannot be measured."""
    inputs, done = ready(session, loaded, view).inputs, list[Trust]()
    for e in track(results, "measuring", len(results)):
        measure = partial(whyformer.trust, e, loaded.model, inputs, loaded.processor, known=done)
        try:
            about = e.target.tolist(), e.diagnostics.get("target")
            done.append(session.once(view.key("trust", e.method, e.settings, *about), measure))
        except WhyformerError as error:
            yield e, str(error)
        else:
            yield e, done[-1]


def attention(session: VisitorSession, loaded: Loaded, view: View) -> Tensor:
    """Return the attention maps ``[L, Q, K]`` of all blocks for a text, averaged over heads."""

    def make() -> Tensor:
        maps = Explainer(loaded, **view.page_input.options.named).attention_maps(view.content)
        return torch.stack([maps.matrix(block) for block in range(maps.blocks)])

    return session.once(view.key("attention"), make)

"""Answers of language models on the page: generate and explain."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

import whyformer
from whyformer.apps.web import address, controls, examples
from whyformer.apps.web.messages import status
from whyformer.apps.web.page_input import PageInput
from whyformer.apps.web.reproduce import surroundings
from whyformer.apps.web.visitor_session import Value, View, VisitorSession, Watch
from whyformer.errors import InputError
from whyformer.explanation.counts import amount
from whyformer.explanation.generation import Generation
from whyformer.methods import find
from whyformer.models import Loaded
from whyformer.progress import Track
from whyformer.show.html import answer, render

if TYPE_CHECKING:
    from whyformer.apps.web.handlers import Handlers


def view_of(handlers: Handlers, page_input: PageInput) -> tuple[Loaded, View]:
    """Return the model and the view, checked. A language model leaves out a picture that is an example."""
    if len(page_input.methods) != 1:
        raise InputError("an answer is explained by one method: choose one")
    find(page_input.methods[0])  # checked before a model is loaded
    prompt = handlers.source("text", None, page_input.sentence)
    picture = None if page_input.picture is None else handlers.source("image", page_input.picture, "")
    if not 1 <= page_input.length <= handlers.limits.tokens:
        raise InputError(f"an answer must have 1 to {handlers.limits.tokens} tokens here, not {page_input.length}")
    loaded = handlers.catalogue.load(page_input.model)
    if loaded.modality == "text" and examples.is_example(page_input.picture, handlers.uploads):
        page_input, picture = replace(page_input, picture=None), None
    if loaded.modality not in ("text", "both"):
        raise InputError(
            f"{page_input.model} reads {loaded.reads} and writes nothing: choose a model that generates text"
        )
    if picture is not None and loaded.modality != "both":
        raise InputError(f"{page_input.model} reads no pictures: choose another model, or remove the picture")
    if not getattr(loaded.model, "can_generate", lambda: True)():
        raise InputError(f"{page_input.model} cannot generate text: choose a model that generates text")
    if picture is not None and page_input.chat:
        raise InputError("a prompt with a picture is formatted by the model's processor: untick the message")
    methods = controls.methods_of(page_input, controls.blocks_of(loaded))
    return loaded, View(page_input, handlers.catalogue.place(page_input.model), prompt, methods, picture=picture)


def ask(handlers: Handlers, session: VisitorSession, page_input: PageInput, track: Watch) -> Iterator[dict[str, Any]]:
    """Yield updates: the text while it is generated, then the explained answer."""
    began = time.monotonic()
    loaded, view = view_of(handlers, page_input)
    yield {"status": status(f"{page_input.model} answers …", busy=True)}
    key = _key(view)
    if (g := session.cache.get(key)) is None:
        g = yield from stream_text(partial(_answered, loaded, view), track, partial(_writing, view))
    session.keep(key, g)
    session.view, session.results = view, [g]
    drawn = render("web/answer.html", card=Markup(answer.card(g)))
    finished = status(f"{amount(len(g), 'token')} in {time.monotonic() - began:.1f} s in all.")
    updates = {"status": finished, "board": drawn, "trust": "", "address": address.fragment(view, handlers.uploads)}
    yield surroundings(view) | updates


def stream_text(
    make: Callable[[Track], Value], watch: Watch, updates_for: Callable[[str], dict[str, Any]]
) -> Generator[dict[str, Any], None, Value]:
    """Run ``make`` in a thread and return its result; meanwhile yield updates with the text generated so far.

    Args:
        make: called with a progress bar.
        watch: ends the work.
        updates_for: returns the updates for a text.
    """
    texts: SimpleQueue[str | None] = SimpleQueue()

    def track(work: Iterable[Any], description: str = "working", total: int | None = None) -> Iterator[Any]:
        for item in watch(work, description, total):
            if isinstance(item, str):
                texts.put(item)
            yield item

    with ThreadPoolExecutor(1, "whyformer-answer") as pool:
        future = pool.submit(copy_context().run, make, track)
        future.add_done_callback(lambda _: texts.put(None))
        try:
            while (text := texts.get()) is not None:
                yield updates_for(text)
        finally:
            if not future.done():  # this generator was closed
                watch.stop.set()
    return future.result()


def _writing(view: View, text: str) -> dict[str, Any]:
    """Return updates with the prompt and the text generated so far."""
    labels = ("User", "Assistant") if view.page_input.chat else ("Prompt", "Answer")
    messages = list(zip(labels, (view.source.content, text), strict=True))
    return {"board": render("web/writing.html", messages=messages), "trust": "", "code": ""}


def _answered(loaded: Loaded, view: View, track: Track) -> Generation:
    ((method, settings),) = view.methods
    picture = None if view.picture is None else view.picture.content
    g = whyformer.explain_generation(
        loaded.model, view.prompt, None, method, loaded.processor, images=picture, progress=track,
        max_new_tokens=view.page_input.length, **view.page_input.options.named, **settings,
    )  # fmt: skip
    assert isinstance(g, Generation)
    return replace(g, model=view.page_input.model)


def _key(view: View) -> str:
    picture = None if view.picture is None else view.picture.digest
    return view.key("answer", picture, view.page_input.length, view.page_input.chat, *view.methods)

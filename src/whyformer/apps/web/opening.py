"""Views that the page shows without a click: the stored example, the first example of a kind, that of an address."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import gradio as gr

from whyformer.apps.web import address, controls, examples, maps
from whyformer.apps.web.examples import PHOTOGRAPH, START_MODEL, STORED_MODEL
from whyformer.apps.web.handlers import Entered, Handlers, Updates, fields_of, offered, predicted, sliders_of
from whyformer.apps.web.messages import PageError, piece, sentences, status
from whyformer.apps.web.page_input import PageInput
from whyformer.apps.web.reproduce import surroundings
from whyformer.apps.web.visitor_session import View, VisitorSession
from whyformer.inputs.argument import Argument
from whyformer.inputs.pictures import open_picture
from whyformer.methods import find


def stored(handlers: Handlers, session: VisitorSession, number: int | None = None) -> Updates:
    """Return updates that show the stored example and its input, as if it had just been explained."""
    e = examples.stored()
    picture = open_picture(PHOTOGRAPH)
    place = str(examples.copied(PHOTOGRAPH, handlers.uploads))
    source = Argument(picture, PHOTOGRAPH.stem, PHOTOGRAPH.name)
    asked = PageInput("image", place, model=STORED_MODEL, methods=[e.method])
    view = View(asked, STORED_MODEL, source, ((e.method, {}),), (int(e.target[0]),), stored=True)
    hint = "Stored result: no model was run. For your own photograph, drop it, choose a model below, and press Explain."
    shown = handlers.switch(session, "image", number)
    result = {
        **predicted(asked, e, STORED_MODEL), **surroundings(view), "form": handlers.form(asked),
        "status": status(hint), "board": maps.board(session, view, [e]),
        "trust": maps.trusted([(e, e.diagnostics["trust"][0])]),
        "model": STORED_MODEL if handlers.catalogue.hub else None, "picture": {"value": place}, "address": "",
        "methods": {"value": [e.method]},
    }
    session.seen, session.view, session.results = asked.subject, view, [e]
    return shown | result | {name: shown[name] | result[name] for name in ("picture", "methods", "classes")}


def switch(handlers: Handlers, session: VisitorSession, entered: Entered) -> Iterator[Updates]:
    """Show the fields of another kind of input. If the visitor has entered nothing, they hold the first example; for
    pictures, the stored example with its result is shown."""
    with suppress(PageError), sentences():
        asked = PageInput.read(entered)
        untouched = examples.untouched(asked, handlers.uploads)
        if asked.kind == "image" and untouched:
            yield stored(handlers, session, asked.number)
            return
        shown = handlers.switch(session, asked.kind, asked.number)
        first = examples.entered(asked.kind, 0, handlers.uploads) if untouched else {}
        yield shown | {name: shown[name] | {"value": value} for name, value in first.items()}


def begin(handlers: Handlers, session: VisitorSession, entered: Entered, progress: Any = None) -> Iterator[Updates]:
    """After :func:`switch`, explain the first example if the visitor has entered nothing; else show the settings."""
    with suppress(PageError), sentences():
        asked = PageInput.read(entered)
        if asked.kind == "image" or not examples.untouched(asked, handlers.uploads):
            yield from handlers.settings(session, entered)
            return
        yield from handlers.look(session, entered)
        yield from handlers.explain(session, entered, progress)


def restore(handlers: Handlers, session: VisitorSession, given: Entered, progress: Any = None) -> Iterator[Updates]:
    """Show the input and the results of the view in the page's address, which is sent in place of the settings.

    A model that is neither loaded nor in the list is not loaded: a link alone never starts a download.
    """
    try:
        with sentences():
            entered = address.read(given["settings"], handlers.uploads)
            if entered is None:
                return
            session.forget()
            asked = PageInput.read(entered)
            handlers.catalogue.place(asked.model)
            for name in asked.methods:
                find(name)
            form = handlers.form(asked)
    except PageError as error:
        session.forget()
        nothing = {"board": piece("empty", words="The maps appear here."), "says": "", "picture": None}
        yield nothing | {"status": status(str(error), error=True)}
        return
    shown = handlers.switch(session, asked.kind, asked.number) | asdict(asked)
    shown |= {"form": form, "decided": asked.model not in START_MODEL.values()}
    del shown["settings"]
    for name, visible in (fields_of(asked.kind) | sliders_of(asked.style)).items():
        shown[name] = {**visible, "value": shown[name]}
    shown["methods"] = gr.update(choices=offered(asked.kind), value=asked.methods)
    shown["classes"] = gr.update(visible=asked.kind != "answer")  # their names are known after the prediction
    if any(controls.read_form(asked.settings).values()):  # the browser does not read a form that is folded
        shown["accordion"] = gr.update(open=True)
    is_loaded = handlers.catalogue.get(asked.model)
    if is_loaded:  # in one update, because the browser drops some while it builds the page
        *_, known = handlers.look(session, entered)
        shown |= known
    yield shown
    if not is_loaded:
        if asked.model not in handlers.catalogue.names():
            yield {"status": status("Press Explain to load the model and see this view.")}
            return
        yield from handlers.look(session, entered)
    yield from handlers.explain(session, entered, progress)

"""Views that the page shows without a click: the stored example, the first example of a kind, that of an address."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
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
    page_input = PageInput("image", place, model=STORED_MODEL, methods=[e.method])
    view = View(page_input, STORED_MODEL, source, ((e.method, {}),), (int(e.target[0]),), stored=True)
    hint = "Stored result: no model was run. For your own photograph, drop it, choose a model below, and press Explain."
    updates = handlers.switch(session, "image", number)
    result = {
        **predicted(page_input, e, STORED_MODEL), **surroundings(view), "form": handlers.form(page_input),
        "status": status(hint), "board": maps.board(session, view, [e]),
        "trust": maps.trusted([(e, e.diagnostics["trust"][0])]),
        "model": STORED_MODEL if handlers.catalogue.hub else None, "picture": {"value": place}, "address": "",
        "methods": {"value": [e.method]},
    }
    session.subject, session.view, session.results = page_input.subject, view, [e]
    return updates | result | {name: updates[name] | result[name] for name in ("picture", "methods", "classes")}


def switch(handlers: Handlers, session: VisitorSession, entered: Entered) -> Iterator[Updates]:
    """Show the fields of another kind of input. If the visitor has entered nothing, they hold the first example; for
    pictures, the stored example with its result is shown."""
    with suppress(PageError), sentences():
        page_input = PageInput.read(entered)
        untouched = examples.untouched(page_input, handlers.uploads)
        if page_input.kind == "image" and untouched:
            yield stored(handlers, session, page_input.number)
            return
        updates = handlers.switch(session, page_input.kind, page_input.number)
        first = examples.entered(page_input.kind, 0, handlers.uploads) if untouched else {}
        if not untouched and examples.is_example(page_input.picture, handlers.uploads):
            first = {"picture": None}  # not a part of the visitor's question
        yield updates | {name: updates[name] | {"value": value} for name, value in first.items()}


def begin(handlers: Handlers, session: VisitorSession, entered: Entered, progress: Any = None) -> Iterator[Updates]:
    """After :func:`switch`, explain the first example if the visitor has entered nothing; else show the settings."""
    with suppress(PageError), sentences():
        page_input = PageInput.read(entered)
        if page_input.kind == "image" or not examples.untouched(page_input, handlers.uploads):
            yield from handlers.settings(session, entered)
            return
        yield from handlers.look(session, entered)
        yield from handlers.explain(session, entered, progress)


def restore(handlers: Handlers, session: VisitorSession, sent: Entered, progress: Any = None) -> Iterator[Updates]:
    """Show the input and the results of the view in the page's address, which is sent in place of the settings.

    A model that is neither loaded nor in the list is not loaded: a link alone never starts a download.
    """
    try:
        with sentences():
            entered = address.read(sent["settings"], handlers.uploads)
            if entered is None:
                return
            session.forget()
            page_input = PageInput.read(entered)
            handlers.catalogue.place(page_input.model)
            for name in page_input.methods:
                find(name)
            form = handlers.form(page_input)
    except PageError as error:
        session.forget()
        nothing = {"board": piece("empty"), "says": "", "picture": None}
        yield nothing | {"status": status(str(error), error=True)}
        return
    updates = handlers.switch(session, page_input.kind, page_input.number) | page_input.controls
    updates |= {"form": form, "decided": page_input.model not in START_MODEL.values()}
    del updates["settings"]
    for name, visible in (fields_of(page_input.kind) | sliders_of(page_input.style)).items():
        updates[name] = {**visible, "value": updates[name]}
    updates["methods"] = gr.update(choices=offered(page_input.kind), value=page_input.methods)
    updates["classes"] = gr.update(visible=page_input.kind != "answer")  # their names are known after the prediction
    settings = controls.read_form(page_input.settings).values()
    if page_input.target or any(settings):  # the browser does not read a form that is folded
        updates["accordion"] = gr.update(open=True)
    is_loaded = handlers.catalogue.get(page_input.model)
    if is_loaded:  # in one update, because the browser drops some while it builds the page
        *_, prediction = handlers.look(session, entered)
        updates |= prediction
    yield updates
    if not is_loaded:
        if page_input.model not in handlers.catalogue.names():
            yield {"status": status("Press Explain to load the model and see this view.")}
            return
        yield from handlers.look(session, entered)
    yield from handlers.explain(session, entered, progress)

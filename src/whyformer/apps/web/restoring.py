"""A view shown again from the page's address, as after a reload."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gradio as gr

from whyformer.apps.web import address, controls, examples
from whyformer.apps.web.asking import PageInput
from whyformer.apps.web.handlers import RESULTS, Handlers, fields_of, offered
from whyformer.apps.web.telling import Told, sentences, status
from whyformer.apps.web.work import VisitorSession
from whyformer.methods import find

PARTS = (*address.CONTROLS, "says", "settings", "form", "examples", *RESULTS)
"""The parts of the page that an address fills, in the order of the outputs."""


def restore(
    handlers: Handlers, session: VisitorSession, fragment: Any, progress: Any = None
) -> Iterator[tuple[Any, ...]]:
    """The controls and the results of the view that an address names, as values of :data:`PARTS`; nothing without one.

    A model that is neither loaded nor offered by name is not loaded: a link alone never starts a download.
    """
    try:
        with sentences():
            entered = address.read(fragment, handlers.uploads)
            if entered is None:
                yield _parts()
                return
            asked = PageInput.read(entered)
            handlers.catalogue.place(asked.model)
            for name in asked.methods:
                find(name)
            given = controls.read_form(asked.settings)
            form = controls.form(asked.methods, given, 0)
    except Told as told:
        yield _parts(status=status(str(told), error=True))
        return
    shown = dict(zip(address.CONTROLS, entered, strict=False)) | {"picture": asked.picture}
    for name, visible in fields_of(asked.kind).items():
        shown[name] = {**visible, "value": shown[name]}
    kept = asked.look.get("keep") is not None
    shown["opacity"] = gr.update(value=shown["opacity"], visible=not kept)
    shown["keep"] = gr.update(value=shown["keep"], visible=kept)
    shown["methods"] = gr.update(choices=offered(asked.kind), value=asked.methods)
    shown["classes"] = gr.update(visible=asked.kind != "answer")  # their names are known once the model was asked
    # a folded form would not be there for what is read from it
    shown["settings"] = gr.update(open=True) if any(given.values()) else gr.skip()
    there = handlers.catalogue.has(asked.model)
    shown |= {"form": form, "examples": examples.offered(asked.kind)}
    if there:  # all at once: of what comes in quick succession while the page is being built some is lost
        *_, known = handlers.look(session, *entered)
        shown |= dict(zip(("says", "classes", "form", "status"), known, strict=True))
    yield _parts(**shown)
    if not there:
        if asked.model not in handlers.catalogue.names():
            yield _parts(status=status("Press Explain to load the model and see this view."))
            return
        for says, classes, form, said in handlers.look(session, *entered):
            yield _parts(says=says, classes=classes, form=form, status=said)
    for step in handlers.explain(session, *entered, progress=progress):
        yield _parts(**dict(zip(RESULTS, step, strict=True)))


def _parts(**new: Any) -> tuple[Any, ...]:
    return tuple(new.get(name, gr.skip()) for name in PARTS)

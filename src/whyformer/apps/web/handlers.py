"""Functions of the page, between gradio's components and the library. A visitor's state is in the session."""

from __future__ import annotations

import base64
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gradio as gr

from whyformer.apps.web import address, answers, controls, examples, maps, reproduce, visitor_session
from whyformer.apps.web.examples import START_MODEL
from whyformer.apps.web.limits import Catalogue, PageLimits, missing
from whyformer.apps.web.messages import CANCELLED, PageError, piece, sentences, status
from whyformer.apps.web.page_input import FIELDS, PageInput, drawing_of, number_of
from whyformer.apps.web.visitor_session import View, VisitorSession
from whyformer.comparing import Refusal
from whyformer.defaults import grouped
from whyformer.errors import InputError, NeedsTarget
from whyformer.evaluation.trust import Trust
from whyformer.explanation.counts import amount
from whyformer.explanation.result import Explanation
from whyformer.inputs.argument import Argument
from whyformer.inputs.argument import sentence as as_argument
from whyformer.methods import find, list_methods
from whyformer.models import Loaded
from whyformer.models.structure import class_count
from whyformer.targets import class_index, is_written_target, with_class

Entered = Mapping[str, Any]
"""Values of :data:`~whyformer.apps.web.page_input.CONTROLS` by name, as a browser sent them."""
Updates = dict[str, Any]
"""New values of components by their names in :mod:`.page`; other components do not change."""


@dataclass(frozen=True)
class Handlers:
    """Functions of the page.

    Attributes:
        catalogue: the models.
        limits: limits of inputs.
        uploads: the only folder from which files are read.
        visitors: sessions by the visitor's identifier.
        ended: set when the page ends.
    """

    catalogue: Catalogue
    limits: PageLimits
    uploads: Path
    visitors: weakref.WeakValueDictionary[str, VisitorSession] = field(default_factory=weakref.WeakValueDictionary)
    ended: threading.Event = field(default_factory=threading.Event)

    def unload(self, request: gr.Request) -> None:
        """End the work of a visitor who closed the tab."""
        session = self.visitors.get(str(request.session_hash))
        if session is not None:
            session.stop.set()

    def load_models(self) -> None:
        """Load the bundled models and the first one of ``--model-dir``. An error is reported to the visitor who chooses
        that model."""
        for name in self.catalogue.names()[: len(START_MODEL) + 1]:
            if self.ended.is_set():
                return
            with suppress(PageError), sentences():
                self.catalogue.load(name)

    def end(self) -> None:
        """End the work of all visitors at its next step."""
        self.ended.set()
        for reference in self.visitors.valuerefs():
            if (session := reference()) is not None:
                session.stop.set()

    # -- reading the input ---------------------------------------------------------------------------------------
    def source(self, kind: str, picture: Any, sentence: Any) -> Argument:
        if kind == "text":
            return as_argument(self.limits.text(sentence))
        opened = self.limits.picture(picture, self.uploads)
        return Argument(opened, Path(picture).stem, Path(picture).name)

    def ready(self, session: VisitorSession, page_input: PageInput) -> tuple[Loaded, View, Explanation]:
        """Return the model, the view without methods, and the prediction."""
        source = self.source(page_input.kind, page_input.picture, page_input.sentence)
        loaded = self.catalogue.load(page_input.model)
        if loaded.modality != source.kind:
            reads = loaded.reads
            raise InputError(f"{page_input.model} reads {reads}: choose another model, or give it {reads}")
        if page_input.pair:
            self.limits.text(page_input.pair)
        view = View(page_input, self.catalogue.place(page_input.model), source)
        return loaded, view, visitor_session.predict(session, loaded, view)

    def full_view(self, session: VisitorSession, page_input: PageInput) -> tuple[Loaded, View, Explanation]:
        """Return the model, the view and the prediction, checked."""
        if not page_input.methods:
            raise InputError("choose at least one method")
        for name in page_input.methods:  # checked before a model is loaded
            find(name)
        loaded, view, prediction = self.ready(session, page_input)
        methods = controls.methods_of(page_input, controls.blocks_of(loaded))
        targets = targets_of(page_input, prediction, class_count(loaded.model))
        if (count := len(methods) * len(targets)) > self.limits.maps:
            raise InputError(
                f"{len(methods)} methods for {len(targets)} classes are {count} maps; at most {self.limits.maps} are "
                "drawn at once: choose fewer"
            )
        return loaded, replace(view, methods=methods, targets=targets), prediction

    def form(self, page_input: PageInput) -> str:
        """Return the form of settings as HTML."""
        blocks = controls.blocks_of(self.catalogue.get(page_input.model))
        return controls.form(page_input.methods, controls.read_form(page_input.settings), blocks)

    # -- controls ------------------------------------------------------------------------------------------------
    def switch(self, session: VisitorSession, kind: str, number: int | None = None) -> Updates:
        """Show the fields (:func:`fields_of`), the default model and the methods for another kind of input."""
        session.leave(number)
        updates = fields_of(kind)
        updates["classes"] |= {"choices": [], "value": []}
        defaults = {"model": START_MODEL[kind], "methods": gr.update(choices=offered(kind))}
        return updates | defaults | {"decided": False, "says": "", "examples": examples.offered(kind)}

    def example(self, _: VisitorSession, kind: str, number: Any, named: bool) -> Updates:
        """Enter an example, and the model for such examples unless the visitor has chosen one (``named``)."""
        entered = examples.entered(kind, number, self.uploads)
        return entered if named and kind != "answer" else entered | {"model": START_MODEL[kind]}

    def uploaded(self, _: VisitorSession, named: bool) -> Updates:
        """Clear the model for an uploaded picture unless the visitor has chosen one (``named``): the bundled models
        read every photograph as handwritten digits."""
        return {} if named else {"model": gr.update(value=None)}

    def leave(self, session: VisitorSession, entered: Entered) -> Iterator[Updates]:
        """End the work that runs or waits for earlier inputs."""
        session.leave(number_of(entered))
        return iter(())

    def look(self, session: VisitorSession, entered: Entered) -> Iterator[Updates]:
        """Show the prediction for a new input, the classes to choose from and the form of settings; nothing if the
        input has not changed."""
        return _for_newest(session, entered, self._looked(session, entered))

    def _looked(self, session: VisitorSession, entered: Entered) -> Iterator[Updates]:
        nothing: Updates = {"says": "", "classes": gr.update(choices=[], value=[])}
        try:
            with sentences():
                page_input = PageInput.read(entered)
                if session.subject == page_input.subject:
                    return
                session.subject = None
                if message := missing(page_input.kind, page_input.picture, page_input.sentence):
                    # the same message as that of Explain, because this may follow it
                    yield nothing | {"status": status(message)}
                    return
                if page_input.model and not self.catalogue.get(page_input.model):
                    yield {"status": self.loading(page_input)}
                if page_input.kind == "answer":
                    # the same checks as those of Explain, because this may follow it
                    loaded, view = answers.view_of(self, page_input)
                    updates: Updates = {"says": ""}
                    if view.picture is None:
                        updates["picture"] = gr.update(visible=loaded.modality == "both", value=None)
                else:
                    updates = predicted(page_input, self.ready(session, page_input)[2])
                yield updates | {"form": self.form(page_input), "status": status("Ready: press Explain.")}
                session.subject = page_input.subject
        except PageError as error:
            yield nothing | _refused(error)

    def loading(self, page_input: PageInput) -> str:
        """Return the status line for a model that is being loaded."""
        self.catalogue.place(page_input.model)
        return status(f"Loading {page_input.model} …", busy=True)

    def settings(self, session: VisitorSession, entered: Entered) -> Iterator[Updates]:
        """Show the form of the chosen methods, with the settings chosen before."""
        try:
            with sentences():
                yield {"form": self.form(PageInput.read(entered))}
        except PageError as error:
            yield {"form": status(str(error), error=True)}

    # -- results -------------------------------------------------------------------------------------------------
    def explain(self, session: VisitorSession, entered: Entered, progress: Any = None) -> Iterator[Updates]:
        """Show maps as soon as they are computed, then their faithfulness."""
        if number_of(entered) < session.number:
            return
        before = session.view
        yield from _for_newest(session, entered, self._explained(session, entered, progress))
        if number_of(entered) < session.number and session.view is before:
            # a map may have arrived after the page was cleared
            yield {"status": "", "board": piece("empty")}

    def _explained(self, session: VisitorSession, entered: Entered, progress: Any) -> Iterator[Updates]:
        session.begin()
        began = time.monotonic()
        try:
            with sentences():
                track = session.track(progress, self.limits.seconds)
                page_input = PageInput.read(entered)
                is_loaded = self.catalogue.get(page_input.model)
                yield {"status": status("Reading the input …", busy=True) if is_loaded else self.loading(page_input)}
                if page_input.kind == "answer":
                    yield from answers.ask(self, session, page_input, track)
                    session.subject = page_input.subject
                    return
                loaded, view, _ = self.full_view(session, page_input)
                results, refused, total = [], [], len(view.methods) * len(view.targets)
                for result in visitor_session.explain(session, loaded, view, track):
                    refused.append(result) if isinstance(result, Refusal) else results.append(result)
                    drawn = maps.board(session, view, results, refused)
                    yield {"status": status(f"{len(results)} of {amount(total, 'map')} …", busy=True), "board": drawn}
                if not results:
                    raise PageError("No method gave a map; the list says why.")
                session.subject, session.view, session.results = page_input.subject, view, results
                done = f"{amount(len(results), 'map')} in {time.monotonic() - began:.1f} s"
                measuring = status(f"{done}; measuring how faithful they are …", busy=True)
                around = reproduce.surroundings(view)
                yield around | {"status": measuring, "trust": "", "address": address.fragment(view, self.uploads)}
                judged = []
                for i, (e, figures) in enumerate(visitor_session.judge(session, loaded, view, list(results), track)):
                    judged.append((e, figures.figures() if isinstance(figures, Trust) else figures))
                    results[i] = figures.noted_in(e) if isinstance(figures, Trust) else e
                    so_far = status(f"{done}; {len(judged)} measured …", busy=True)
                    yield {"status": so_far, "trust": maps.trusted(judged)}
                drawn = maps.board(session, view, results, refused)  # with the faithfulness of each map
                finished = status(f"{done}; measured, {time.monotonic() - began:.1f} s in all.")
                # sent again, because the browser drops updates of visibility while it builds the page
                repeated = {name: around[name] for name in ("code", "more", "looks")}
                yield repeated | {"status": finished, "board": drawn, "trust": maps.trusted(judged)}
        except PageError as error:
            yield _refused(error)

    def explain_again(self, session: VisitorSession, entered: Entered, progress: Any = None) -> Iterator[Updates]:
        """Explain again after a change of a class or a setting, if the input has been explained."""
        with suppress(InputError):
            if session.view is not None and PageInput.read(entered).subject == session.view.page_input.subject:
                yield from self.explain(session, entered, progress)

    def redraw(self, session: VisitorSession, style: Any, opacity: Any, keep: Any) -> Iterator[Updates]:
        """Draw the same maps with another look."""
        if session.view is None or session.view.source.kind == "text":  # a prompt too
            return
        page_input = replace(session.view.page_input, **drawing_of(style, opacity, keep))
        session.view = replace(session.view, page_input=page_input)
        drawn = maps.board(session, session.view, session.results)
        updates = {"board": drawn, "code": reproduce.recipe(session.view)}
        yield updates if session.view.stored else updates | {"address": address.fragment(session.view, self.uploads)}

    def word(self, session: VisitorSession, number: int, block: str | None) -> Iterator[Updates]:
        """Show the words that a word attends to, and the blocks to choose from."""
        view = session.view
        if view is None or view.asks or not session.results or view.source.kind != "text":
            return
        try:
            with sentences():
                matrices = visitor_session.attention(session, self.catalogue.load(view.page_input.model), view)
                index = int(block) if block and block.isdecimal() and int(block) < len(matrices) else None
                html = maps.attended(session.results[0], matrices, int(number), index)
        except PageError as error:
            yield {"attended": status(str(error), error=True)}
            return
        choices = [("mean of all blocks", "mean"), *((f"block {i}", str(i)) for i in range(len(matrices)))]
        value = "mean" if index is None else str(index)
        yield {"attended": html, "block": gr.update(choices=choices, value=value, visible=True)}

    def stop(self, session: VisitorSession) -> Updates:
        session.stop.set()
        return {"status": status(CANCELLED)}

    def download(self, session: VisitorSession, kind: str) -> dict[str, str]:
        """Return a file for the browser to save, as base64; no file is written on this machine."""
        if session.view is None or not session.results:
            return {}
        name, content = reproduce.download(session, kind)
        mime = {"png": "image/png", "html": "text/html", "json": "application/json"}[kind]
        return {"name": name, "mime": mime, "base64": base64.b64encode(content).decode()}


def _for_newest(session: VisitorSession, entered: Entered, updates: Iterator[Updates]) -> Iterator[Updates]:
    """Yield the updates while the page shows the input that was entered, and no newer one."""
    number = number_of(entered)
    while number >= session.number and (update := next(updates, None)) is not None:
        if number >= session.number:
            yield update


def _refused(error: PageError) -> Updates:
    """Return updates with the reason of an error, which open *Settings* for a model that needs a target."""
    needed = {"accordion": gr.update(open=True)} if isinstance(error.__cause__, NeedsTarget) else {}
    return needed | {"status": status(str(error), error=str(error) != CANCELLED)}


def fields_of(kind: str) -> dict[str, dict[str, Any]]:
    """Return updates that show the fields for a kind of input and hide the others."""
    names = {name for fields in FIELDS.values() for name in fields}
    updates: dict[str, dict[str, Any]] = {name: gr.update(visible=name in FIELDS[kind]) for name in names}
    asks = kind == "answer"
    prompt = {"label": "Prompt", "placeholder": "What is on the left?"}
    updates["sentence"] |= prompt if asks else {"label": "Sentence", "placeholder": examples.SENTENCES[0]}
    updates["picture"] |= {"label": "Picture, for a model that sees" if asks else "Picture"}
    return updates


def sliders_of(style: Any) -> dict[str, dict[str, Any]]:
    """Return updates that show the slider of a style of maps and hide the other."""
    return {name: gr.update(visible=(style == "kept") == (name == "keep")) for name in ("opacity", "keep")}


def targets_of(page_input: PageInput, prediction: Explanation, count: int | None) -> tuple[int | str, ...]:
    """Return the targets that were chosen: classes by index, or written targets; without a choice, the likeliest class.

    Args:
        page_input: the values of the controls.
        prediction: the prediction, whose row of logits has the classes.
        count: number of the model's classes; None if unknown.
    """
    written, targets = page_input.target, dict[int | str, None]()
    for name in page_input.classes:
        if is_written_target(name):
            targets[name] = None
        else:
            index = class_index(name, prediction.labels, None if written else count)
            targets[with_class(written, index) if written else index] = None
    return tuple(targets) or (written or visitor_session.ranked(prediction)[0][0],)


# -- pieces of the page --------------------------------------------------------------------------------------------
def offered(kind: str) -> list[tuple[str, str]]:
    """Return the methods for a kind of input: the recommended ones first, then by family."""
    modality = "text" if kind == "answer" else kind
    families = {m.name: m.family for m in list_methods() if m.modality in ("both", modality)}
    return [(name, name) for names in grouped(families).values() for name in names]


def predicted(page_input: PageInput, e: Explanation, model: str = "The model") -> Updates:
    """Return updates with the prediction and the classes to choose from: the five most probable classes with their
    probabilities, then the others by index."""
    classes = visitor_session.ranked(e)
    best = {i: name if share is None else f"{name} ({100 * share:.1f} %)" for i, name, _, share in classes[:5]}
    rest = {i: name for i, name, *_ in sorted(classes) if i not in best}
    choices = [(name, f"#{i}") for i, name in (best | rest).items()]
    valid = [c for c in page_input.classes if c in dict(choices).values()]
    selected = valid or [f"#{classes[0][0]}"]
    demo = examples.ABOUT.get(page_input.model)
    says = piece("classes", model=model, demo=demo, classes=classes[:5], chosen=selected)
    return {"says": says, "classes": gr.update(choices=choices, value=valid)}

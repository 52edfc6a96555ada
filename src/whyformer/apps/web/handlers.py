"""What happens on the page: between gradio's components and the library. One instance a server, no visitor in it."""

from __future__ import annotations

import base64
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr

from whyformer.apps.web import address, answers, controls, examples, maps, reproduce, work
from whyformer.apps.web.asking import PageInput, look_of
from whyformer.apps.web.examples import START_MODEL
from whyformer.apps.web.limits import Catalogue, PageLimits
from whyformer.apps.web.telling import CANCELLED, Told, piece, sentences, status
from whyformer.apps.web.work import View, VisitorSession
from whyformer.comparing import Refusal
from whyformer.errors import InputError
from whyformer.evaluation.trust import Trust
from whyformer.explanation.counts import amount
from whyformer.inputs.argument import Argument
from whyformer.inputs.argument import sentence as as_argument
from whyformer.methods import find, list_methods
from whyformer.models import Loaded
from whyformer.models.structure import class_count
from whyformer.targets import class_index

RESULTS = ("status", "board", "trust", "code", "more", "looks", "block", "attended", "address")
"""The parts of the page that an explanation fills, in the order of its outputs."""


@dataclass(frozen=True)
class Handlers:
    """The page's functions; ``uploads`` is the only folder that files are read from."""

    catalogue: Catalogue
    limits: PageLimits
    uploads: Path
    visitors: weakref.WeakValueDictionary[str, VisitorSession] = field(default_factory=weakref.WeakValueDictionary)

    def visits(self, visitor: str, here: bool) -> None:
        """A visitor's tab was opened, or is gone."""
        session = self.visitors.get(visitor)
        if session is not None:
            session.visit(here)

    def end(self) -> None:
        """End what runs, for whomever, at its next step."""
        for reference in self.visitors.valuerefs():
            if (session := reference()) is not None:
                session.stop.set()

    # -- reading what was entered --------------------------------------------------------------------------------
    def source(self, kind: str, picture: Any, sentence: Any) -> Argument:
        if kind == "text":
            return as_argument(self.limits.text(sentence))
        opened = self.limits.picture(picture, self.uploads)
        return Argument("image", opened, Path(picture).stem, Path(picture).name)

    def ready(self, session: VisitorSession, asked: PageInput) -> tuple[Loaded, View, work.Prediction]:
        """The model, the view without methods, and the prediction."""
        source = self.source(asked.kind, asked.picture, asked.sentence)
        loaded = self.catalogue.load(asked.model)
        if loaded.modality != source.kind:
            raise InputError(f"{asked.model} reads {loaded.reads}: choose another model, or give it {loaded.reads}")
        view = View(asked.model, self.catalogue.place(asked.model), source, (), (), asked.truncate, asked.look)
        return loaded, view, work.predict(session, loaded, view)

    def full_view(self, session: VisitorSession, asked: PageInput) -> tuple[Loaded, View]:
        """The model and everything that was asked for, checked."""
        if not asked.methods:
            raise InputError("choose at least one method")
        given = controls.read_form(asked.settings)
        names = list(dict.fromkeys(find(name).name for name in asked.methods))
        loaded, view, prediction = self.ready(session, asked)
        chosen = tuple((n, controls.changed(n, given.get(n, {}), prediction.blocks)) for n in names)
        targets = [class_index(c, prediction.labels, class_count(loaded.model)) for c in asked.classes]
        wanted = tuple(dict.fromkeys(targets)) or (prediction.order[0],)
        if (count := len(chosen) * len(wanted)) > self.limits.maps:
            raise InputError(
                f"{len(chosen)} methods for {len(wanted)} classes are {count} maps; at most {self.limits.maps} are "
                "drawn at once: choose fewer"
            )
        return loaded, replace(view, methods=chosen, targets=wanted)

    # -- controls ------------------------------------------------------------------------------------------------
    def switch(self, kind: str) -> tuple[Any, ...]:
        """Picture, sentence or answer: the fields (:func:`fields_of`), the model and the methods that go with it."""
        updates = fields_of(kind)
        updates["classes"] |= {"choices": [], "value": []}
        return (
            *updates.values(), START_MODEL[kind], gr.update(choices=offered(kind)), "",
            examples.offered(kind),
        )  # fmt: skip

    def example(self, kind: str, number: Any) -> tuple[Any, Any]:
        """The picture, or the sentence, of an example that was clicked."""
        if kind in ("image", "answer"):
            place = examples.put(number, self.uploads)
            prompt = examples.sentence(number, examples.PROMPTS) if kind == "answer" else None
            return (gr.skip() if place is None else str(place)), prompt or gr.skip()
        return gr.skip(), examples.sentence(number) or gr.skip()

    def chosen(self, classes: Any, event: gr.EventData) -> Any:
        """The classes to explain after a click on a bar."""
        given = getattr(event, "classes", None)
        return [str(one) for one in given] if isinstance(given, list) and given else gr.skip()

    def uploaded(self, model: Any, chosen: bool) -> Any:
        """The model for a picture of the visitor's own: none, until one was chosen, for those that the page begins with
        would answer for any photograph as if it were handwritten digits."""
        return gr.skip() if chosen or model not in START_MODEL.values() else gr.update(value=None)

    def look(self, session: VisitorSession, *entered: Any) -> Iterator[tuple[Any, ...]]:
        """What the model says of a new input: the likeliest classes, all classes to choose from, the settings' form;
        before it, that the model is being loaded."""
        nothing = "", gr.update(choices=[], value=[]), gr.skip()
        try:
            with sentences():
                asked = PageInput.read(entered)
                if asked.picture is None if asked.kind == "image" else not asked.sentence.strip():  # nothing yet
                    yield *nothing, ""
                    return
                if asked.model and not self.catalogue.has(asked.model):
                    yield gr.skip(), gr.skip(), gr.skip(), self.loading(asked)
                if asked.kind == "answer":
                    # checked as Explain does it: this may come after the answer to Explain, and stay
                    loaded, _ = answers.view_of(self, asked)
                    given = controls.read_form(asked.settings)
                    form = controls.form(asked.methods, given, controls.blocks_of(loaded))
                    yield "", gr.skip(), form, status("Ready: press Explain.")
                    return
                _, _, prediction = self.ready(session, asked)
        except Told as told:
            yield *nothing, status(str(told), error=True)
            return
        # the five likeliest classes first, with their probabilities, then all others by number
        numeric = prediction.numeric
        best = {} if numeric else {i: f"{n} ({100 * share:.1f} %)" for i, n, share in prediction.top()}
        rest = {i: prediction.label(i) for i in range(len(prediction.order)) if i not in best}
        choices = [(name, f"#{i}") for i, name in (best | rest).items()]
        kept = [c for c in asked.classes if c in dict(choices).values()]
        form = controls.form(asked.methods, controls.read_form(asked.settings), prediction.blocks)
        chosen = kept or [f"#{prediction.order[0]}"]
        says = piece("classes", classes=prediction.top(), numeric=numeric, chosen=chosen)
        yield says, gr.update(choices=choices, value=kept), form, status("Ready: press Explain.")

    def loading(self, asked: PageInput) -> str:
        """That a model is being loaded, which may take a while."""
        self.catalogue.place(asked.model)
        return status(f"Loading {asked.model} …", busy=True)

    def settings(self, session: VisitorSession, *entered: Any) -> str:
        """The form of the methods now chosen, with what was set before."""
        try:
            with sentences():
                asked = PageInput.read(entered)
                form = partial(controls.form, asked.methods, controls.read_form(asked.settings))
                made = form(0)  # without an input block numbers are typed instead of slid
        except Told as told:
            return status(str(told), error=True)
        with suppress(Told), sentences():
            if asked.kind == "answer":
                return form(controls.blocks_of(self.catalogue.load(asked.model)))
            return form(self.ready(session, asked)[2].blocks)
        return made

    # -- results -------------------------------------------------------------------------------------------------
    def explain(self, session: VisitorSession, *entered: Any, progress: Any = None) -> Iterator[tuple[Any, ...]]:
        """Maps as they become ready, then how far they may be believed; values of :data:`RESULTS`."""
        session.begin()
        began = time.monotonic()
        try:
            with sentences():
                track = session.track(progress, self.limits.seconds)
                asked = PageInput.read(entered)
                known = self.catalogue.has(asked.model)
                yield _shown(status=status("Reading the input …", busy=True) if known else self.loading(asked))
                if asked.kind == "answer":
                    yield from (_shown(**step) for step in answers.ask(self, session, asked, track))
                    return
                loaded, view = self.full_view(session, asked)
                results, refused, total = [], [], len(view.methods) * len(view.targets)
                for found in work.explain(session, loaded, view, track):
                    refused.append(found) if isinstance(found, Refusal) else results.append(found)
                    drawn = maps.board(session, results, refused, view.look)
                    yield _shown(status=status(f"{len(results)} of {amount(total, 'map')} …", busy=True), board=drawn)
                if not results:
                    raise Told("No method gave a map; the list says why.")
                session.asked, session.view, session.results = asked, view, results
                seen = {"more": gr.update(visible=True), "looks": gr.update(visible=view.source.kind == "image")}
                done = f"{amount(len(results), 'map')} in {time.monotonic() - began:.1f} s"
                yield _shown(
                    status=status(f"{done}; measuring how faithful they are …", busy=True), trust="", code=recipe(view),
                    address=self.address(session),
                    attended="", **seen, block=gr.update(visible=False, value="mean"),
                )  # fmt: skip
                judged = []
                for i, (e, figures) in enumerate(work.judge(session, loaded, view, list(results), track)):
                    judged.append((e, figures))
                    results[i] = figures.noted_in(e) if isinstance(figures, Trust) else e
                    so_far = status(f"{done}; {len(judged)} measured …", busy=True)
                    yield _shown(status=so_far, trust=maps.trusted(judged))
                drawn = maps.board(session, results, refused, view.look)  # with what was measured beside each map
                all_of_it = status(f"{done}; measured, {time.monotonic() - began:.1f} s in all.")
                # said again: what becomes visible while the page itself is still being built is lost
                yield _shown(status=all_of_it, board=drawn, trust=maps.trusted(judged), code=recipe(view), **seen)
        except Told as told:
            yield _shown(status=status(str(told), error=str(told) != CANCELLED))

    def again(self, session: VisitorSession, *entered: Any, progress: Any = None) -> Iterator[tuple[Any, ...]]:
        """As ``explain``, after a change of a class or a setting; nothing before the first explanation."""
        if session.view is None:
            yield _shown()
            return
        yield from self.explain(session, *entered, progress=progress)

    def address(self, session: VisitorSession) -> str:
        """What stands behind the # of the page's address."""
        assert session.view is not None
        return address.written(session.asked, dict(session.view.methods), self.uploads)

    def redraw(self, session: VisitorSession, style: Any, opacity: Any, keep: Any) -> tuple[Any, Any, Any]:
        """The same maps with another look: nothing is computed again."""
        if session.view is None or session.view.source.kind == "text":  # a prompt too
            return gr.skip(), gr.skip(), gr.skip()
        session.view = replace(session.view, look=look_of(style, opacity, keep))
        session.asked = replace(session.asked, look=session.view.look)
        drawn = maps.board(session, session.results, (), session.view.look)
        return drawn, recipe(session.view), self.address(session)

    def word(self, session: VisitorSession, number: int, block: str | None) -> tuple[Any, Any]:
        """What a word attends to, and the blocks to choose from."""
        view = session.view
        if view is None or view.asks or not session.results or view.source.kind != "text":
            return gr.skip(), gr.skip()
        try:
            with sentences():
                found = work.attention(session, self.catalogue.load(view.model), view)
                index = int(block) if block and block.isdecimal() and int(block) < len(found) else None
                shown = maps.attended(session.results[0], found, int(number), index)
        except Told as told:
            return status(str(told), error=True), gr.skip()
        choices = [("mean of all blocks", "mean"), *((f"block {i}", str(i)) for i in range(len(found)))]
        return shown, gr.update(choices=choices, value="mean" if index is None else str(index), visible=True)

    def stop(self, session: VisitorSession) -> str:
        session.stop.set()
        return status(CANCELLED)

    def download(self, session: VisitorSession, kind: str) -> dict[str, str]:
        """A file for the browser to save, in the answer itself: nothing is written on this machine."""
        if session.view is None or not session.results:
            return {}
        make = answers.download if session.view.asks else reproduce.download
        name, content = make(session, kind)
        mime = {"png": "image/png", "html": "text/html", "json": "application/json"}[kind]
        return {"name": name, "mime": mime, "base64": base64.b64encode(content).decode()}


FIELDS = ("picture", "sentence", "truncate", "length", "chat", "classes")


def fields_of(kind: str) -> dict[str, dict[str, Any]]:
    """Updates that show the fields of one kind of input, by name."""
    shown = {
        "image": ("picture", "classes"), "text": ("sentence", "truncate", "classes"),
        "answer": ("picture", "sentence", "length", "chat"),
    }[kind]  # fmt: skip
    updates: dict[str, dict[str, Any]] = {name: gr.update(visible=name in shown) for name in FIELDS}
    asks = kind == "answer"
    prompt = {"label": "Prompt", "placeholder": "What is on the left?"}
    updates["sentence"] |= prompt if asks else {"label": "Sentence", "placeholder": examples.SENTENCES[0]}
    updates["picture"] |= {"label": "Picture, for a model that sees" if asks else "Picture"}
    return updates


# -- pieces of the page --------------------------------------------------------------------------------------------
def offered(kind: str) -> list[tuple[str, str]]:
    """Methods for this kind of input."""
    wanted = "text" if kind == "answer" else kind
    return [(m.name, m.name) for m in list_methods() if m.modality in ("both", wanted)]


def recipe(view: View) -> str:
    """The snippet and the command line, each with a button that copies it."""
    blocks = {"Python": reproduce.snippet(view), "Command line": reproduce.command(view)}
    return piece("code", blocks=blocks)


def _shown(**new: Any) -> tuple[Any, ...]:
    """New values of some of :data:`RESULTS`; the others stay as they are."""
    return tuple(new.get(name, gr.skip()) for name in RESULTS)

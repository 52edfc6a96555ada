"""What happens on the page: between gradio's components and the library. One instance a server, no visitor in it."""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gradio as gr

from whyformer.errors import InputError, WhyformerError
from whyformer.explain import find_class
from whyformer.methods import find, methods
from whyformer.models import Loaded
from whyformer.show.html import text
from whyformer.show.words import visible
from whyformer.web import controls, curves, maps, reproduce, work
from whyformer.web.catalogue import DEFAULT, Catalogue
from whyformer.web.limits import Limits
from whyformer.web.session import Session, Source, Stopped, View

_LOG = logging.getLogger("whyformer.web")
FIRST = ("transformer_attribution",)


@dataclass(frozen=True)
class Asked:
    """What the visitor has entered: the values of the page's controls, in their order there."""

    kind: str
    picture: str | None
    sentence: str
    model: str
    methods: list[str]
    classes: list[str]
    truncate: bool
    opacity: float
    settings: Any = field(default="")


class Told(Exception):  # noqa: N818 - a sentence on its way to the page
    """Work ended with something to tell the visitor."""


@contextmanager
def sentences() -> Iterator[None]:
    """Turn what goes wrong into :class:`Told`: the library's own words, or one sentence while the log has the rest."""
    try:
        yield
    except WhyformerError as error:
        raise Told(" ".join(str(error).split())) from error
    except Stopped as error:
        raise Told("Cancelled.") from error
    except (Told, GeneratorExit):
        raise
    except Exception as error:
        _LOG.exception("the page failed")
        raise Told(
            f"Something went wrong inside whyformer ({type(error).__name__}); where the page was started, the log says more."
        ) from error


def status(words: str, *, error: bool = False) -> str:
    """A line for people and screen readers."""
    if error:
        return f'<p class="wf-status wf-error" role="alert">{text(visible(words))}</p>'
    return f'<p class="wf-status" role="status">{text(visible(words))}</p>'


@dataclass(frozen=True)
class Handlers:
    """The page's functions; ``uploads`` is the only folder that files are read from."""

    catalogue: Catalogue
    limits: Limits
    uploads: Path

    # -- reading what was entered --------------------------------------------------------------------------------
    def source(self, kind: str, picture: Any, sentence: Any) -> Source:
        if kind == "text":
            return Source.text(self.limits.text(sentence))
        opened = self.limits.picture(picture, self.uploads)
        return Source.picture(opened, Path(picture).name)

    def ready(self, session: Session, asked: Asked) -> tuple[Loaded, View, work.Prediction]:
        """The model, the view without methods, and the prediction."""
        source = self.source(asked.kind, asked.picture, asked.sentence)
        loaded = self.catalogue.load(asked.model)
        if loaded.modality != source.kind:
            reads = "pictures" if loaded.modality == "image" else "text"
            raise InputError(f"{asked.model} reads {reads}: choose another model, or give it {reads}")
        view = View(
            asked.model, self.catalogue.place(asked.model), source, (), (), bool(asked.truncate), float(asked.opacity)
        )
        return loaded, view, work.predict(session, loaded, view)

    def full_view(self, session: Session, asked: Asked) -> tuple[Loaded, View]:
        """The model and everything that was asked for, checked."""
        if not asked.methods:
            raise InputError("choose at least one method")
        given = controls.read_form(asked.settings)
        for name in asked.methods:
            find(name)
        loaded, view, prediction = self.ready(session, asked)
        chosen = tuple((n, controls.changed(n, given.get(n, {}), prediction.blocks)) for n in dict.fromkeys(asked.methods))
        # labels of multi-word classes may themselves be numbers, so a number comes first
        targets = [int(c) if str(c).isdigit() else find_class(str(c), prediction.labels) for c in asked.classes]
        wanted = tuple(dict.fromkeys(targets)) or (prediction.order[0],)
        work.check_targets(loaded, wanted)
        if len(chosen) * len(wanted) > self.limits.maps:
            raise InputError(
                f"{len(chosen)} methods for {len(wanted)} classes are {len(chosen) * len(wanted)} maps; at most "
                f"{self.limits.maps} are drawn at once: choose fewer"
            )
        return loaded, replace(view, methods=chosen, targets=wanted)

    # -- controls ------------------------------------------------------------------------------------------------
    def switch(self, kind: str) -> tuple[Any, ...]:
        """Picture or sentence: the field, the model and the methods that go with it."""
        image = kind == "image"
        return (
            gr.update(visible=image), gr.update(visible=not image), gr.update(visible=not image), DEFAULT[kind],
            gr.update(choices=offered(kind)), gr.update(choices=[], value=[]), "",
        )  # fmt: skip

    def look(self, session: Session, *entered: Any) -> tuple[Any, ...]:
        """What the model says of a new input: the likeliest classes, all classes to choose from, the settings' form."""
        asked = Asked(*entered)
        try:
            with sentences():
                if (asked.picture is None) if asked.kind == "image" else not (asked.sentence or "").strip():
                    return "", gr.update(choices=[], value=[]), gr.skip(), ""
                _, _, prediction = self.ready(session, asked)
        except Told as told:
            return "", gr.update(choices=[], value=[]), gr.skip(), status(str(told), error=True)
        choices = class_choices(prediction)
        known = {c for _, c in choices}
        kept = [c for c in asked.classes or [] if c in known]
        form = controls.form(asked.methods, controls.read_form(asked.settings), prediction.blocks)
        return says(prediction), gr.update(choices=choices, value=kept), form, status("Ready: press Explain.")

    def settings(self, session: Session, *entered: Any) -> str:
        """The form of the methods now chosen, with what was set before."""
        asked = Asked(*entered)
        blocks = 0
        try:
            with sentences():
                blocks = self.ready(session, asked)[2].blocks
        except Told:
            pass  # no input yet: block numbers are typed instead of slid
        return controls.form(asked.methods, controls.read_form(asked.settings), blocks)

    # -- results -------------------------------------------------------------------------------------------------
    def explain(self, session: Session, *entered: Any, progress: Any = None) -> Iterator[tuple[Any, ...]]:
        """Maps as they become ready, then how far they may be believed.

        Yields (status, the maps, curves and warnings, snippet and command line, whether there is something to keep).
        """
        session.begin()
        keep, began = gr.skip(), time.monotonic()
        try:
            with sentences():
                track = session.track(_teller(progress))
                yield status("Reading the input …"), keep, keep, keep, keep
                loaded, view = self.full_view(session, Asked(*entered))
                results, refused, total = [], [], len(view.methods) * len(view.targets)
                for found in work.explain(session, loaded, view, track):
                    refused.append(found) if isinstance(found, tuple) else results.append(found)
                    shown = maps.board(session, results, refused, view.opacity)
                    yield status(f"{len(results)} of {total} maps …"), shown, keep, keep, keep
                session.view, session.results = view, results
                if not results:
                    raise Told("No method gave a map; below is why.")
                done = f"{_count(len(results), 'map')} in {time.monotonic() - began:.1f} s"
                code = recipe(view)
                yield status(f"{done}; measuring how faithful they are …"), keep, "", code, gr.update(visible=True)
                judged = []
                for one in work.judge(session, loaded, view, results, track):
                    judged.append(one)
                    yield status(f"{done}; {len(judged)} measured …"), keep, curves.panel(judged), keep, keep
                yield status(f"{done}; measured, {time.monotonic() - began:.1f} s in all."), keep, keep, keep, keep
        except Told as told:
            yield status(str(told), error=str(told) != "Cancelled."), keep, keep, keep, keep

    def again(self, session: Session, *entered: Any, progress: Any = None) -> Iterator[tuple[Any, ...]]:
        """As ``explain``, after a change of a class or a setting; nothing before the first explanation."""
        if session.view is None:
            yield (gr.skip(),) * 5
            return
        yield from self.explain(session, *entered, progress=progress)

    def redraw(self, session: Session, opacity: float) -> tuple[Any, Any]:
        """The same maps at another opacity: nothing is computed again."""
        if session.view is None or session.view.source.kind == "text":
            return gr.skip(), gr.skip()
        session.view = replace(session.view, opacity=min(1.0, max(0.0, float(opacity))))
        return maps.board(session, session.results, (), session.view.opacity), recipe(session.view)

    def word(self, session: Session, number: int, block: str | None) -> tuple[Any, Any]:
        """What a word attends to, and the blocks to choose from."""
        if session.view is None or not session.results or session.view.source.kind != "text":
            return gr.skip(), gr.skip()
        try:
            with sentences():
                loaded = self.catalogue.load(session.view.model)
                found = work.attention(session, loaded, session.view)
                index = int(block) if block and block.isdigit() and int(block) < len(found) else None
                shown = maps.attended(session.results[0], found, int(number), index)
        except Told as told:
            return status(str(told), error=True), gr.skip()
        choices = [("mean of all blocks", "mean"), *((f"block {i}", str(i)) for i in range(len(found)))]
        return shown, gr.update(choices=choices, value="mean" if index is None else str(index), visible=True)

    def stop(self, session: Session) -> str:
        session.stop.set()
        return status("Cancelled.")

    def download(self, session: Session, kind: str) -> dict[str, str]:
        """A file for the browser to save, in the answer itself: nothing is written on this machine."""
        if session.view is None or not session.results:
            return {}
        name, content = reproduce.download(session, kind)
        mime = {"png": "image/png", "html": "text/html", "json": "application/json"}[kind]
        return {"name": name, "mime": mime, "base64": base64.b64encode(content).decode()}


# -- pieces of the page --------------------------------------------------------------------------------------------
def offered(kind: str) -> list[tuple[str, str]]:
    """Methods for this kind of input."""
    return [(m.name, m.name) for m in methods() if m.modality in ("both", kind)]


def class_choices(prediction: work.Prediction) -> list[tuple[str, str]]:
    """The five likeliest classes first, with their probabilities, then all others by number."""
    best = [(f"{name} ({100 * share:.1f} %)", str(i)) for i, name, share in prediction.top()]
    first = {i for i, _, _ in prediction.top()}
    rest = [i for i in range(len(prediction.order)) if i not in first]
    return best + [(prediction.label(i), str(i)) for i in rest]


def says(prediction: work.Prediction) -> str:
    """The top five classes as bars."""
    rows = "".join(
        f'<li><bdi>{text(name)}</bdi><span class="wf-share"><span style="width:{100 * share:.1f}%"></span></span>'
        f"<span>{100 * share:.1f} %</span></li>"
        for _, name, share in prediction.top()
    )
    return f'<div class="wf-says"><h3>The model says</h3><ol>{rows}</ol></div>'


def recipe(view: View) -> str:
    """The snippet and the command line, each with a button that copies it."""

    def block(name: str, code: str) -> str:
        copy = '<button type="button" class="wf-copy">copy</button>'
        return f'<h3>{name} {copy}</h3><pre class="wf-code" tabindex="0" aria-label="{name}"><code>{text(code)}</code></pre>'

    return block("Python", reproduce.snippet(view)) + block("Command line", reproduce.command(view))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _teller(progress: Any) -> Callable[[int, int | None, str], None]:
    """Progress of long work, told a few times a second."""
    last = 0.0

    def tell(done: int, total: int | None, what: str) -> None:
        nonlocal last
        if progress is not None and (now := time.monotonic()) - last > 0.25:
            last = now
            progress((done, total) if total else None, desc=what)

    return tell

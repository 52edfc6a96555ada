"""The layout of the page, and the function that each event calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from itertools import chain
from typing import Any, ClassVar

import gradio as gr

from whyformer.apps.web import opening
from whyformer.apps.web.api import endpoint
from whyformer.apps.web.examples import ABOUT, STORED_MODEL
from whyformer.apps.web.handlers import Handlers, Updates, sliders_of
from whyformer.apps.web.messages import CANCELLED, piece, status
from whyformer.apps.web.page_input import CONTROLS, OPTIONS
from whyformer.apps.web.visitor_session import VisitorSession
from whyformer.defaults import grouped
from whyformer.methods import list_methods
from whyformer.options import WORDS, kind_of
from whyformer.show.html import asset, render
from whyformer.show.typeface import PAGES

# the typeface is part of the style sheet and code is set in a font of the system, so that no font is fetched
_MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "DejaVu Sans Mono", "monospace")
# the number of the input and the settings, which are plain form fields, are sent as the last values of each request
_WITH_FORM = "(...values) => [...values.slice(0, -2), window.whyformerNumber(), window.whyformerSettings()]"
# in the browser, because an answer of the server could arrive after the maps of Explain
_CLEAR, _CLEAR_FOR = "() => window.whyformerClear()", "() => window.whyformerModel()"
_CLEAR_TEXT = "() => window.whyformerText()"
_WAIT = "() => window.whyformerWaiting"
_SAVE = "(file) => window.whyformerSave(file)"
# after the page is built
_HASH = (
    "async (...values) => (await new Promise((go) => setTimeout(go, location.hash ? 300 : 0)), "
    "[...values.slice(0, -1), location.hash])"
)
KINDS = ("png", "html", "json")
_PREDICTION = ("says", "classes", "form", "accordion", "status", "picture")
"""The components that show a prediction."""
_RESULTS = ("status", "accordion", "board", "trust", "code", "more", "looks", "block", "attended", "address")
"""The components that show an explanation."""


def _components(handlers: Handlers) -> dict[str, Any]:
    """Lay out the components with the stored example, and return them by name; their ids are "wf-" and the name."""
    first = VisitorSession()
    start = opening.stored(handlers, first)
    parts: dict[str, Any] = {"session": gr.State(first, time_to_live=4 * 3600, delete_callback=VisitorSession.forget)}
    parts["decided"] = gr.State(False)

    def add(name: str, component: type[Any] = gr.HTML, *values: Any, **arguments: Any) -> Any:
        properties = start.get(name, {})
        if isinstance(properties, dict):
            properties = {k: v for k, v in properties.items() if k != "__type__"}
        else:
            properties = {"value": properties}
        parts[name] = component(*values, **arguments | properties, elem_id=f"wf-{name}")
        return parts[name]

    gr.HTML(piece("head"))
    with gr.Row(elem_classes="wf-page"):
        with gr.Column(scale=4, min_width=300, elem_id="wf-ask"):
            _add_input(add)
            with gr.Row(elem_classes="wf-go"):
                add("explain", gr.Button, "Explain", variant="primary", min_width=120)
                add("cancel", gr.Button, "Cancel", min_width=90)
            add("status")
            add("progress")
            add("says", js_on_load=_on_click(".wf-class", "classes: window.whyformerToggle(one)"))
            _add_choices(add, handlers)
        with gr.Column(scale=8, min_width=300, elem_id="wf-answer"):
            _add_results(add)
    # values for scripts and handlers alone
    hidden = {"file": gr.JSON, "word": gr.Number, "address": gr.Textbox, "number": gr.Number, "settings": gr.Textbox}
    for name, component in hidden.items():
        add(name, component, visible=False)
    return parts


def _on_click(selector: str, sent: str) -> str:
    """Return a script that triggers the event ``click`` of a component for clicks on elements in its HTML."""
    return (
        "element.addEventListener('click', (event) => {"
        f"const one = event.target.closest('{selector}'); if (one) trigger('click', {{{sent}}});}});"
    )


def _add_input(add: Callable[..., Any]) -> None:
    """Add the fields of the input."""
    kinds = [("a picture", "image"), ("a sentence", "text"), ("an answer", "answer")]
    add("kind", gr.Radio, kinds, value="image", label="Explain")
    add("picture", gr.Image, sources=["upload", "clipboard"], label="Picture", height=200, buttons=[])
    add("sentence", gr.Textbox, label="Sentence", lines=3, max_lines=12, visible=False)
    hint = "such as the context of a question, or a hypothesis"
    label = "Second text, for a model that reads two"
    add("pair", gr.Textbox, label=label, placeholder=hint, lines=1, max_lines=12, visible=False)
    add("chat", gr.Checkbox, label="Send as a message (the tokenizer's chat template)", visible=False)
    add("truncate", gr.Checkbox, label="Cut off text that is too long for the model", visible=False)
    add("examples", js_on_load=_on_click(".wf-example", "example: Number(one.dataset.example)"))


def _add_choices(add: Callable[..., Any], handlers: Handlers) -> None:
    """Add the choices of models, methods, classes and settings."""
    catalogue = handlers.catalogue
    names = [*catalogue.names(), *([STORED_MODEL] if catalogue.hub else [])]
    about = "bundled, or a folder of --model-dir" + (", or a hub id: owner/name" if catalogue.hub else "")
    choices = [(f"{name} ({ABOUT[name]})" if name in ABOUT else name, name) for name in names]
    add("model", gr.Dropdown, choices, label="Model", info=about, allow_custom_value=catalogue.hub)
    add("methods", gr.Dropdown, multiselect=True, label="Methods")
    about = "type to search; without a choice, the likeliest one"
    add("classes", gr.Dropdown, multiselect=True, label="Classes", info=about)
    label, most = "Tokens of the answer, at most", handlers.limits.tokens
    add("length", gr.Slider, 1, most, value=16, step=1, label=label, buttons=[], visible=False)
    with add("accordion", gr.Accordion, "Settings", open=False):
        about = "for a model with several rows of logits, such as one for each token: Token(5)"
        add("target", gr.Textbox, label="Target", info=about, lines=1, max_lines=1)
        add("form", js_on_load="element.addEventListener('change', () => trigger('input'));")
        for name in OPTIONS:
            component = gr.Checkbox if kind_of(name) is bool else gr.Textbox
            add(name, component, label=name.capitalize().replace("_", " "), info=WORDS[name]["help"])


def _add_results(add: Callable[..., Any]) -> None:
    """Add the maps, what changes their look, and what is shown about them."""
    add("board", js_on_load=_on_click(".wf-word", "word: Number(one.dataset.word)"))
    with add("looks", gr.Row, visible=False):
        styles = [("colours", "colours"), ("with contours", "contours"), ("only what matters", "kept")]
        add("style", gr.Radio, styles, value="colours", label="Show", scale=2)
        add("opacity", gr.Slider, 0, 1, value=1.0, step=0.05, label="Opacity of the map", buttons=[])
        add("keep", gr.Slider, 0.05, 1, value=0.2, step=0.05, label="Share shown", buttons=[], visible=False)
    mean = [("mean of all blocks", "mean")]
    add("block", gr.Dropdown, mean, value="mean", label="Attention in", visible=False)
    add("attended")
    with add("more", gr.Column, visible=False):
        gr.HTML(piece("heading", words="How faithful is it?"), elem_id="wf-faithful")
        add("trust")
        gr.HTML(piece("heading", words="Save"))
        with gr.Row():
            for kind in KINDS:
                add(f"save-{kind}", gr.Button, kind.upper(), size="sm")
        add("code")


def build(handlers: Handlers) -> gr.Blocks:
    """Return the page as gradio blocks."""
    # uploads are deleted after an hour
    with gr.Blocks(title="whyformer", analytics_enabled=False, fill_width=True, delete_cache=(600, 3600)) as page:
        parts = _components(handlers)
        wires = _Wires(handlers, parts)
        changed = _listen_to_input(wires)
        _listen_to_results(wires, changed)
        _listen_to_looks(wires)
        page.load(None, None, parts["board"], js="() => window.whyformerReady()")
        # the status tells how far it is: a bar would appear for a moment whenever the page opens
        page.load(**wires.work(partial(opening.restore, handlers), wires.all, js=_HASH, **wires.serial))
        page.load(_linger, **wires.parallel)
        page.unload(handlers.unload)
        gr.api(endpoint(handlers), api_name="explain", concurrency_id="model", concurrency_limit=1)
    return page


@dataclass(frozen=True)
class _Wires:
    """Arguments of gradio's events for functions that return or yield updates by name."""

    handlers: Handlers
    parts: Mapping[str, Any]

    private: ClassVar[dict[str, Any]] = {"api_visibility": "private", "show_progress": "hidden"}
    # preprocess=False: uploads are not opened, and PageInput.read alone checks what the browser sent
    parallel: ClassVar[dict[str, Any]] = {"concurrency_limit": None, "preprocess": False, **private}
    serial: ClassVar[dict[str, Any]] = parallel | {"concurrency_id": "model", "concurrency_limit": 1}

    def fill(
        self, function: Callable[..., Any], inputs: Sequence[str], outputs: Sequence[str], **more: Any
    ) -> dict[str, Any]:
        """Call a function with the visitor's session and the values of components.

        Args:
            inputs: names of the components whose values are passed.
            outputs: names of the components that it may change, and no others: gradio overwrites what a visitor is
                typing into an output.
        """

        @wraps(function)
        def generate(*values: Any, **more: Any) -> Iterator[dict[Any, Any]]:
            steps = function(*values, **more)
            steps = iter([steps] if isinstance(steps, dict) else steps)
            for step in chain([next(steps, {})], steps):
                # gradio clears all outputs if there is no update
                yield {self.parts[name]: value for name, value in step.items()} or {self.parts[outputs[0]]: gr.skip()}

        return {
            "fn": generate,
            "inputs": [self.parts[name] for name in ("session", *inputs)],
            "outputs": [self.parts[name] for name in outputs],
            **self.parallel,
            **more,
        }

    def enter(self, function: Callable[..., Any], outputs: Sequence[str], **more: Any) -> dict[str, Any]:
        """Call a function with the session and the values of all controls, as a mapping."""

        def read(session: VisitorSession, *values: Any) -> Any:
            yield from function(session, dict(zip(CONTROLS, values, strict=True)))

        return self.fill(read, CONTROLS, outputs, js=_WITH_FORM, **more)

    def work(self, function: Callable[..., Any], outputs: Sequence[str], **more: Any) -> dict[str, Any]:
        """Call a function that takes long, as :meth:`enter` does, and show its progress."""

        def work(
            request: gr.Request,
            session: VisitorSession,
            *values: Any,
            progress: gr.Progress = gr.Progress(),  # noqa: B008 - gradio reads this default
        ) -> Any:
            self.handlers.visitors[str(request.session_hash)] = session
            yield from function(session, dict(zip(CONTROLS, values, strict=True)), progress=progress)

        return self.fill(work, CONTROLS, outputs, **{"js": _WITH_FORM} | self.with_progress | more)

    @property
    def all(self) -> list[str]:
        """Names of all components but the session."""
        return [name for name in self.parts if name != "session"]

    @property
    def with_progress(self) -> dict[str, Any]:
        """Arguments of an event that shows its progress."""
        return self.serial | {"show_progress": "minimal", "show_progress_on": self.parts["progress"]}


def _listen_to_input(wires: _Wires) -> list[Any]:
    """Answer changes of the input, and return these events."""
    handlers, parts = wires.handlers, wires.parts
    names = ("kind", "picture", "sentence", "pair", "target", "model")
    kind, picture, sentence, pair, target, model = (parts[name] for name in names)

    def example(session: VisitorSession, kind: str, decided: bool, event: gr.EventData) -> Updates:
        return handlers.example(session, kind, event.example, decided)

    changed = [kind.input, picture.upload, picture.clear, parts["truncate"].input, parts["examples"].click]
    # gradio's event of input comes with keys, but not if text is pasted or cut
    texts = [sentence.change, pair.change, target.change]
    # first, because gradio calls the listeners of an event in this order: the others fill what this clears
    cleared = [parts["board"], parts["status"]]
    gr.on(changed, None, None, cleared, js=_CLEAR, **wires.private)
    gr.on(texts, None, None, cleared, js=_CLEAR_TEXT, **wires.private)
    model.input(None, None, cleared, js=_CLEAR_FOR, **wires.private)
    changed += [*texts, model.input]
    gr.on(changed, trigger_mode="multiple", **wires.enter(handlers.leave, ["status"]))
    look = wires.enter(handlers.look, _PREDICTION, **wires.with_progress)
    begin = wires.work(partial(opening.begin, handlers), sorted({*_PREDICTION, *_RESULTS}))
    kind.input(**wires.enter(partial(opening.switch, handlers), wires.all)).then(**begin)
    model.input(**wires.fill(lambda _: {"decided": True}, [], ["decided"]))
    picture.upload(**wires.fill(handlers.uploaded, ["decided"], ["model"])).then(**look)
    filled = ["picture", "sentence", "pair", "model"]
    parts["examples"].click(**wires.fill(example, ["kind", "decided"], filled)).then(**look)
    for event in (picture.clear, sentence.blur, pair.blur, target.blur, model.input, parts["truncate"].input):
        event(trigger_mode="always_last", **look)
    parts["methods"].input(**wires.enter(handlers.settings, ["form"], **wires.serial), trigger_mode="always_last")
    return [*changed, sentence.blur, pair.blur, target.blur, parts["methods"].input]


def _listen_to_results(wires: _Wires, changed: list[Any]) -> None:
    """Explain, cancel and save."""
    handlers, parts = wires.handlers, wires.parts
    go, says, classes, form = (parts[name] for name in ("explain", "says", "classes", "form"))

    def choose_classes(_: VisitorSession, event: gr.EventData) -> Updates:
        """Choose the classes to explain after a click on a bar."""
        names = getattr(event, "classes", None)
        return {"classes": list(map(str, names))} if isinstance(names, list) and names else {}

    def save(session: VisitorSession, kind: str) -> Updates:
        return {"file": handlers.download(session, kind)}

    settings = [classes.input, form.input, *(parts[name].input for name in OPTIONS)]
    explain, again = (wires.work(function, _RESULTS) for function in (handlers.explain, handlers.explain_again))
    go.click(None, None, parts["status"], js=_WAIT, **wires.private)
    running = [go.click(trigger_mode="once", **explain)]
    running += [event(trigger_mode="always_last", **again) for event in settings]
    running.append(says.click(**wires.fill(choose_classes, [], ["classes"])).then(**explain))
    classes.change(None, classes, None, js="(chosen) => window.whyformerPress(chosen)")
    parts["cancel"].click(**wires.fill(handlers.stop, [], ["status"]), cancels=running)
    # also in the browser: gradio may close the stream of answers when it cancels what runs, and lose this one
    parts["cancel"].click(None, None, parts["status"], js=f"() => {json.dumps(status(CANCELLED))}", **wires.private)
    events = [*changed, *settings, says.click, go.click]
    gr.on(events, _linger, trigger_mode="multiple", **wires.parallel)
    parts["address"].change(None, parts["address"], None, js="(view) => window.whyformerAddress(view)")
    for name in KINDS:
        event = parts[f"save-{name}"].click(**wires.fill(partial(save, kind=name), [], ["file"]))
        event.then(None, parts["file"], None, js=_SAVE)


def _listen_to_looks(wires: _Wires) -> None:
    """Draw the maps with another look, and show the words that a word attends to."""
    handlers, parts = wires.handlers, wires.parts

    def word(session: VisitorSession, block: str | None, event: gr.EventData) -> Iterator[Updates]:
        yield {"word": event.word}
        yield from handlers.word(session, event.word, block)

    redraw = wires.fill(handlers.redraw, ["style", "opacity", "keep"], ["board", "code", "address"])
    for event in (parts["style"].input, parts["opacity"].release, parts["keep"].release):
        event(trigger_mode="always_last", **redraw)
    parts["style"].input(**wires.fill(lambda _, style: sliders_of(style), ["style"], ["opacity", "keep"]))
    parts["board"].click(**wires.fill(word, ["block"], ["word", "attended", "block"], **wires.serial))
    parts["block"].input(**wires.fill(handlers.word, ["word", "block"], ["attended", "block"], **wires.serial))


async def _linger() -> None:
    """Keep the stream of answers to a visitor open for a while. Gradio closes it when no answer is pending, and loses
    the answer to a request that arrives at that moment."""
    await asyncio.sleep(3)


def look() -> dict[str, Any]:
    """Return theme, style sheet and script as arguments of :func:`gradio.mount_gradio_app`."""
    theme = gr.themes.Base(
        primary_hue=gr.themes.colors.blue, neutral_hue=gr.themes.colors.slate, font=list(PAGES), font_mono=list(_MONO)
    )
    # white on the blue of gradio has too little contrast
    shades = {"background_fill": "*primary_700", "background_fill_hover": "*primary_800", "text_color": "white"}
    methods = {m.name: m for m in list_methods()}
    families = grouped({name: method.family for name, method in methods.items()})
    groups = {
        title: [(name, json.dumps(methods[name].summary, ensure_ascii=False)) for name in names]
        for title, names in families.items()
    }
    theme.set(**{f"button_primary_{k}{dark}": v for k, v in shades.items() for dark in ("", "_dark")})
    return {
        "theme": theme,
        "css": str(asset("claims.css") + asset("web/page.css")) + render("web/methods.css", groups=groups),
        "head": piece("script", script=asset("web/page.js")),
    }

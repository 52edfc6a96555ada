"""The page: its controls, and which function answers which of them."""

from __future__ import annotations

import asyncio
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from inspect import isgeneratorfunction
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import gradio as gr

from whyformer.apps.web import opening
from whyformer.apps.web.api import endpoint
from whyformer.apps.web.examples import ABOUT, STORED_MODEL
from whyformer.apps.web.handlers import Handlers, Updates
from whyformer.apps.web.limits import Catalogue
from whyformer.apps.web.messages import piece
from whyformer.apps.web.page_input import CONTROLS
from whyformer.apps.web.visitor_session import VisitorSession
from whyformer.defaults import grouped
from whyformer.methods import list_methods
from whyformer.show.html import asset, render
from whyformer.show.typeface import PAGES

_PARTS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("page.toml").read_text(encoding="utf-8"))
# the style sheet holds the typeface, and code is in what the system has: nothing is fetched from anywhere
_MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "DejaVu Sans Mono", "monospace")
# the settings are plain form fields; what stands in them goes along with each request as the last value
_WITH_FORM = "(...given) => [...given.slice(0, -1), window.whyformerSettings()]"
# at once, and in the browser alone: an answer of the server might come after what Explain shows
_CLEAR, _CLEAR_FOR = "() => window.whyformerClear()", "() => window.whyformerModel()"
_WAIT = "() => window.whyformerWaiting"
_SAVE = "(file) => window.whyformerSave(file)"
# once the page stands
_HASH = "async (mine) => (await new Promise((go) => setTimeout(go, location.hash ? 300 : 0)), [mine, location.hash])"
KINDS = ("png", "html", "json")
_SEEN = ("says", "classes", "form", "status")
"""The parts that say what the model says of an input."""
_RESULTS = ("status", "board", "trust", "code", "more", "looks", "block", "attended", "address")
"""The parts that an explanation fills."""


def _part(name: str, **more: Any) -> Any:
    """A component of the page as ``page.toml`` describes it."""
    facts = _PARTS[name] | more
    return getattr(gr, facts.pop("component"))(elem_id=f"wf-{name}", **facts)


def _components(handlers: Handlers) -> dict[str, Any]:
    """The components of the page by name, laid out; they show the stored example."""
    first = VisitorSession()
    start = opening.stored(handlers, first)
    made: dict[str, Any] = {}

    def add(*names: str, **more: Any) -> None:
        for name in names:
            new = start.get(name, {})
            facts = dict(new) if isinstance(new, dict) else {"value": new}
            facts.pop("__type__", None)
            made[name] = _part(name, **facts | more)

    made["session"] = gr.State(first, time_to_live=4 * 3600, delete_callback=VisitorSession.forget)
    made["decided"] = gr.State(False)
    gr.HTML(piece("head"))
    with gr.Row(elem_classes="wf-page"):
        with _part("ask"):
            add("kind", "picture", "sentence", "chat", "truncate", "examples")
            with gr.Row(elem_classes="wf-go"):
                add("explain", "cancel")
            add("status", "progress", "says")
            add("model", **_models(handlers.catalogue))
            add("methods", "classes")
            add("length", maximum=handlers.limits.tokens)
            add("accordion")
            with made["accordion"]:
                add("form")
        with _part("answer"):
            add("board", "looks")
            with made["looks"]:
                add("style", "opacity", "keep")
            add("block", "attended", "more")
            with made["more"]:
                gr.HTML(piece("heading", words="May it be believed?"), elem_id="wf-believed")
                add("trust")
                gr.HTML(piece("heading", words="Keep it"))
                with gr.Row():
                    made |= {f"save-{k}": gr.Button(k.upper(), elem_id=f"wf-save-{k}", size="sm") for k in KINDS}
                add("code")
    add("file", "number", "address", "settings")
    return made


def _models(catalogue: Catalogue) -> dict[str, Any]:
    """The list of models: those that are offered by name, and ids of the hub where these are taken."""
    ids = [STORED_MODEL] if catalogue.hub else []
    choices = [(f"{name} ({ABOUT[name]})" if name in ABOUT else name, name) for name in [*catalogue.names(), *ids]]
    about = _PARTS["model"]["info"] + (", or a hub id: owner/name" if catalogue.hub else "")
    return {"choices": choices, "info": about, "allow_custom_value": catalogue.hub}


def build(handlers: Handlers) -> gr.Blocks:
    """The page as gradio blocks, not yet served."""
    with gr.Blocks(title="whyformer", analytics_enabled=False, fill_width=True) as page:
        parts = _components(handlers)
        wires = _Wires(handlers, parts)
        changed = _listen_to_input(wires)
        _listen_to_results(wires, changed)
        _listen_to_looks(wires)
        page.load(None, None, parts["board"], js="() => window.whyformerReady()")
        page.load(**wires.work(partial(opening.restore, handlers), wires.all, ["settings"], js=_HASH))
        page.load(_linger, **wires.light)
        gr.api(endpoint(handlers), api_name="explain", concurrency_id="model", concurrency_limit=1)
    return page


@dataclass(frozen=True)
class _Wires:
    """Functions as gradio takes them, which yield, or return, new values of parts by name."""

    handlers: Handlers
    parts: Mapping[str, Any]

    quiet: ClassVar[dict[str, Any]] = {"api_visibility": "private", "show_progress": "hidden"}
    # preprocess=False: uploads come unopened, and what the browser sent is checked in one place, PageInput.read
    # in the queue like all else: the gate refuses what goes beside it
    light: ClassVar[dict[str, Any]] = {"concurrency_limit": None, "preprocess": False, **quiet}
    working: ClassVar[dict[str, Any]] = light | {"concurrency_id": "model", "concurrency_limit": 1}

    def fill(
        self, function: Callable[..., Any], inputs: Sequence[str], outputs: Sequence[str], **more: Any
    ) -> dict[str, Any]:
        """How an event calls a function with the visitor's session and the values of some parts; ``outputs`` are all
        that it may fill, and no others: gradio would undo what is being typed into one."""

        def named(step: Updates) -> dict[Any, Any]:  # gradio empties everything if it is left nothing
            return {self.parts[name]: value for name, value in step.items()} or {self.parts[outputs[0]]: gr.skip()}

        @wraps(function)
        def filled(*given: Any, **facts: Any) -> dict[Any, Any]:
            return named(function(*given, **facts))

        @wraps(function)
        def filled_in_steps(*given: Any, **facts: Any) -> Iterator[dict[Any, Any]]:
            steps = iter(function(*given, **facts))
            yield from map(named, chain([next(steps, {})], steps))

        read = [self.parts[name] for name in ("session", *inputs)]
        filler = filled_in_steps if isgeneratorfunction(function) else filled
        return {"fn": filler, "inputs": read, "outputs": [self.parts[name] for name in outputs], **self.light, **more}

    def enter(self, function: Callable[..., Any], outputs: Sequence[str], **more: Any) -> dict[str, Any]:
        """The same with everything that was entered, as a mapping."""

        def read(mine: VisitorSession, *given: Any) -> Any:
            yield from function(mine, dict(zip(CONTROLS, given, strict=True)))

        return self.fill(read, CONTROLS, outputs, js=_WITH_FORM, **more)

    def work(
        self, function: Callable[..., Any], outputs: Sequence[str], inputs: Sequence[str] = CONTROLS, **more: Any
    ) -> dict[str, Any]:
        """The same for what takes long, and shows its progress."""

        def work(
            request: gr.Request, mine: VisitorSession, *given: Any,
            progress: gr.Progress = gr.Progress(),  # noqa: B008 - gradio's way to pass it
        ) -> Any:  # fmt: skip
            self.handlers.visitors[str(request.session_hash)] = mine
            yield from function(mine, dict(zip(inputs, given, strict=True)), progress=progress)

        return self.fill(work, inputs, outputs, **{"js": _WITH_FORM} | self.shown | more)

    @property
    def all(self) -> list[str]:
        """All parts but the session."""
        return [name for name in self.parts if name != "session"]

    @property
    def shown(self) -> dict[str, Any]:
        """How to work with a line that says how far it is."""
        return self.working | {"show_progress": "minimal", "show_progress_on": self.parts["progress"]}


def _listen_to_input(wires: _Wires) -> list[Any]:
    """Which function answers a change of the input; the events after which nothing that is shown holds."""
    handlers, parts = wires.handlers, wires.parts
    kind, picture, sentence, model = (parts[name] for name in ("kind", "picture", "sentence", "model"))

    def example(mine: VisitorSession, kind: str, decided: bool, event: gr.EventData) -> Updates:
        return handlers.example(mine, kind, event.example, decided)

    changed = [kind.input, picture.upload, picture.clear, sentence.input, parts["truncate"].input]
    changed.append(parts["examples"].click)
    # first, for gradio calls the listeners of an event in this order: what the others bring may not be cleared
    gr.on(changed, None, None, parts["board"], js=_CLEAR, **wires.quiet)
    model.input(None, None, parts["board"], js=_CLEAR_FOR, **wires.quiet)
    left = [picture.clear, sentence.input, parts["truncate"].input, model.input]
    gr.on(left, trigger_mode="multiple", **wires.enter(handlers.leave, ["status"]))
    look = wires.enter(handlers.look, _SEEN, **wires.shown)
    begin = wires.work(partial(opening.begin, handlers), sorted({*_SEEN, *_RESULTS}))
    kind.input(**wires.enter(partial(opening.switch, handlers), wires.all)).then(**begin)
    model.input(**wires.fill(lambda _: {"decided": True}, [], ["decided"]))
    picture.upload(**wires.fill(handlers.uploaded, ["decided"], ["model"])).then(**look)
    parts["examples"].click(**wires.fill(example, ["kind", "decided"], ["picture", "sentence", "model"])).then(**look)
    for event in (picture.clear, sentence.blur, model.input, parts["truncate"].input):
        event(trigger_mode="always_last", **look)
    parts["methods"].input(**wires.enter(handlers.settings, ["form"], **wires.working), trigger_mode="always_last")
    return [*changed, model.input, sentence.blur, parts["methods"].input]


def _listen_to_results(wires: _Wires, changed: list[Any]) -> None:
    """What explains, and what ends it."""
    handlers, parts = wires.handlers, wires.parts
    go, says, classes, form = (parts[name] for name in ("explain", "says", "classes", "form"))

    def chosen(_: VisitorSession, event: gr.EventData) -> Updates:
        return handlers.chosen(getattr(event, "classes", None))

    def saved(mine: VisitorSession, kind: str) -> Updates:
        return {"file": handlers.download(mine, kind)}

    explain, again = (wires.work(function, _RESULTS) for function in (handlers.explain, handlers.again))
    go.click(None, None, parts["status"], js=_WAIT, **wires.quiet)
    running = [go.click(trigger_mode="once", **explain)]
    running += [event(trigger_mode="always_last", **again) for event in (classes.input, form.input)]
    running.append(says.click(**wires.fill(chosen, [], ["classes"])).then(**explain))
    classes.change(None, classes, None, js="(chosen) => window.whyformerPress(chosen)")
    parts["cancel"].click(**wires.fill(handlers.stop, [], ["status"]), cancels=running)
    gr.on([*changed, classes.input, form.input, says.click, go.click], _linger, **wires.light)
    parts["address"].change(None, parts["address"], None, js="(view) => window.whyformerAddress(view)")
    for name in KINDS:
        made = parts[f"save-{name}"].click(**wires.fill(partial(saved, kind=name), [], ["file"]))
        made.then(None, parts["file"], None, js=_SAVE)


def _listen_to_looks(wires: _Wires) -> None:
    """Another drawing of the same maps, and what a word attends to."""
    handlers, parts = wires.handlers, wires.parts

    def word(mine: VisitorSession, at: str | None, event: gr.EventData) -> Iterator[Updates]:
        yield {"number": event.word}
        yield from handlers.word(mine, event.word, at)

    def sliders(_: VisitorSession, style: Any) -> Updates:
        return {name: gr.update(visible=(style == "kept") == (name == "keep")) for name in ("opacity", "keep")}

    redraw = wires.fill(handlers.redraw, ["style", "opacity", "keep"], ["board", "code", "address"])
    for event in (parts["style"].input, parts["opacity"].release, parts["keep"].release):
        event(trigger_mode="always_last", **redraw)
    parts["style"].input(**wires.fill(sliders, ["style"], ["opacity", "keep"]))
    parts["board"].click(**wires.fill(word, ["block"], ["number", "attended", "block"], **wires.working))
    parts["block"].input(**wires.fill(handlers.word, ["number", "block"], ["attended", "block"], **wires.working))


async def _linger() -> None:
    """Keep a visitor's stream of answers open for a while: Gradio closes it once no answer is awaited, and would lose
    the answer to what is asked at that very moment."""
    await asyncio.sleep(3)


def look() -> dict[str, Any]:
    """What ``launch`` needs to show the page: theme, style sheet and script, all from this folder."""
    theme = gr.themes.Base(
        primary_hue=gr.themes.colors.blue, neutral_hue=gr.themes.colors.slate, font=list(PAGES), font_mono=list(_MONO)
    )
    # white on gradio's own blue is too faint to read
    shades = {"background_fill": "*primary_700", "background_fill_hover": "*primary_800", "text_color": "white"}
    methods = {m.name: m for m in list_methods()}
    named = grouped({name: one.family for name, one in methods.items()})
    groups = {title: [(name, json.dumps(methods[name].summary, ensure_ascii=False)) for name in names]
              for title, names in named.items()}  # fmt: skip
    theme.set(**{f"button_primary_{k}{dark}": v for k, v in shades.items() for dark in ("", "_dark")})
    return {
        "theme": theme,
        "css": str(asset("claims.css") + asset("web/page.css")) + render("web/methods.css", groups=groups),
        "head": piece("script", script=asset("web/page.js")),
    }

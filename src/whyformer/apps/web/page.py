"""The page: its controls, and which function answers which of them."""

from __future__ import annotations

import asyncio
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Any

import gradio as gr

from whyformer.apps.web import opening
from whyformer.apps.web.api import endpoint
from whyformer.apps.web.asking import CONTROLS
from whyformer.apps.web.examples import ABOUT, STORED_MODEL
from whyformer.apps.web.handlers import Handlers, Updates
from whyformer.apps.web.limits import Catalogue
from whyformer.apps.web.telling import piece
from whyformer.apps.web.work import VisitorSession
from whyformer.defaults import grouped
from whyformer.methods import list_methods
from whyformer.show.html import asset, render

_PARTS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("page.toml").read_text(encoding="utf-8"))
# system fonts: nothing is fetched from anywhere
_SANS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "sans-serif")
_MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "DejaVu Sans Mono", "monospace")
# the settings are plain form fields; what stands in them goes along with each request as the last value
_WITH_FORM = "(...given) => [...given.slice(0, -1), window.whyformerSettings()]"
# at once, and in the browser alone: an answer of the server might come after what Explain shows
_CLEAR, _CLEAR_FOR = "() => window.whyformerClear()", "(model) => window.whyformerModel(model)"
_WAIT = "() => window.whyformerWaiting"
_SAVE = "(file) => window.whyformerSave(file)"
# once the page stands
_HASH = "async (mine) => (await new Promise((go) => setTimeout(go, location.hash ? 300 : 0)), [mine, location.hash])"
KINDS = ("png", "html", "json")


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
        _listen(page, handlers, parts)
        gr.api(endpoint(handlers), api_name="explain", concurrency_id="model", concurrency_limit=1)
    return page


def _filling(parts: Mapping[str, Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that yields, or returns, new values of parts by name, as gradio takes them."""

    @wraps(function)
    def filled(*given: Any, **more: Any) -> Iterator[dict[Any, Any]]:
        found = function(*given, **more)
        nothing = {parts["status"]: gr.skip()}  # gradio would empty everything if nothing at all was yielded
        count = 0
        for count, step in enumerate([found] if isinstance(found, dict) else found, 1):  # noqa: B007
            yield {parts[name]: value for name, value in step.items()} or nothing
        if count == 0:
            yield nothing

    return filled


def _listen(page: gr.Blocks, handlers: Handlers, parts: dict[str, Any]) -> None:
    """Which function answers which of the components."""
    fill = partial(_filling, parts)
    kind, picture, sentence, model, classes = (parts[n] for n in ("kind", "picture", "sentence", "model", "classes"))
    session, board, status, says, tries = (parts[n] for n in ("session", "board", "status", "says", "examples"))
    entered = [session, *(parts[name] for name in CONTROLS)]
    everything = list(parts.values())
    quiet: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
    # preprocess=False: uploads come unopened, and what the browser sent is checked in one place, PageInput.read
    working = {"concurrency_id": "model", "concurrency_limit": 1, "preprocess": False, **quiet}
    # in the queue like all else: the gate refuses what goes beside it
    light = {"concurrency_limit": None, "preprocess": False, **quiet}
    shown = {**working, "show_progress": "minimal", "show_progress_on": parts["progress"]}

    def known(request: gr.Request, mine: VisitorSession) -> None:
        handlers.visitors[str(request.session_hash)] = mine

    def explain(
        request: gr.Request, mine: VisitorSession, *given: Any,
        progress: gr.Progress = gr.Progress(),  # noqa: B008 - gradio's way to pass it
    ) -> Any:  # fmt: skip
        known(request, mine)
        yield from handlers.explain(mine, *given, progress=progress)

    def again(mine: VisitorSession, *given: Any, progress: gr.Progress = gr.Progress()) -> Any:  # noqa: B008
        yield from handlers.again(mine, *given, progress=progress)

    def begin(
        request: gr.Request, mine: VisitorSession, *given: Any, progress: gr.Progress = gr.Progress()  # noqa: B008
    ) -> Any:  # fmt: skip
        known(request, mine)
        yield from opening.begin(handlers, mine, *given, progress=progress)

    def restore(
        request: gr.Request, mine: VisitorSession, fragment: Any, progress: gr.Progress = gr.Progress()  # noqa: B008
    ) -> Any:  # fmt: skip
        known(request, mine)
        yield from opening.restore(handlers, mine, fragment, progress)

    def example(mine: VisitorSession, kind: str, decided: bool, event: gr.EventData) -> Updates:
        return handlers.example(mine, kind, event.example, decided)

    def word(mine: VisitorSession, at: str | None, event: gr.EventData) -> Any:
        yield {"number": event.word}
        yield from handlers.word(mine, event.word, at)

    # -- what is entered -------------------------------------------------------------------------------------------
    look = {"fn": fill(handlers.look), "inputs": entered, "outputs": everything, "js": _WITH_FORM, **shown}
    running = [kind.input(fill(partial(opening.switch, handlers)), entered, everything, js=_WITH_FORM, **light).then(
        fill(begin), entered, everything, js=_WITH_FORM, **shown
    )]  # fmt: skip
    model.input(lambda: True, None, parts["decided"], **light)
    picture.upload(handlers.uploaded, parts["decided"], model, **light).then(**look)
    for event in (picture.clear, sentence.blur, model.input, parts["truncate"].input):
        event(trigger_mode="always_last", **look)
    tries.click(fill(example), [session, kind, parts["decided"]], everything, **light).then(**look)
    changed = [kind.input, picture.upload, picture.clear, sentence.input, parts["truncate"].input, tries.click]
    gr.on(changed, None, None, board, js=_CLEAR, **quiet)
    model.input(None, model, board, js=_CLEAR_FOR, **quiet)
    chosen, form = parts["methods"], parts["form"]
    chosen.input(handlers.settings, entered, form, js=_WITH_FORM, trigger_mode="always_last", **working)

    # -- results ---------------------------------------------------------------------------------------------------
    ask = {"fn": fill(explain), "inputs": entered, "outputs": everything, "js": _WITH_FORM, **shown}
    go = parts["explain"]
    go.click(None, None, status, js=_WAIT, **quiet)
    running += [go.click(trigger_mode="once", **ask)]
    running += [
        event(**ask | {"fn": fill(again)}, trigger_mode="always_last") for event in (classes.input, form.input)
    ]  # fmt: skip
    running.append(says.click(handlers.chosen, classes, classes, **light).then(**ask))
    classes.change(None, classes, None, js="(chosen) => window.whyformerPress(chosen)")
    parts["cancel"].click(handlers.stop, session, status, cancels=running, **light)
    drawing = [session, *(parts[name] for name in ("style", "opacity", "keep"))]
    for event in (parts["style"].input, parts["opacity"].release, parts["keep"].release):
        event(fill(handlers.redraw), drawing, everything, trigger_mode="always_last", preprocess=False, **quiet)
    parts["style"].input(
        lambda chosen: (gr.update(visible=chosen != "kept"), gr.update(visible=chosen == "kept")),
        parts["style"], [parts["opacity"], parts["keep"]], **light,
    )  # fmt: skip
    board.click(fill(word), [session, parts["block"]], everything, **working)
    parts["block"].input(fill(handlers.word), [session, parts["number"], parts["block"]], everything, **working)
    for name in KINDS:
        make, file = partial(handlers.download, kind=name), parts["file"]
        parts[f"save-{name}"].click(make, session, file, **light).then(None, file, None, js=_SAVE)
    parts["address"].change(None, parts["address"], None, js="(view) => window.whyformerAddress(view)")

    asked = [*changed, model.input, sentence.blur, chosen.input, classes.input, form.input, says.click, go.click]
    gr.on([*asked, page.load], _linger, **light)
    page.load(None, None, board, js="() => window.whyformerReady()")
    page.load(fill(restore), [session, parts["settings"]], everything, js=_HASH, **shown)


async def _linger() -> None:
    """Keep a visitor's stream of answers open for a while: Gradio closes it once no answer is awaited, and would lose
    the answer to what is asked at that very moment."""
    await asyncio.sleep(3)


def look() -> dict[str, Any]:
    """What ``launch`` needs to show the page: theme, style sheet and script, all from this folder."""
    theme = gr.themes.Base(
        primary_hue=gr.themes.colors.blue, neutral_hue=gr.themes.colors.slate, font=list(_SANS), font_mono=list(_MONO)
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

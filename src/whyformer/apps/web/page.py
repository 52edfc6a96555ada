"""The page: its controls, and which function answers which of them."""

from __future__ import annotations

import asyncio
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr

from whyformer.apps.web import controls, examples
from whyformer.apps.web.api import endpoint
from whyformer.apps.web.examples import ABOUT, START_MODEL
from whyformer.apps.web.handlers import FIELDS, RESULTS, Handlers, offered
from whyformer.apps.web.restoring import PARTS, restore
from whyformer.apps.web.telling import piece
from whyformer.apps.web.telling import status as say
from whyformer.apps.web.work import VisitorSession
from whyformer.defaults import DEFAULT_METHOD
from whyformer.show.html import asset

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


def build(handlers: Handlers) -> gr.Blocks:
    """The page as gradio blocks, not yet served."""
    with gr.Blocks(title="whyformer", analytics_enabled=False, fill_width=True) as page:
        session = gr.State(VisitorSession(), time_to_live=4 * 3600, delete_callback=VisitorSession.forget)
        decided = gr.State(False)
        gr.HTML(piece("head"))
        hub = handlers.catalogue.hub
        with gr.Row(elem_classes="wf-page"):
            with _part("ask"):
                kind, picture, sentence, chat, truncate = map(
                    _part, ("kind", "picture", "sentence", "chat", "truncate")
                )
                tries = _part("examples", value=examples.offered("image"))
                with gr.Row(elem_classes="wf-go"):
                    go, cancel = _part("explain"), _part("cancel")
                status = _part("status", value=say("Choose an input, or try an example."))
                waiting, says = _part("progress"), _part("says")
                about = _PARTS["model"]["info"] + (", or a hub id: owner/name" if hub else "")
                choices = [(f"{n} ({ABOUT[n]})" if n in ABOUT else n, n) for n in handlers.catalogue.names()]
                named = {"choices": choices, "value": START_MODEL["image"], "info": about}
                model = _part("model", allow_custom_value=hub, **named)
                chosen = _part("methods", choices=offered("image"), value=[DEFAULT_METHOD])
                classes = _part("classes")
                length = _part("length", maximum=handlers.limits.tokens)
                with _part("settings") as settings:
                    form = _part("form", value=controls.form((DEFAULT_METHOD,), {}, 0))
                slot = _part("slot")
            with _part("answer"):
                board = _part("board", value=piece("empty", words="The maps appear here."))
                with _part("looks") as looks:
                    style, opacity, keep = map(_part, ("style", "opacity", "keep"))
                block, attended = _part("block"), _part("attended")
                with _part("more") as more:
                    gr.HTML(piece("heading", words="May it be believed?"), elem_id="wf-believed")
                    trust = _part("trust")
                    gr.HTML(piece("heading", words="Keep it"))
                    with gr.Row():
                        saves = {k: gr.Button(k.upper(), elem_id=f"wf-save-{k}", size="sm") for k in KINDS}
                    code = _part("code")
        file, number, place = _part("file"), _part("number"), _part("address")

        entered = [session, kind, picture, sentence, model, chosen, classes, truncate, style, opacity, keep]
        entered += [length, chat, slot]
        parts = {
            "status": status, "board": board, "trust": trust, "code": code, "more": more, "looks": looks,
            "block": block, "attended": attended, "address": place, "kind": kind, "picture": picture,
            "sentence": sentence, "model": model, "methods": chosen, "classes": classes, "truncate": truncate,
            "style": style, "opacity": opacity, "keep": keep, "says": says, "form": form, "examples": tries,
            "settings": settings, "length": length, "chat": chat,
        }  # fmt: skip
        results = [parts[name] for name in RESULTS]
        quiet: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
        # preprocess=False: uploads come unopened, and what the browser sent is checked in one place, Asked.read
        working = {"concurrency_id": "model", "concurrency_limit": 1, "preprocess": False, **quiet}
        light = {"concurrency_limit": None, **quiet}  # in the queue like all else: the gate refuses what goes beside it

        shown = {**working, "show_progress": "minimal", "show_progress_on": waiting}
        fields = [*(parts[name] for name in FIELDS), model, chosen, says, tries]
        kind.input(handlers.switch, kind, fields, **light).then(
            handlers.settings, entered, form, js=_WITH_FORM, **working
        )
        seen = [says, classes, form, status]
        model.input(lambda: True, None, decided, **light)
        picture.upload(handlers.uploaded, [model, decided], model, **light).then(
            handlers.look, entered, seen, js=_WITH_FORM, **shown
        )
        for event in (picture.clear, sentence.blur, model.input, truncate.input):
            event(handlers.look, entered, seen, js=_WITH_FORM, trigger_mode="always_last", **shown)
        changed = [kind.input, picture.upload, picture.clear, sentence.input, truncate.input, tries.click]
        gr.on(changed, None, None, board, js=_CLEAR, **quiet)
        model.input(None, model, board, js=_CLEAR_FOR, **quiet)
        chosen.input(handlers.settings, entered, form, js=_WITH_FORM, trigger_mode="always_last", **working)

        def tried(kind: str, named: str | None, event: gr.EventData) -> tuple[Any, ...]:
            # the one that knows such pictures
            asked = START_MODEL[kind] if kind == "answer" or not named else gr.skip()
            return (*handlers.example(kind, event.example), asked)

        tries.click(tried, [kind, model], [picture, sentence, model], **light).then(
            handlers.look, entered, seen, js=_WITH_FORM, **shown
        )

        def show_maps(
            request: gr.Request, mine: VisitorSession, *given: Any,
            progress: gr.Progress = gr.Progress(),  # noqa: B008 - gradio's way to pass it
        ) -> Any:  # fmt: skip
            handlers.visitors[str(request.session_hash)] = mine
            yield from handlers.explain(mine, *given, progress=progress)

        def show_maps_again(*given: Any, progress: gr.Progress = gr.Progress()) -> Any:  # noqa: B008
            yield from handlers.again(*given, progress=progress)

        go.click(None, None, status, js=_WAIT, **quiet)
        running = [go.click(show_maps, entered, results, js=_WITH_FORM, trigger_mode="once", **shown)]
        running += [
            event(show_maps_again, entered, results, js=_WITH_FORM, trigger_mode="always_last", **shown)
            for event in (classes.input, form.input)
        ]
        clicked_class = says.click(handlers.chosen, classes, classes, **light)
        running.append(clicked_class.then(show_maps, entered, results, js=_WITH_FORM, **shown))
        classes.change(None, classes, None, js="(chosen) => window.whyformerPress(chosen)")
        cancel.click(handlers.stop, session, status, cancels=running, **light)
        drawing = [session, style, opacity, keep]
        for event in (style.input, opacity.release, keep.release):
            event(handlers.redraw, drawing, [board, code, place], trigger_mode="always_last", preprocess=False, **quiet)
        style.input(
            lambda chosen: (gr.update(visible=chosen != "kept"), gr.update(visible=chosen == "kept")),
            style, [opacity, keep], **light,
        )  # fmt: skip

        def clicked(mine: VisitorSession, at: str | None, event: gr.EventData) -> tuple[Any, ...]:
            return (event.word, *handlers.word(mine, event.word, at))

        board.click(clicked, [session, block], [number, attended, block], **working)
        block.input(handlers.word, [session, number, block], [attended, block], **working)
        for name, button in saves.items():
            make = partial(handlers.download, kind=name)
            button.click(make, session, file, **light).then(None, file, None, js=_SAVE)
        place.change(None, place, None, js="(view) => window.whyformerAddress(view)")

        def show_again(
            request: gr.Request, mine: VisitorSession, fragment: Any,
            progress: gr.Progress = gr.Progress(),  # noqa: B008
        ) -> Any:  # fmt: skip
            handlers.visitors[str(request.session_hash)] = mine
            yield from restore(handlers, mine, fragment, progress)

        shown_again = [parts[name] for name in PARTS]
        asked = [*changed, model.input, sentence.blur, chosen.input, classes.input, form.input, says.click, go.click]
        gr.on([*asked, page.load], _linger, **light)
        page.load(None, js="() => window.whyformerReady()")
        page.load(show_again, [session, slot], shown_again, js=_HASH, **shown)
        gr.api(endpoint(handlers), api_name="explain", concurrency_id="model", concurrency_limit=1)
    return page


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
    theme.set(**{f"button_primary_{k}{dark}": v for k, v in shades.items() for dark in ("", "_dark")})
    return {
        "theme": theme,
        "css": str(asset("claims.css") + asset("web/page.css")),
        "head": piece("script", script=asset("web/page.js")),
    }

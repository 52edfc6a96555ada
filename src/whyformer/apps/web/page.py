"""The page: its controls, and which function answers which of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import gradio as gr

from whyformer.apps import DEFAULT_MODEL
from whyformer.apps.web import controls
from whyformer.apps.web.api import endpoint
from whyformer.apps.web.handlers import FIRST, RESULTS, Handlers, offered, piece
from whyformer.apps.web.session import Session
from whyformer.show.html import asset

# system fonts: nothing is fetched from anywhere
_SANS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "sans-serif")
_MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "DejaVu Sans Mono", "monospace")
# the settings are plain form fields; what stands in them goes along with each request as the last value
_WITH_FORM = "(...given) => [...given.slice(0, -1), window.whyformerSettings()]"
_WORD = """
element.addEventListener('click', (event) => {
  const word = event.target.closest('.wf-word');
  if (word) trigger('click', {word: Number(word.dataset.word)});
});
"""
_FORM = "element.addEventListener('change', () => trigger('input'));"
_SAVE = "(file) => window.whyformerSave(file)"
KINDS = ("png", "html", "json")
_STYLES = [("colours", "colours"), ("with contours", "contours"), ("only what matters", "kept")]
_KIND = [("a picture", "image"), ("a sentence", "text")]


def build(handlers: Handlers) -> gr.Blocks:
    """The page as gradio blocks, not yet served."""
    with gr.Blocks(title="whyformer", analytics_enabled=False, fill_width=True) as page:
        session = gr.State(Session(), time_to_live=4 * 3600)
        gr.HTML(piece("head"))
        with gr.Row(elem_classes="wf-page"):
            with gr.Column(scale=4, min_width=300, elem_id="wf-ask"):
                kind = gr.Radio(_KIND, value="image", label="Explain", elem_id="wf-kind")
                picture = gr.Image(
                    sources=["upload", "clipboard"], label="Picture", height=260, elem_id="wf-picture", buttons=[]
                )
                sentence = gr.Textbox(
                    label="Sentence", lines=3, max_lines=12, visible=False, elem_id="wf-sentence",
                    placeholder="An utterly charming film, though it drags.",
                )  # fmt: skip
                truncate = gr.Checkbox(label="Cut off what the model cannot take", visible=False)
                says = gr.HTML(elem_id="wf-says")
                more = ", or a hub id: owner/name" if handlers.catalogue.hub else ""
                model = gr.Dropdown(
                    handlers.catalogue.names(), value=DEFAULT_MODEL["image"], allow_custom_value=handlers.catalogue.hub,
                    label="Model", info="bundled, or a folder given at the start" + more, elem_id="wf-model",
                )  # fmt: skip
                chosen = gr.Dropdown(
                    offered("image"), value=list(FIRST), multiselect=True, label="Methods", elem_id="wf-methods"
                )
                classes = gr.Dropdown(
                    [], multiselect=True, label="Classes", elem_id="wf-classes",
                    info="type to search; without a choice, the likeliest one",
                )  # fmt: skip
                with gr.Accordion("Settings", open=False, elem_id="wf-settings"):
                    form = gr.HTML(controls.form(FIRST, {}, 0), js_on_load=_FORM)
                slot = gr.Textbox(visible=False)
                with gr.Row():
                    go = gr.Button("Explain", variant="primary", elem_id="wf-explain")
                    cancel = gr.Button("Cancel", elem_id="wf-cancel")
                status = gr.HTML(piece("status", words="Choose an input."), elem_id="wf-status")
            with gr.Column(scale=8, min_width=300, elem_id="wf-answer"):
                board = gr.HTML(piece("empty", words="The maps appear here."), js_on_load=_WORD, elem_id="wf-board")
                with gr.Row(visible=False, elem_id="wf-looks") as looks:
                    style = gr.Radio(_STYLES, value="colours", label="Show", elem_id="wf-style", scale=2)
                    opacity = gr.Slider(
                        0, 1, value=0.8, step=0.05, label="Opacity of the map", buttons=[], elem_id="wf-opacity"
                    )
                    keep = gr.Slider(
                        0.05, 1, value=0.2, step=0.05, label="Share shown", buttons=[], visible=False, elem_id="wf-keep"
                    )
                block = gr.Dropdown(
                    [("mean of all blocks", "mean")], value="mean", label="Attention in", visible=False,
                    elem_id="wf-block",
                )  # fmt: skip
                attended = gr.HTML(elem_id="wf-attended")
                with gr.Column(visible=False, elem_id="wf-more") as more:
                    gr.HTML(piece("heading", words="May it be believed?"))
                    trust = gr.HTML(elem_id="wf-trust")
                    gr.HTML(piece("heading", words="Keep it"))
                    with gr.Row():
                        saves = {k: gr.Button(k.upper(), elem_id=f"wf-save-{k}", size="sm") for k in KINDS}
                    code = gr.HTML(elem_id="wf-code")
        file = gr.JSON(visible=False)
        number = gr.Number(visible=False)

        entered = [session, kind, picture, sentence, model, chosen, classes, truncate, style, opacity, keep, slot]
        parts = {
            "status": status, "board": board, "trust": trust, "code": code, "more": more, "looks": looks,
            "block": block, "attended": attended,
        }  # fmt: skip
        results = [parts[name] for name in RESULTS]
        quiet: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
        # preprocess=False: uploads come unopened, and what the browser sent is checked in one place, Asked.read
        working = {"concurrency_id": "model", "concurrency_limit": 1, "preprocess": False, **quiet}

        fields = [picture, sentence, truncate, model, chosen, classes, says]
        kind.input(handlers.switch, kind, fields, queue=False, **quiet).then(
            handlers.settings, entered, form, js=_WITH_FORM, **working
        )
        seen = [says, classes, form, status]
        for event in (picture.upload, picture.clear, sentence.blur, model.input, truncate.input):
            event(handlers.look, entered, seen, js=_WITH_FORM, trigger_mode="always_last", **working)
        chosen.change(handlers.settings, entered, form, js=_WITH_FORM, trigger_mode="always_last", **working)

        shown = {**working, "show_progress": "minimal", "show_progress_on": status}

        def show_maps(*given: Any, progress: gr.Progress = gr.Progress()) -> Any:  # noqa: B008 - gradio's way to pass it
            yield from handlers.explain(*given, progress=progress)

        def show_maps_again(*given: Any, progress: gr.Progress = gr.Progress()) -> Any:  # noqa: B008
            yield from handlers.again(*given, progress=progress)

        running = [go.click(show_maps, entered, results, js=_WITH_FORM, trigger_mode="once", **shown)]
        running += [
            event(show_maps_again, entered, results, js=_WITH_FORM, trigger_mode="always_last", **shown)
            for event in (classes.input, form.input)
        ]
        cancel.click(handlers.stop, session, status, cancels=running, queue=False, **quiet)
        drawing = [session, style, opacity, keep]
        for event in (style.input, opacity.release, keep.release):
            event(handlers.redraw, drawing, [board, code], trigger_mode="always_last", preprocess=False, **quiet)
        style.input(
            lambda chosen: (gr.update(visible=chosen != "kept"), gr.update(visible=chosen == "kept")),
            style, [opacity, keep], queue=False, **quiet,
        )  # fmt: skip

        def clicked(mine: Session, at: str | None, event: gr.EventData) -> tuple[Any, ...]:
            return (event.word, *handlers.word(mine, event.word, at))

        board.click(clicked, [session, block], [number, attended, block], **working)
        block.input(handlers.word, [session, number, block], [attended, block], **working)
        for name, button in saves.items():
            make = partial(handlers.download, kind=name)
            button.click(make, session, file, queue=False, **quiet).then(None, file, None, js=_SAVE)
        gr.api(endpoint(handlers), api_name="explain", concurrency_id="model", concurrency_limit=1)
    return page


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
        "css": str(asset("web/page.css")),
        "head": piece("script", script=asset("web/page.js")),
    }

"""A view as a Python snippet, as command lines and as files."""

from __future__ import annotations

import json
import shlex
from typing import Any

import gradio as gr

from whyformer.apps.web.messages import piece
from whyformer.apps.web.visitor_session import View, VisitorSession
from whyformer.explanation.display import actual_method
from whyformer.inputs.pictures import SUFFIXES
from whyformer.methods import find
from whyformer.show import files
from whyformer.show.html import render


def recipe(view: View) -> str:
    """Return the snippet and the command line as HTML, with buttons that copy them."""
    return piece("code", blocks={"Python": snippet(view), "Command line": command(view)})


def surroundings(view: View) -> dict[str, Any]:
    """Return updates of the components around the maps: looks, code and downloads."""
    looks = gr.update(visible=view.source.kind == "image")
    block = gr.update(visible=False, value="mean")
    more = gr.update(visible=True)
    return {"code": recipe(view), "more": more, "looks": looks, "block": block, "attended": ""}


def snippet(view: View) -> str:
    """Return Python code that computes the results in the order of the page."""
    return render("web/snippet.py.txt", view=view, repr=repr)


def command(view: View) -> str:
    """Return one command line for all methods, or one for each if two of them differ in a setting of the same name."""
    if _one_line(view):
        shared = {key: value for _, settings in view.methods for key, value in settings.items()}
        verb = "generate" if view.asks else "explain" if len(view.methods) == 1 else "compare"
        return _line(view, verb, [name for name, _ in view.methods], shared)
    return "\n".join(_line(view, "explain", [name], settings) for name, settings in view.methods)


def _one_line(view: View) -> bool:
    """Return True if one command line is enough: all methods that have a setting have the same value of it."""
    for key in {key for _, settings in view.methods for key in settings}:
        values = {json.dumps(s.get(key, find(n).settings[key])) for n, s in view.methods if key in find(n).settings}
        if len(values) > 1:
            return False
    return True


def _line(view: View, verb: str, methods: list[str], settings: dict[str, Any]) -> str:
    parts = ["whyformer", verb]
    source = view.source.title if view.source.kind == "image" else str(view.source.content)
    # a pipe passes text that the command line could read as an option, a file or a folder
    odd = source.startswith("-") or "\n" in source or " " not in source
    risky = view.source.kind == "text" and (odd or source.lower().endswith((*SUFFIXES, ".txt")))
    parts += ["-"] if risky else [f"./{source}" if source.startswith("-") else source]
    parts += ["--pair", view.page_input.pair] if view.page_input.pair else []
    parts += ["--model", view.place, "--method", ",".join(methods)]
    for target in view.targets:
        parts += ["--target", str(target)]
    for key, value in settings.items():
        parts += ["--setting", f"{key}={json.dumps(value)}"]
    for option, value in view.look.items():
        parts += ["--cover"] if option == "fade" and not value else [f"--{option}", str(value)]
    for option, value in view.page_input.options.named.items():
        parts += [f"--{option.replace('_', '-')}", *([] if value is True else [str(value)])]
    parts += ["--image", view.picture.title] if view.picture is not None else []
    parts += ["--chat"] if view.page_input.chat else []
    parts += ["-n", str(view.page_input.length)] if view.asks else ["--format", "png,html,json"]
    line = shlex.join(parts)
    return f"printf %s {shlex.quote(source)} | {line}" if risky else line


def download(session: VisitorSession, kind: str) -> tuple[str, bytes]:
    """Return (file name, content) of the results as PNG, HTML or JSON, without writing a file."""
    view, results, contents = session.view, session.results, dict[str, bytes]()
    assert view is not None
    verb = "explain" if len(view.methods) == 1 else "compare"
    facts = files.record_of(verb, [] if view.asks else results, view.place, view.source.title)
    if view.asks:
        (g,) = results
        facts["generation"] = g.to_dict()
        stem = files.slug(view.source.name[:40], actual_method(g[0]), "answer")
        contents = files.answer_contents(g, stem, view.source.title, facts, [kind])
    else:
        contents = files.contents(results, view.source.name, view.source.title, facts, [kind], **view.look)
    return next(iter(contents.items()))

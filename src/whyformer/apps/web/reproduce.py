"""What makes exactly this view again elsewhere: a Python snippet, command lines, and files."""

from __future__ import annotations

import json
import shlex
from typing import Any

from whyformer.apps.web.visitor_session import View, VisitorSession
from whyformer.inputs.pictures import SUFFIXES
from whyformer.show import files
from whyformer.show.html import render


def snippet(view: View) -> str:
    """Python that ends with ``results``, in the order shown, and the picture or page of them."""
    return render("web/snippet.py.txt", view=view, picture=view.source.kind == "image", repr=repr)


def command(view: View) -> str:
    """The same as command lines: one for all methods, or one each where two of them differ in a setting they share."""
    if _one_line(view):
        shared = {key: value for _, settings in view.methods for key, value in settings.items()}
        verb = "explain" if len(view.methods) == 1 else "compare"
        return _line(view, verb, [name for name, _ in view.methods], shared)
    return "\n".join(_line(view, "explain", [name], settings) for name, settings in view.methods)


def _one_line(view: View) -> bool:
    """A setting given on the command line goes to each method that knows it, so all of those must agree."""
    from whyformer.methods import find

    given = {key for _, settings in view.methods for key in settings}
    for key in given:
        values = {json.dumps(s.get(key, find(n).settings[key])) for n, s in view.methods if key in find(n).settings}
        if len(values) > 1:
            return False
    return True


def _line(view: View, verb: str, methods: list[str], settings: dict[str, Any]) -> str:
    parts = ["whyformer", verb]
    source = view.source.title if view.source.kind == "image" else str(view.source.content)
    # words that the command line could read as an option, a file or a folder go by a pipe
    odd = source.startswith("-") or "\n" in source or " " not in source
    risky = view.source.kind == "text" and (odd or source.lower().endswith((*SUFFIXES, ".txt")))
    parts += ["-"] if risky else [f"./{source}" if source.startswith("-") else source]
    parts += ["--model", view.place, "--method", ",".join(methods)]
    for target in view.targets:
        parts += ["--target", str(target)]
    for key, value in settings.items():
        parts += ["--setting", f"{key}={json.dumps(value)}"]
    for option, value in view.look.items() if view.source.kind == "image" else ():
        parts += ["--cover"] if option == "fade" and not value else [f"--{option}", str(value)]
    parts += ["--truncate"] if view.truncate else []
    parts += ["--format", "png,html,json"]
    line = shlex.join(parts)
    return f"printf %s {shlex.quote(source)} | {line}" if risky else line


def download(session: VisitorSession, kind: str) -> tuple[str, bytes]:
    """(file name, content) of what is shown, as PNG, HTML or JSON; made in memory, no file is written."""
    view = session.view
    assert view is not None
    command = "explain" if len(view.methods) == 1 else "compare"
    facts = files.record_of(command, session.results, view.place, view.source.title)
    look = view.look if view.source.kind == "image" else {}
    made = files.contents(session.results, view.source.name, view.source.title, facts, [kind], **look)
    return next(iter(made.items()))

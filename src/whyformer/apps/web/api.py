"""The one endpoint for programs: ``/explain``, documented in docs/app.md. It remembers nothing."""

from __future__ import annotations

from typing import Any

import gradio as gr

from whyformer.apps.web import reproduce, work
from whyformer.apps.web.catalogue import DEFAULT
from whyformer.apps.web.handlers import FIRST, Asked, Handlers, Told, sentences
from whyformer.apps.web.session import Session
from whyformer.comparing import Refusal
from whyformer.evaluate.trust import warnings


def endpoint(handlers: Handlers) -> Any:
    """The function behind ``/explain``; its signature and words are what a client sees."""

    def explain(
        text: str = "",
        picture: dict | None = None,  # type: ignore[type-arg]
        model: str = "",
        methods: list[str] = list(FIRST),  # noqa: B006 - gradio reads the default; it is never changed
        targets: list[str] = [],  # noqa: B006
        settings: dict = {},  # type: ignore[type-arg]  # noqa: B006
        truncate: bool = False,
        measure: bool = False,
    ) -> dict:  # type: ignore[type-arg]
        """Explain a text or an uploaded picture: all maps asked for, and how to repeat them."""
        try:
            with sentences():
                return _answer(handlers, text, picture, model, methods, targets, settings, truncate, measure)
        except Told as told:
            raise gr.Error(str(told)) from told

    return explain


def _answer(
    handlers: Handlers, text: Any, picture: Any, model: Any, methods: Any, targets: Any, settings: Any,
    truncate: bool, measure: bool,
) -> dict[str, Any]:  # fmt: skip
    if bool(text) == bool(picture):
        raise Told("give either text or picture")
    path = picture.get("path") if isinstance(picture, dict) else picture
    kind = "image" if picture else "text"
    asked = Asked.read(
        (kind, {"path": path}, text, model or DEFAULT[kind], methods, targets, truncate, None, None, None, settings)
    )
    session = Session()
    loaded, view = handlers.full_view(session, asked)
    prediction = work.predict(session, loaded, view)
    results, refusals = [], {}
    for found in work.explain(session, loaded, view, session.track()):
        if isinstance(found, Refusal):
            refusals[found.method] = str(found.error)
        else:
            results.append(found)
    answer: dict[str, Any] = {
        "model": view.model,
        "top": [{"class": i, "name": n, "probability": p} for i, n, p in prediction.top()],
        "explanations": [e.to_dict() for e in results],
        "refusals": refusals,
        "warnings": list(dict.fromkeys(w for e in results for w in warnings(e))),
        "python": reproduce.snippet(view),
        "command": reproduce.command(view),
    }
    if measure:
        judged = work.judge(session, loaded, view, results, session.track())
        answer["faithfulness"] = [
            {"deletion": None, "random": [], "curve": None, "refusal": found}
            if isinstance(found, str)
            else {
                "deletion": float(found.areas[0]),
                "random": found.chance[:, 0].tolist(),
                "curve": found.curves[0].tolist(),
                "refusal": None,
            }
            for _, found in judged
        ]
    return answer

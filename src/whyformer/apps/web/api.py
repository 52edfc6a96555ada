"""The one endpoint for programs: ``/explain``, documented in docs/app.md. It remembers nothing."""

from __future__ import annotations

from typing import Any

from whyformer.apps import model_for
from whyformer.apps.web import reproduce, visitor_session
from whyformer.apps.web.handlers import Handlers
from whyformer.apps.web.messages import PageError, sentences
from whyformer.apps.web.page_input import CONTROLS, PageInput
from whyformer.apps.web.visitor_session import VisitorSession
from whyformer.comparing import Refusal
from whyformer.defaults import DEFAULT_METHOD
from whyformer.evaluation.trust import warnings


def endpoint(handlers: Handlers) -> Any:
    """The function behind ``/explain``; its signature and words are what a client sees."""

    @sentences()
    def explain(
        text: str = "",
        picture: dict | None = None,  # type: ignore[type-arg]
        model: str = "",
        methods: list[str] = [DEFAULT_METHOD],  # noqa: B006 - gradio reads the default; it is never changed
        targets: list[str] = [],  # noqa: B006
        settings: dict = {},  # type: ignore[type-arg]  # noqa: B006
        truncate: bool = False,
        measure: bool = False,
    ) -> dict:  # type: ignore[type-arg]
        """Explain a text or an uploaded picture: all maps asked for, and how to repeat them."""
        if bool(text) == bool(picture):
            raise PageError("give either text or picture")
        kind = "image" if picture else "text"
        file = picture if isinstance(picture, dict) else {"path": picture}
        entered: dict[str, Any] = {"kind": kind, "picture": file, "sentence": text, "truncate": truncate}
        entered |= {"methods": methods, "classes": targets, "settings": settings}
        entered["model"] = model_for(kind, model, "model")
        asked = PageInput.read(dict.fromkeys(CONTROLS) | entered)
        session = VisitorSession()
        handlers.visitors[f"program {id(session)}"] = session
        track = session.track(seconds=handlers.limits.seconds)
        loaded, view = handlers.full_view(session, asked)
        says = visitor_session.predict(session, loaded, view)
        figure = "value" if says.numeric else "probability"
        found = list(visitor_session.explain(session, loaded, view, track))
        results = [e for e in found if not isinstance(e, Refusal)]
        answer: dict[str, Any] = {
            "model": view.model,
            "top": [{"class": i, "name": n, figure: number} for i, n, number in says.top()],
            "explanations": [e.to_dict() for e in results],
            "refusals": {one.method: str(one.error) for one in found if isinstance(one, Refusal)},
            "warnings": list(dict.fromkeys(w for e in results for w in warnings(e))),
            "python": reproduce.snippet(view),
            "command": reproduce.command(view),
        }
        if measure:
            judged = [found for _, found in visitor_session.judge(session, loaded, view, results, track)]
            answer["faithfulness"] = [
                {
                    "deletion": None if isinstance(found, str) else float(found.areas[0]),
                    "random": [] if isinstance(found, str) else found.chance[:, 0].tolist(),
                    "curve": None if isinstance(found, str) else found.curves[0].tolist(),
                    "refusal": found if isinstance(found, str) else None,
                }
                for found in judged
            ]
        return answer

    return explain

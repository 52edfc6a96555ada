"""The endpoint for programs, ``/explain``, documented in docs/app.md. It stores nothing between calls."""

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
    """Return the function behind ``/explain``. Clients see its signature and docstring."""

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
        checkpoint: bool = False,
    ) -> dict:  # type: ignore[type-arg]
        """Explain a text or an uploaded picture. The answer has all maps, and code that repeats them."""
        if bool(text) == bool(picture):
            raise PageError("give either text or picture")
        kind = "image" if picture else "text"
        file = picture if isinstance(picture, dict) else {"path": picture}
        entered: dict[str, Any] = {"kind": kind, "picture": file, "sentence": text}
        entered |= {"methods": methods, "classes": targets, "settings": settings}
        entered |= {"truncate": truncate, "checkpoint": checkpoint}
        entered["model"] = model_for(kind, model, "model")
        asked = PageInput.read(dict.fromkeys(CONTROLS) | entered)
        session = VisitorSession()
        handlers.visitors[f"program {id(session)}"] = session
        track = session.track(seconds=handlers.limits.seconds)
        loaded, view = handlers.full_view(session, asked)
        says = visitor_session.predict(session, loaded, view)
        figure = "value" if says.numeric else "probability"
        maps = list(visitor_session.explain(session, loaded, view, track))
        results = [e for e in maps if not isinstance(e, Refusal)]
        answer: dict[str, Any] = {
            "model": view.model,
            "top": [{"class": i, "name": n, figure: number} for i, n, number in says.top()],
            "explanations": [e.to_dict() for e in results],
            "refusals": {e.method: str(e.error) for e in maps if isinstance(e, Refusal)},
            "warnings": list(dict.fromkeys(w for e in results for w in warnings(e))),
            "python": reproduce.snippet(view),
            "command": reproduce.command(view),
        }
        if measure:
            answer["faithfulness"] = [
                {"deletion": None, "random": [], "curve": None, "refusal": trust}
                if isinstance(trust, str)
                else {
                    "deletion": float(trust.areas[0]),
                    "random": trust.chance[:, 0].tolist(),
                    "curve": trust.curves[0].tolist(),
                    "refusal": None,
                }
                for _, trust in visitor_session.judge(session, loaded, view, results, track)
            ]
        return answer

    return explain

"""The endpoint for programs, ``/explain``, documented in docs/app.md. It stores nothing between calls."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple, get_type_hints

from whyformer.apps import model_for
from whyformer.apps.web import reproduce, visitor_session
from whyformer.apps.web.handlers import Handlers
from whyformer.apps.web.messages import PageError, sentences
from whyformer.apps.web.page_input import CONTROLS, PageInput
from whyformer.apps.web.visitor_session import VisitorSession
from whyformer.comparing import Refusal
from whyformer.defaults import DEFAULT_METHOD
from whyformer.evaluation.trust import warnings
from whyformer.options import DEFAULTS, PER_INPUT, kind_of
from whyformer.targets import reads_output


class EndpointCall(NamedTuple):
    """Arguments of the endpoint besides the options of the model. Gradio reads the defaults; they are never changed."""

    text: str = ""
    picture: dict | None = None  # type: ignore[type-arg]
    model: str = ""
    methods: list[str] = [DEFAULT_METHOD]  # noqa: RUF012
    targets: list[str] = []  # noqa: RUF012
    settings: dict = {}  # type: ignore[type-arg]  # noqa: RUF012
    measure: bool = False
    text_pair: str = ""


def endpoint(handlers: Handlers) -> Any:
    """Return the function behind ``/explain``. Clients see its signature and docstring."""

    @sentences()
    def explain(*values: Any, **named: Any) -> dict:  # type: ignore[type-arg]
        """Explain a text or an uploaded picture. The answer has all maps, and code that repeats them."""
        arguments = signature.bind(*values, **named).arguments
        options = {name: arguments.pop(name) for name in PER_INPUT if name in arguments}
        call = EndpointCall(**arguments)
        if bool(call.text) == bool(call.picture):
            raise PageError("give either text or picture")
        kind = "image" if call.picture else "text"
        file = call.picture if isinstance(call.picture, dict) else {"path": call.picture}
        entered: dict[str, Any] = {"kind": kind, "picture": file, "sentence": call.text, "pair": call.text_pair}
        targets = call.targets if isinstance(call.targets, list) else []
        rows = (target for target in targets if isinstance(target, str) and reads_output(target))
        entered |= {"classes": call.targets, "target": next(rows, "")}
        entered |= {"model": model_for(kind, call.model or None, "model")}
        page_input = PageInput.read(dict.fromkeys(CONTROLS) | call._asdict() | options | entered)
        session = VisitorSession()
        handlers.visitors[f"program {id(session)}"] = session
        track = session.track(seconds=handlers.limits.seconds)
        loaded, view, prediction = handlers.full_view(session, page_input)
        best = visitor_session.ranked(prediction)[:5]
        maps = list(visitor_session.explain(session, loaded, view, track))
        results = [e for e in maps if not isinstance(e, Refusal)]
        answer: dict[str, Any] = {
            "model": page_input.model,
            "top": [
                {"class": i, "name": name} | ({"value": number} if share is None else {"probability": share})
                for i, name, number, share in best
            ],
            "explanations": [e.to_dict() for e in results],
            "refusals": {e.method: str(e.error) for e in maps if isinstance(e, Refusal)},
            "warnings": list(dict.fromkeys(w for e in results for w in warnings(e))),
            "python": reproduce.snippet(view),
            "command": reproduce.command(view),
        }
        if call.measure:
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

    signature = _signature()
    explain.__signature__ = signature  # type: ignore[attr-defined]
    explain.__annotations__ |= {p.name: p.annotation for p in signature.parameters.values()}
    return explain


def _signature() -> inspect.Signature:
    """Return the signature of the endpoint: :class:`EndpointCall` and the options of the model."""
    kinds = get_type_hints(EndpointCall)
    parameters = [p.replace(annotation=kinds[p.name]) for p in inspect.signature(EndpointCall).parameters.values()]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    for name in PER_INPUT:
        default = getattr(DEFAULTS, name)
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=kind_of(name)))
    return inspect.Signature(parameters, return_annotation=dict)

"""One question has one answer, whoever is asked: library, command line, page, its endpoint for programs, server and jobs."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient
from torch import Tensor
from typer.testing import CliRunner

import whyformer
from whyformer.apps.cli import app
from whyformer.apps.server import Limits
from whyformer.apps.server.app import build
from whyformer.apps.web import Catalogue, PageLimits
from whyformer.apps.web.api import endpoint
from whyformer.apps.web.handlers import Handlers
from whyformer.apps.web.visitor_session import VisitorSession
from whyformer.explainer import Explainer
from whyformer.jobs.batching import Session
from whyformer.models import load

SENTENCE = "It starts slowly, but turns into a warm and charming film."
PICTURE = Path(__file__).parents[2] / "examples" / "pictures" / "digits_37.png"
MODELS = {"text": "bundled:sst2", "image": "bundled:digits"}
TARGETS = {"text": 1, "image": 7}
METHODS: dict[str, dict[str, Any]] = {
    "auto": {}, "attnlrp": {}, "transformer_attribution": {"start_layer": 1}, "integrated_gradients": {"steps": 5}, "rollout": {},
}  # fmt: skip
Asked = tuple[str, str, dict[str, Any], Path]


def library(asked: Asked) -> Any:
    kind, method, settings, _ = asked
    given = SENTENCE if kind == "text" else PICTURE
    return whyformer.explain(MODELS[kind], given, method, TARGETS[kind], **settings).scores


def command_line(asked: Asked) -> Any:
    kind, method, settings, folder = asked
    words = ["explain", SENTENCE if kind == "text" else str(PICTURE), "--model", MODELS[kind], "--method", method, "--target", f"#{TARGETS[kind]}"]
    words += [word for k, v in settings.items() for word in ("--setting", f"{k}={v}")]
    done = CliRunner().invoke(app, [*words, "--json", "--format", "none", "--out", str(folder)])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)["explanations"][0]["scores"]


def page(asked: Asked) -> Any:
    kind, method, settings, folder = asked
    handlers, session = Handlers(Catalogue(), PageLimits(), folder), VisitorSession()
    picture = None
    if kind == "image":
        (folder / PICTURE.name).write_bytes(PICTURE.read_bytes())
        picture = {"path": str(folder / PICTURE.name), "meta": {"_type": "gradio.FileData"}}
    words = SENTENCE if kind == "text" else ""
    handlers.switch(session, kind)
    entered = {
        "kind": kind, "picture": picture, "sentence": words, "model": MODELS[kind], "methods": [method], "classes": [f"#{TARGETS[kind]}"],
        "truncate": False, "checkpoint": False, "number": session.number, "style": "colours", "opacity": 1, "keep": 0.2, "length": 16, "chat": False,
        "settings": json.dumps({method: settings}),
    }  # fmt: skip
    for step in handlers.explain(session, entered):
        assert step
    file = handlers.download(session, "json")
    return json.loads(base64.b64decode(file["base64"]))["explanations"][0]["scores"]


def endpoint_for_programs(asked: Asked) -> Any:
    kind, method, settings, folder = asked
    given: dict[str, Any] = {"text": SENTENCE}
    if kind == "image":
        (folder / PICTURE.name).write_bytes(PICTURE.read_bytes())
        given = {"picture": {"path": str(folder / PICTURE.name), "meta": {"_type": "gradio.FileData"}}}
    ask = endpoint(Handlers(Catalogue(), PageLimits(), folder))
    answer = ask(**given, model=MODELS[kind], methods=[method], targets=[f"#{TARGETS[kind]}"], settings={method: settings})
    return answer["explanations"][0]["scores"]


def server(asked: Asked) -> Any:
    kind, method, settings, _ = asked
    session = Session(Explainer(load(MODELS[kind])), ())
    with TestClient(build(session, kind, Limits()), "http://127.0.0.1:8000") as client:
        if kind == "text":
            body = {"text": SENTENCE, "method": method, "target": TARGETS[kind], "settings": settings}
            answer = client.post("/v1/explain/text", json=body)
        else:
            asking = {"method": method, "target": TARGETS[kind], "settings": json.dumps(settings)}
            answer = client.post("/v1/explain/picture", params=asking, content=PICTURE.read_bytes())
    assert answer.status_code == 200, answer.text
    return answer.json()["explanations"][0]["scores"]


def data_set(asked: Asked) -> Any:
    kind, method, settings, _ = asked
    given = [SENTENCE if kind == "text" else PICTURE]
    (e,) = whyformer.explain_many(MODELS[kind], given, [(method, settings)], [TARGETS[kind]])
    return e.scores


ENTRANCES: dict[str, Callable[[Asked], Any]] = {
    "command line": command_line, "page": page, "endpoint": endpoint_for_programs, "server": server, "data set": data_set,
}  # fmt: skip


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", MODELS)
def test_every_entrance_gives_the_same_scores(kind: str, method: str, entrance: str, tmp_path: Path) -> None:
    asked = (kind, method, METHODS[method], tmp_path)
    wanted: Tensor = library(asked)
    found = torch.as_tensor(ENTRANCES[entrance](asked)).reshape(wanted.shape)
    torch.testing.assert_close(found.to(wanted), wanted, rtol=1e-5, atol=1e-6 * float(wanted.abs().max()))

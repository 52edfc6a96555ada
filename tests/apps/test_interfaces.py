"""All interfaces return the same scores: library, command line, page, the page's API endpoint, server and jobs."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from starlette.testclient import TestClient
from tokenizers import Tokenizer, models, pre_tokenizers
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
Request = tuple[str, str, dict[str, Any], Path]


def library(request: Request) -> Any:
    kind, method, settings, _ = request
    input_ = SENTENCE if kind == "text" else PICTURE
    return whyformer.explain(MODELS[kind], input_, method, TARGETS[kind], **settings).scores


def command_line(request: Request) -> Any:
    kind, method, settings, folder = request
    command = ["explain", SENTENCE if kind == "text" else str(PICTURE), "--model", MODELS[kind], "--method", method, "--target", f"#{TARGETS[kind]}"]
    command += [word for k, v in settings.items() for word in ("--setting", f"{k}={v}")]
    result = CliRunner().invoke(app, [*command, "--json", "--format", "none", "--out", str(folder)])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["explanations"][0]["scores"]


def page(request: Request) -> Any:
    kind, method, settings, folder = request
    handlers, session = Handlers(Catalogue(), PageLimits(), folder), VisitorSession()
    picture = None
    if kind == "image":
        (folder / PICTURE.name).write_bytes(PICTURE.read_bytes())
        picture = {"path": str(folder / PICTURE.name), "meta": {"_type": "gradio.FileData"}}
    sentence = SENTENCE if kind == "text" else ""
    handlers.switch(session, kind)
    entered = {
        "kind": kind, "picture": picture, "sentence": sentence, "pair": "", "target": "", "model": MODELS[kind], "methods": [method], "classes": [f"#{TARGETS[kind]}"],
        "truncate": False, "checkpoint": False, "number": session.number, "style": "colours", "opacity": 1, "keep": 0.2, "length": 16, "chat": False,
        "settings": json.dumps({method: settings}),
    }  # fmt: skip
    for step in handlers.explain(session, entered):
        assert step
    file = handlers.download(session, "json")
    return json.loads(base64.b64decode(file["base64"]))["explanations"][0]["scores"]


def api_endpoint(request: Request) -> Any:
    kind, method, settings, folder = request
    input_: dict[str, Any] = {"text": SENTENCE}
    if kind == "image":
        (folder / PICTURE.name).write_bytes(PICTURE.read_bytes())
        input_ = {"picture": {"path": str(folder / PICTURE.name), "meta": {"_type": "gradio.FileData"}}}
    explain = endpoint(Handlers(Catalogue(), PageLimits(), folder))
    response = explain(**input_, model=MODELS[kind], methods=[method], targets=[f"#{TARGETS[kind]}"], settings={method: settings})
    return response["explanations"][0]["scores"]


def server(request: Request) -> Any:
    kind, method, settings, _ = request
    session = Session(Explainer(load(MODELS[kind])), ())
    with TestClient(build(session, kind, Limits()), "http://127.0.0.1:8000") as client:
        if kind == "text":
            body = {"text": SENTENCE, "method": method, "target": TARGETS[kind], "settings": settings}
            response = client.post("/v1/explain/text", json=body)
        else:
            params = {"method": method, "target": TARGETS[kind], "settings": json.dumps(settings)}
            response = client.post("/v1/explain/picture", params=params, content=PICTURE.read_bytes())
    assert response.status_code == 200, response.text
    return response.json()["explanations"][0]["scores"]


def data_set(request: Request) -> Any:
    kind, method, settings, _ = request
    inputs = [SENTENCE if kind == "text" else PICTURE]
    (e,) = whyformer.explain_many(MODELS[kind], inputs, [(method, settings)], [TARGETS[kind]])
    return e.scores


def text_file(request: Request) -> Any:
    kind, method, settings, folder = request
    (folder / "text.txt").write_text(f"{SENTENCE}\n", encoding="utf-8")
    return whyformer.explain(MODELS[kind], folder / "text.txt", method, TARGETS[kind], **settings).scores


def job(request: Request) -> Any:
    kind, method, settings, folder = request
    (folder / "inputs").mkdir()
    (folder / "inputs" / "text.txt").write_text(f"{SENTENCE}\n", encoding="utf-8")
    (e,) = whyformer.explain_many(MODELS[kind], folder / "inputs", [(method, settings)], [TARGETS[kind]])
    return e.scores


INTERFACES: dict[str, Callable[[Request], Any]] = {
    "command line": command_line, "page": page, "endpoint": api_endpoint, "server": server, "data set": data_set,
}  # fmt: skip


@pytest.mark.parametrize("interface", INTERFACES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", MODELS)
def test_every_interface_returns_same_scores(kind: str, method: str, interface: str, tmp_path: Path) -> None:
    request = (kind, method, METHODS[method], tmp_path)
    expected: Tensor = library(request)
    result = torch.as_tensor(INTERFACES[interface](request)).reshape(expected.shape)
    torch.testing.assert_close(result.to(expected), expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("interface", [command_line, server, data_set, text_file, job])
def test_blanks_at_the_ends_of_a_text_are_part_of_it(interface: Callable[[Request], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = {"[PAD]": 0} | {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), 1)}
    letters = Tokenizer(models.BPE(vocabulary, []))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="[PAD]").save_pretrained(tmp_path / "letters")
    config = transformers.GPT2Config(vocab_size=len(vocabulary), n_positions=32, n_embd=16, n_layer=2, n_head=2, num_labels=3, pad_token_id=0)
    torch.manual_seed(0)
    transformers.GPT2ForSequenceClassification(config).save_pretrained(tmp_path / "letters")
    monkeypatch.setitem(MODELS, "text", str(tmp_path / "letters"))
    monkeypatch.setattr(sys.modules[__name__], "SENTENCE", "  a warm film ")
    request = ("text", "input_x_gradient", {}, tmp_path)
    expected = library(request)
    assert expected.shape == (1, 14)
    torch.testing.assert_close(torch.as_tensor(interface(request)).reshape(1, 14).to(expected), expected, rtol=1e-5, atol=1e-8)

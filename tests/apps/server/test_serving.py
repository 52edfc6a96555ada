"""The server: correct responses to concurrent clients, refused requests, graceful shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import jsonschema
import pytest
import torch
from PIL import Image
from starlette.exceptions import HTTPException
from transformers import (
    BertForMaskedLM,
    BertForTokenClassification,
    ViTImageProcessorPil,
    YolosConfig,
    YolosForObjectDetection,
)

import whyformer
from waiting import HANG, wait_for
from whyformer.apps import http
from whyformer.apps.cli.schema import make_schema
from whyformer.apps.server import Limits, batching, serve
from whyformer.apps.server.app import Service, build
from whyformer.apps.server.batching import Batcher, PendingRequest, while_awaited
from whyformer.apps.server.serving import require_key_if_public
from whyformer.errors import InputError
from whyformer.explainer import Explainer
from whyformer.jobs.batching import Session
from whyformer.methods import METHODS
from whyformer.methods.task import Task
from whyformer.models import load
from whyformer.options import DEFAULTS
from whyformer.targets import Query
from zoo_evaluate import tiny_bert

testclient = pytest.importorskip("starlette.testclient")
ROOT = Path(__file__).parents[3]
KEY = "a-key-of-sixteen-characters"


def limits(**more) -> Limits:
    """Limits without effective timeouts."""
    return Limits(**{"seconds": HANG, "grace": HANG, **more})


@pytest.fixture(scope="module")
def sst2():
    loaded = load("bundled:sst2")
    return Session(Explainer(loaded), ())


@pytest.fixture(scope="module")
def digits():
    loaded = load("bundled:digits")
    return Session(Explainer(loaded), ())


def make_client(app, host: str = "127.0.0.1:8000", **options):
    return testclient.TestClient(app, f"http://{host}", **options)


@pytest.fixture
def client(sst2):
    with make_client(build(sst2, "text", limits(size=5000, characters=300))) as test_client:
        yield test_client


def post_text(client, text, **more):
    return client.post("/v1/explain/text", json={"text": text, **more})


def test_response_equals_explain(client):
    response = post_text(client, "A charming film, though it drags.", method="gae", target="positive")
    assert response.status_code == 200
    jsonschema.validate(response.json(), make_schema())
    (explanation,) = response.json()["explanations"]
    e = whyformer.explain("bundled:sst2", "A charming film, though it drags.", "gae", "positive")
    torch.testing.assert_close(torch.tensor(explanation["scores"]), e.scores)
    assert explanation["tokens"] == e.tokens
    png = client.post("/v1/explain/text?format=png", json={"text": "A charming film."})
    assert png.headers["content-type"] == "image/png"
    Image.open(io.BytesIO(png.content)).verify()


def test_pair_of_texts_equals_explain(client, sst2):
    pairs = [("A charming film.", "It drags."), ("It drags.", "A charming film, truly."), ("A film.", "It drags.")]
    with ThreadPoolExecutor(3) as clients:
        answers = list(clients.map(lambda pair: post_text(client, pair[0], text_pair=pair[1], method="gae", target=1), pairs))
    for (text, pair), answer in zip(pairs, answers, strict=True):
        assert answer.status_code == 200, answer.text
        jsonschema.validate(answer.json(), make_schema())
        (explanation,) = answer.json()["explanations"]
        e = whyformer.explain("bundled:sst2", {"text": text, "text_pair": pair}, "gae", 1)
        torch.testing.assert_close(torch.tensor(explanation["scores"]), e.scores)
        assert explanation["tokens"] == e.tokens != whyformer.explain("bundled:sst2", text, "gae", 1).tokens
        assert pair in answer.json()["input"]
    png = client.post("/v1/explain/text?format=png", json={"text": "A film.", "text_pair": "It drags."})
    Image.open(io.BytesIO(png.content)).verify()
    assert post_text(client, "A film.", text_pair="a " * 149).status_code == 413
    assert post_text(client, "A film.", text_pair="").status_code == 422
    blank = post_text(client, "A film.", text_pair=" ")
    assert blank.status_code == 400 and "text_pair is empty" in blank.json()["detail"]


def test_target_as_text_equals_that_of_explain(client):
    for target in ("Contrast('positive', 0)", "LogProbability(1)"):
        answer = post_text(client, "A charming film, though it drags.", method="gae", target=target)
        assert answer.status_code == 200, answer.text
        jsonschema.validate(answer.json(), make_schema())
        (explanation,) = answer.json()["explanations"]
        e = whyformer.explain("bundled:sst2", "A charming film, though it drags.", "gae", target)
        torch.testing.assert_close(torch.tensor(explanation["scores"]), e.scores)
        assert explanation["target_names"] == e.target_names


def token_model(kind):
    """A tiny BERT that names words or fills masks."""
    base, reader = tiny_bert()
    base.config.id2label, base.config.label2id = {0: "O", 1: "PER", 2: "LOC"}, {"O": 0, "PER": 1, "LOC": 2}
    torch.manual_seed(0)
    return kind(base.config).eval(), reader


@pytest.mark.parametrize(("kind", "target"), [
    (BertForTokenClassification, "Token(1, 'PER')"), (BertForTokenClassification, "Token(-2, Contrast('LOC', 0))"),
    (BertForMaskedLM, "Token(2, 'good')"),
])  # fmt: skip
def test_targets_of_outputs_other_than_classes(kind, target):
    model, reader = token_model(kind)
    with make_client(build(Session(Explainer(model, reader), ()), "text", limits())) as client, ThreadPoolExecutor(4) as pool:
        texts = ["good film", "a good film", "the bad", "bad bad film"]
        answers = list(pool.map(lambda text: post_text(client, text, method="input_x_gradient", target=target), texts))
        for text, answer in zip(texts, answers, strict=True):
            assert answer.status_code == 200, answer.text
            e = whyformer.explain(model, text, "input_x_gradient", target, reader)
            (explanation,) = answer.json()["explanations"]
            torch.testing.assert_close(torch.tensor(explanation["scores"]), e.scores, rtol=1e-4, atol=1e-6)
            assert explanation["target_names"] == e.target_names
        for wrong, message in (("Token(9, 1)", "position 9 is outside"), (None, "a target must select"), ("Span(1, 2)", "the model's output")):
            refused = post_text(client, "good film", target=wrong)
            assert refused.status_code == 400
            assert message in refused.json()["detail"]


def test_query_of_detector(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = YolosForObjectDetection(YolosConfig(**sizes, image_size=[32, 32], patch_size=8, num_detection_tokens=4)).eval()
    processor = ViTImageProcessorPil(size={"height": 32, "width": 32})
    picture = Image.effect_noise((32, 32), 50).convert("RGB")
    body = io.BytesIO()
    picture.save(body, "PNG")
    with make_client(build(Session(Explainer(model, processor), ()), "image", limits())) as client:
        ask = {"method": "input_x_gradient", "target": "Query(1, 0)"}
        answer = client.post("/v1/explain/picture", params=ask, content=body.getvalue())
        assert answer.status_code == 200, answer.text
        e = whyformer.explain(model, picture, "input_x_gradient", Query(1, 0), processor)
        torch.testing.assert_close(torch.tensor(answer.json()["explanations"][0]["scores"]), e.scores)
        refused = client.post("/v1/explain/picture", params={"target": "Query(9, 0)"}, content=body.getvalue())
        assert refused.status_code == 400 and "query 9 is outside" in refused.json()["detail"]


def test_picture_is_sent_as_body(digits):
    raw = (ROOT / "examples/pictures/digits_37.png").read_bytes()
    with make_client(build(digits, "image", limits(pixels=10_000_000))) as client:
        response = client.post("/v1/explain/picture?target=3&method=rollout", content=raw)
        assert response.status_code == 200, response.text
        e = whyformer.explain("bundled:digits", ROOT / "examples/pictures/digits_37.png", "rollout", 3)
        torch.testing.assert_close(torch.tensor(response.json()["explanations"][0]["scores"]), e.scores)
        assert client.post("/v1/explain/picture?format=png", content=raw).content[:4] == b"\x89PNG"
        for bad, status in [(b"no picture", 400), (b"", 400), (raw[:90], 400)]:
            assert client.post("/v1/explain/picture", content=bad).status_code == status
        assert post_text(client, "a text").status_code == 400
    with make_client(build(digits, "image", limits(pixels=100))) as client:
        assert client.post("/v1/explain/picture", content=raw).status_code == 413


INVALID = {
    "no text": ({}, 422),
    "an empty text": ({"text": ""}, 422),
    "blanks": ({"text": "   "}, 400),
    "a number": ({"text": 5}, 422),
    "an unknown key": ({"text": "a", "txt": "b"}, 422),
    "an unknown method": ({"text": "a film", "method": "gea"}, 400),
    "a method for pictures": ({"text": "a film", "method": "vit_cx"}, 400),
    "an unknown setting": ({"text": "a film", "settings": {"stepz": 3}}, 400),
    "a setting out of range": ({"text": "a film", "method": "integrated_gradients", "settings": {"steps": 0}}, 400),
    "an unknown class": ({"text": "a film", "target": "ugly"}, 400),
    "a class out of range": ({"text": "a film", "target": 7}, 400),
    "a setting too large for a server": ({"text": "a film", "method": "integrated_gradients", "settings": {"steps": 10**7}}, 400),
    "a target that cannot be read": ({"text": "a film", "target": "Contrast(positive, 0)"}, 400),
    "a class of a target": ({"text": "a film", "target": "Contrast('ugly', 0)"}, 400),
    "a target for another output": ({"text": "a film", "target": "Token(1, 0)"}, 400),
    "a target that is nonsense": ({"text": "a film", "target": "Contrast(Logit(1), {2: 3})"}, 400),
    "a target for two samples": ({"text": "a film", "target": "Logit([0, 1])"}, 400),
    "a target too deep to read": ({"text": "a film", "target": "Logit(" + "-" * 250 + "x)"}, 400),
    "a target too long": ({"text": "a film", "target": "x" * 301}, 413),
    "too long for the model": ({"text": "! " * 140}, 400),
    "too many characters": ({"text": "x" * 301}, 413),
    "too many bytes": ({"text": "x" * 6000}, 413),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_request_has_status_and_detail(client, name):
    body, status = INVALID[name]
    response = client.post("/v1/explain/text", json=body)
    assert response.status_code == status, response.text
    assert status == 200 or response.json()["detail"]


@pytest.mark.parametrize("body", [b"{", b"\xff\xfe", b"[" * 4000, b"null", b"", b'{"text": NaN}'], ids=["torn", "no text", "deep", "null", "empty", "NaN"])
def test_malformed_body_is_refused(client, body):
    response = client.post("/v1/explain/text", content=body, headers={"content-type": "application/json"})
    assert response.status_code in (400, 422), response.text


@pytest.mark.parametrize("most", [1000, 5])
@pytest.mark.parametrize("method", METHODS)
def test_limit_of_settings_allows_defaults_and_refuses_more(sst2, method, most):
    service, settings = Service(sst2, "text", limits(setting=most)), METHODS[method].settings

    async def check(sent) -> None:
        service.check(PendingRequest("a film", method, sent, None))

    for sent in ({}, settings):
        run_in_thread(lambda sent=sent: check(sent))
    for name, value in settings.items():
        if isinstance(value, int) and value > most:
            with pytest.raises(InputError, match=f"{name} must be at most"):
                run_in_thread(lambda name=name, value=value: check({name: value + 1}))


@pytest.mark.parametrize("modality", ["both", "sound"])
def test_model_of_other_inputs_is_refused_at_the_start(monkeypatch, modality):
    loaded = dataclasses.replace(load("bundled:sst2"), modality=modality)
    monkeypatch.setattr("whyformer.models.load", lambda *names, **options: loaded)
    with pytest.raises(InputError, match="takes a text or a picture"):
        serve("bundled:sst2", host="127.0.0.1", port=1, keys=(), limits=limits(), options=DEFAULTS, started=lambda url: pytest.fail("started"))


def test_out_of_memory_has_status_413(sst2, monkeypatch):
    def full(self, *args, **kwargs):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")

    with make_client(build(sst2, "text", limits())) as client:
        monkeypatch.setattr(Task, "at_work", full)
        response = post_text(client, "A charming film, though it drags. " * 8, method="gae")
        assert response.status_code == 413
        assert "memory" in response.json()["detail"]


def test_body_without_content_length_is_limited(client):
    def chunks():
        for _ in range(20):
            yield b" " * 1000

    assert client.post("/v1/explain/text", content=chunks()).status_code == 413


def test_api_key_is_required(sst2):
    with make_client(build(sst2, "text", limits(), (KEY, "another key, long enough")), "any.example") as client:
        assert post_text(client, "a film").status_code == 401
        assert post_text(client, "a film").headers["www-authenticate"] == "Bearer"
        for headers in ({"Authorization": f"Bearer {KEY}"}, {"Authorization": f"bearer  {KEY}"}, {"X-API-Key": "another key, long enough"}):
            assert client.post("/v1/explain/text", json={"text": "a film"}, headers=headers).status_code == 200
        for headers in ({"X-API-Key": KEY[:-1]}, {"Authorization": f"Basic {KEY}"}, {"Authorization": "Bearer "}, {"X-API-Key": b"\xff"}, {"Host": "x/health?"}):
            assert client.post("/v1/explain/text", json={"text": "a film"}, headers=headers).status_code == 401
        for path in ("/metrics", "/v1/methods", "/openapi.json", "/docs", "/redoc"):
            assert client.get(path).status_code == 401, path
        assert client.get("/openapi.json", headers={"X-API-Key": KEY}).status_code == 200
        assert client.get("/health").json() == {"status": "ok"}
        assert client.get("/ready").json()["status"] == "ready"
    for host, keys, message in [("0.0.0.0", (), "needs a key"), ("127.0.0.1", ("short",), "at least 16"), ("::", (), "needs a key")]:
        with pytest.raises(InputError, match=message):
            require_key_if_public(host, keys)
    require_key_if_public("0.0.0.0", (KEY,))
    require_key_if_public("::1", ())


def test_server_without_key_accepts_only_local_host_names(sst2):
    with make_client(build(sst2, "text", limits())) as client:
        for host in ("evil.example:8000", "testserver", "localhost.evil.example", ""):
            assert client.get("/health", headers={"host": host}).status_code == 400, host
        for host in ("127.0.0.1:8000", "localhost", "[::1]:8000"):
            assert client.get("/health", headers={"host": host}).status_code == 200, host
    with make_client(build(sst2, "text", limits(), hosts=("127.0.0.5",)), "127.0.0.5:8000") as client:
        assert client.get("/health").status_code == 200


def test_documentation_pages_with_external_scripts_are_disabled(client):
    assert [client.get(path).status_code for path in ("/docs", "/redoc", "/openapi.json")] == [404, 404, 200]


@pytest.mark.parametrize("kind", ["application/json", "text/plain", "application/x-www-form-urlencoded", ""])
@pytest.mark.parametrize("headers", [{"Origin": "https://evil.example"}, {"Origin": "null"}, {"Origin": "http://127.0.0.1:1"}, {"Sec-Fetch-Site": "cross-site"}], ids=str)
def test_cross_site_requests_are_refused(client, headers, kind):
    for path in ("/v1/explain/text", "/v1/explain/picture"):
        response = client.post(path, content=b'{"text": "a film"}', headers={"content-type": kind, **headers})
        assert response.status_code == 403
        assert response.json()["detail"]


def test_same_origin_request_is_accepted(client):
    headers = {"Origin": "http://127.0.0.1:8000", "Sec-Fetch-Site": "same-origin"}
    assert client.post("/v1/explain/text", json={"text": "a film"}, headers=headers).status_code == 200


def test_metrics_and_list_of_methods(client):
    post_text(client, "a film")
    post_text(client, "")
    metrics = client.get("/metrics").text
    assert 'whyformer_requests_total{status="200"} 1.0' in metrics
    assert 'whyformer_requests_total{status="422"} 1.0' in metrics
    assert "whyformer_batch_count 1.0" in metrics
    names = [m["name"] for m in client.get("/v1/methods").json()]
    assert "gae" in names
    assert "vit_cx" not in names


# -- concurrent requests -----------------------------------------------------------------------------------------------
def test_64_concurrent_clients_receive_their_own_results(sst2):
    words = ["charming", "dull", "superb", "awful", "fine", "slow", "clever", "empty"]
    texts = [f"{'Very ' * (i % 3)}{words[i % 8]} and {words[i // 8]} film number {i}." for i in range(64)]
    methods = ["gae", "input_x_gradient"]
    expected = {(t, m): e for m in methods for t, e in zip(texts, whyformer.explain_many(sst2.model, texts, m, processor=sst2.processor), strict=True)}
    with make_client(build(sst2, "text", limits(batch=16, wait=0.02))) as client:

        def request(i: int) -> list:
            return [post_text(client, texts[i], method=m).json()["explanations"][0] for m in methods]

        with ThreadPoolExecutor(64) as pool:
            results = list(pool.map(request, range(64)))
        batches = client.get("/metrics").text
    for text, explanations in zip(texts, results, strict=True):
        for method, explanation in zip(methods, explanations, strict=True):
            assert explanation["texts"] == [text]
            torch.testing.assert_close(torch.tensor(explanation["scores"]), expected[text, method].scores, rtol=1e-4, atol=1e-6)
    count = float(next(line.split()[1] for line in batches.splitlines() if line.startswith("whyformer_batch_count")))
    assert count < 128  # some requests were batched


@pytest.fixture
def blocked_explain(monkeypatch):
    """Block all explanations until ``go`` is set; ``explained`` lists the texts whose explanation started."""
    go, begun, explained = threading.Event(), threading.Event(), []
    original = Session.explain

    def slow(self, reads, size):
        explained.extend(read.content for read in reads)
        begun.set()
        assert go.wait(HANG)
        return original(self, reads, size)

    monkeypatch.setattr(Session, "explain", slow)
    yield go, begun, explained
    go.set()


def pending_request(content: str = "a film", method: str = "gae", **settings) -> PendingRequest:
    return PendingRequest(content, method, settings, None)


def run_in_thread(function) -> None:
    """Run a coroutine function in a thread of its own, because other tests may have left an event loop in this one."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: asyncio.run(function())).result()


@contextlib.asynccontextmanager
async def run_batcher(session, limits: Limits):
    """A batcher that explains requests; at the end it is closed and its queue is empty."""
    batcher = Batcher(session, limits)
    worker = asyncio.create_task(batcher.run())
    yield batcher
    batcher.close()
    await asyncio.wait_for(worker, HANG)


def test_full_queue_refuses_and_accepted_requests_finish(sst2, blocked_explain):
    go, begun, _ = blocked_explain

    async def check() -> None:
        async with run_batcher(sst2, limits(batch=1, queue=2)) as batcher:
            answers = [batcher.submit(pending_request())]
            assert await asyncio.to_thread(begun.wait, HANG)
            answers += [batcher.submit(pending_request(f"film {i}")) for i in range(2)]
            with pytest.raises(HTTPException, match="429"):
                batcher.submit(pending_request())
            answers[1].cancel()  # the client disconnected, which frees a place in the queue
            await asyncio.sleep(0)
            answers.append(batcher.submit(pending_request("film 2")))
            go.set()
        assert answers[0].result().method == "gae"
        assert [answer.result().texts for answer in answers[2:]] == [["film 1"], ["film 2"]]
        assert answers[1].cancelled()
        with pytest.raises(HTTPException, match="429"):
            batcher.submit(pending_request())

    run_in_thread(check)


@pytest.mark.parametrize("count", [1, 3])
def test_work_ends_at_next_step_after_all_its_requests_are_cancelled(sst2, monkeypatch, count):
    steps, ended = [], []

    def cancelling(requests, work, *more, **options):
        try:
            for i, step in enumerate(while_awaited(requests, work)):
                steps.append(i)
                if i < count:
                    requests[i].answer.get_loop().call_soon_threadsafe(requests[i].answer.cancel)
                    wait_for(requests[i].answer.cancelled, "the cancellation")
                yield step
        except BaseException as error:
            ended.append(type(error))
            raise

    monkeypatch.setattr(batching, "while_awaited", cancelling)

    async def check() -> None:
        async with run_batcher(sst2, limits(batch=count)) as batcher:
            requests = [pending_request(f"film {i}", "integrated_gradients", steps=1000) for i in range(count)]
            answers = [batcher.submit(request) for request in requests]
            await asyncio.wait(answers, timeout=HANG)
            assert all(answer.cancelled() for answer in answers)
            monkeypatch.undo()
            with pytest.raises(InputError, match="the text is empty"):
                await batcher.submit(pending_request(" "))
            assert (await batcher.submit(pending_request())).method == "gae"  # the batcher goes on

    run_in_thread(check)
    assert steps == list(range(count))
    assert ended == [asyncio.CancelledError]  # once: the rows of a batch were not tried one by one


def test_cancelled_request_in_batch_is_not_started(sst2, blocked_explain):
    go, begun, explained = blocked_explain

    async def check() -> None:
        async with run_batcher(sst2, limits(batch=3, wait=HANG)) as batcher:
            first, second, third = (batcher.submit(pending_request(m, m)) for m in ("gae", "rollout", "saliency"))
            assert await asyncio.to_thread(begun.wait, HANG)
            second.cancel()
            go.set()
            assert (await first).method == "gae"
            assert (await third).method == "saliency"
        assert explained == ["gae", "saliency"]

    run_in_thread(check)


def test_batch_has_requests_of_one_kind_from_the_whole_queue(sst2, monkeypatch):
    batches = []
    monkeypatch.setattr(batching, "explain", lambda session, requests: batches.append([r.content for r in requests]) or [ValueError()] * len(requests))

    async def check() -> None:
        async with run_batcher(sst2, limits(batch=2)) as batcher:
            answers = [batcher.submit(pending_request(f"{m} {i}", m)) for i in range(3) for m in ("gae", "rollout")]
        assert all(isinstance(answer.exception(), ValueError) for answer in answers)

    run_in_thread(check)
    assert batches == [["gae 0", "gae 1"], ["rollout 0", "rollout 1"], ["gae 2"], ["rollout 2"]]


# -- disconnected clients and shutdown -----------------------------------------------------------------------------------
@contextlib.contextmanager
def run_server(app, grace: float = HANG):
    """Run the application in uvicorn; yield its address and a function that shuts it down and waits for the end."""
    with http.listen("127.0.0.1", [0]) as sock:
        server = http.server(app, 256, grace)
        thread = threading.Thread(target=server.run, args=([sock],))
        thread.start()

        def end() -> None:
            server.should_exit = True
            thread.join(HANG)
            assert not thread.is_alive()

        try:
            yield sock.getsockname(), end
        finally:
            end()


def open_post_connection(address, text: str) -> socket.socket:
    body = json.dumps({"text": text}).encode()
    line = socket.create_connection(address, timeout=HANG)
    line.sendall(b"POST /v1/explain/text HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    return line


def http_client(address) -> httpx.Client:
    return httpx.Client(base_url=f"http://127.0.0.1:{address[1]}")


def test_full_queue_has_status_429(sst2, blocked_explain):
    go, begun, _ = blocked_explain
    with make_client(build(sst2, "text", limits(batch=1, queue=1))) as client, ThreadPoolExecutor(8) as pool:
        first = pool.submit(post_text, client, "first")
        assert begun.wait(HANG)
        second = pool.submit(post_text, client, "second")
        wait_for(lambda: client.get("/ready").status_code == 503, "a full queue")
        assert {a.status_code for a in pool.map(lambda i: post_text(client, f"film {i}"), range(6))} == {429}
        go.set()
        assert [first.result().status_code, second.result().status_code] == [200, 200]


def test_late_response_has_status_504(sst2, blocked_explain):
    go, _, _ = blocked_explain
    with make_client(build(sst2, "text", Limits(batch=1, seconds=0.3))) as client, ThreadPoolExecutor(8) as pool:
        assert {a.status_code for a in pool.map(lambda i: post_text(client, f"film {i}"), range(8))} == {504}
        go.set()


def wait_for_queue_length(client, count: int) -> None:
    wait_for(lambda: client.get("/ready").json()["waiting"] == count, f"{count} requests in the queue")


def test_request_of_disconnected_client_leaves_queue(sst2, blocked_explain):
    go, begun, explained = blocked_explain
    with run_server(build(sst2, "text", limits(batch=1))) as (address, _), http_client(address) as client:
        with open_post_connection(address, "first") as first:
            assert begun.wait(HANG)
            lines = [open_post_connection(address, f"gone {i}") for i in range(10)]
            wait_for_queue_length(client, 10)
            for line in lines:
                line.close()
            wait_for_queue_length(client, 0)
            go.set()
            assert first.recv(12) == b"HTTP/1.1 200"
        assert post_text(client, "last").status_code == 200
        assert 'whyformer_requests_total{status="499"} 10.0' in client.get("/metrics").text
    assert explained == ["first", "last"]


def test_truncated_body_is_not_explained(sst2, blocked_explain):
    go, _, explained = blocked_explain
    go.set()
    with run_server(build(sst2, "text", limits())) as (address, _), http_client(address) as client:
        with socket.create_connection(address) as line:
            line.sendall(b'POST /v1/explain/text HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"text": "a film"}')
        assert post_text(client, "whole").status_code == 200
    assert explained == ["whole"]


def test_request_unfinished_after_grace_period_has_status_503(sst2, blocked_explain, capfd):
    _, begun, _ = blocked_explain
    with run_server(build(sst2, "text", limits(batch=1)), grace=0.5) as (address, end), http_client(address) as client, open_post_connection(address, "first") as first, open_post_connection(address, "second") as second:
        assert begun.wait(HANG)
        wait_for_queue_length(client, 1)
        end()
        assert first.recv(12) == second.recv(12) == b"HTTP/1.1 503"
    assert "Traceback" not in capfd.readouterr().err


# -- a server process ---------------------------------------------------------------------------------------------------
PROGRAM = "import sys; sys.argv[0] = 'whyformer'; sys.modules['torchvision'] = None; from whyformer.apps.cli import main; main()"


def accepted_count(client) -> float:
    """The number of requests that are queued or have been started."""
    metrics = dict(line.split() for line in client.get("/metrics").text.splitlines() if line.startswith(("whyformer_waiting", "whyformer_batch_sum")))
    return float(metrics["whyformer_waiting"]) + float(metrics["whyformer_batch_sum"])


def test_sigterm_finishes_accepted_requests(free_port):
    port = free_port()
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "WHYFORMER_API_KEY": KEY}
    command = [sys.executable, "-c", PROGRAM, "serve", "bundled:sst2", "--port", str(port), "--wait", "2000", "--seconds", str(HANG), "--grace", str(HANG), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, text=True) as process:
        line = process.stdout.readline()
        try:
            assert line, process.stderr.read()[-2000:]
            assert json.loads(line)["url"] == f"http://127.0.0.1:{port}"
            headers = {"Authorization": f"Bearer {KEY}"}
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers) as client, ThreadPoolExecutor(5) as pool:
                assert client.get("/ready").status_code == 200
                futures = [pool.submit(client.post, "/v1/explain/text", json={"text": f"film number {i}"}) for i in range(5)]
                wait_for(lambda: accepted_count(client) == 5, "five requests that wait for others")
                process.send_signal(signal.SIGTERM)
                responses = [a.result() for a in futures]
            assert [a.status_code for a in responses] == [200] * 5
            assert [a.json()["explanations"][0]["texts"] for a in responses] == [[f"film number {i}"] for i in range(5)]
            process.wait(HANG)
        finally:
            process.kill()
    assert process.returncode in (0, -signal.SIGTERM)

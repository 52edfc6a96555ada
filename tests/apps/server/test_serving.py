"""The server: right answers to many clients at once, none lost and none crossed; what is refused; a graceful end."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

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
from whyformer.apps.server import Limits, batching
from whyformer.apps.server.app import build
from whyformer.apps.server.batching import Batcher, PendingRequest, while_awaited
from whyformer.apps.server.serving import require_key_if_public
from whyformer.errors import InputError
from whyformer.explainer import Explainer
from whyformer.jobs.batching import Session
from whyformer.methods.task import Task
from whyformer.models import load
from whyformer.targets import Query
from zoo_evaluate import tiny_bert

testclient = pytest.importorskip("starlette.testclient")
ROOT = Path(__file__).parents[3]
KEY = "a-key-of-sixteen-characters"


def limits(**more) -> Limits:
    """Of a server whose requests may take as long as they need."""
    return Limits(**{"seconds": HANG, "grace": HANG, **more})


@pytest.fixture(scope="module")
def sst2():
    loaded = load("bundled:sst2")
    return Session(Explainer(loaded), ())


@pytest.fixture(scope="module")
def digits():
    loaded = load("bundled:digits")
    return Session(Explainer(loaded), ())


def served(app, host: str = "127.0.0.1:8000", **options):
    return testclient.TestClient(app, f"http://{host}", **options)


@pytest.fixture
def client(sst2):
    with served(build(sst2, "text", limits(size=5000, characters=300))) as made:
        yield made


def asked(client, text, **more):
    return client.post("/v1/explain/text", json={"text": text, **more})


def test_an_answer_is_what_explain_gives(client):
    answer = asked(client, "A charming film, though it drags.", method="gae", target="positive")
    assert answer.status_code == 200
    jsonschema.validate(answer.json(), make_schema())
    (found,) = answer.json()["explanations"]
    e = whyformer.explain("bundled:sst2", "A charming film, though it drags.", "gae", "positive")
    torch.testing.assert_close(torch.tensor(found["scores"]), e.scores)
    assert found["tokens"] == e.tokens
    png = client.post("/v1/explain/text?format=png", json={"text": "A charming film."})
    assert png.headers["content-type"] == "image/png"
    Image.open(io.BytesIO(png.content)).verify()


def test_a_target_as_text_is_that_of_explain(client):
    for target in ("Contrast('positive', 0)", "LogProbability(1)"):
        answer = asked(client, "A charming film, though it drags.", method="gae", target=target)
        assert answer.status_code == 200, answer.text
        jsonschema.validate(answer.json(), make_schema())
        (found,) = answer.json()["explanations"]
        e = whyformer.explain("bundled:sst2", "A charming film, though it drags.", "gae", target)
        torch.testing.assert_close(torch.tensor(found["scores"]), e.scores)
        assert found["target_names"] == e.target_names


def words_of_names(kind):
    """A tiny BERT that names words or fills masks."""
    base, reader = tiny_bert()
    base.config.id2label, base.config.label2id = {0: "O", 1: "PER", 2: "LOC"}, {"O": 0, "PER": 1, "LOC": 2}
    torch.manual_seed(0)
    return kind(base.config).eval(), reader


@pytest.mark.parametrize(("kind", "target"), [
    (BertForTokenClassification, "Token(1, 'PER')"), (BertForTokenClassification, "Token(-2, Contrast('LOC', 0))"),
    (BertForMaskedLM, "Token(2, 'good')"),
])  # fmt: skip
def test_outputs_other_than_classes_have_targets_too(kind, target):
    model, reader = words_of_names(kind)
    with served(build(Session(Explainer(model, reader), ()), "text", limits())) as client, ThreadPoolExecutor(4) as pool:
        texts = ["good film", "a good film", "the bad", "bad bad film"]
        answers = list(pool.map(lambda text: asked(client, text, method="input_x_gradient", target=target), texts))
        for text, answer in zip(texts, answers, strict=True):
            assert answer.status_code == 200, answer.text
            e = whyformer.explain(model, text, "input_x_gradient", target, reader)
            (found,) = answer.json()["explanations"]
            torch.testing.assert_close(torch.tensor(found["scores"]), e.scores, rtol=1e-4, atol=1e-6)
            assert found["target_names"] == e.target_names
        for wrong, said in (("Token(9, 1)", "position 9 is outside"), (None, "a target must select"), ("Span(1, 2)", "the model's output")):
            refused = asked(client, "good film", target=wrong)
            assert refused.status_code == 400
            assert said in refused.json()["detail"]


def test_the_query_of_a_detector(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = YolosForObjectDetection(YolosConfig(**sizes, image_size=[32, 32], patch_size=8, num_detection_tokens=4)).eval()
    processor = ViTImageProcessorPil(size={"height": 32, "width": 32})
    picture = Image.effect_noise((32, 32), 50).convert("RGB")
    body = io.BytesIO()
    picture.save(body, "PNG")
    with served(build(Session(Explainer(model, processor), ()), "image", limits())) as client:
        ask = {"method": "input_x_gradient", "target": "Query(1, 0)"}
        answer = client.post("/v1/explain/picture", params=ask, content=body.getvalue())
        assert answer.status_code == 200, answer.text
        e = whyformer.explain(model, picture, "input_x_gradient", Query(1, 0), processor)
        torch.testing.assert_close(torch.tensor(answer.json()["explanations"][0]["scores"]), e.scores)
        refused = client.post("/v1/explain/picture", params={"target": "Query(9, 0)"}, content=body.getvalue())
        assert refused.status_code == 400 and "query 9 is outside" in refused.json()["detail"]


def test_a_picture_is_the_body(digits):
    raw = (ROOT / "examples/pictures/digits_37.png").read_bytes()
    with served(build(digits, "image", limits(pixels=10_000_000))) as client:
        answer = client.post("/v1/explain/picture?target=3&method=rollout", content=raw)
        assert answer.status_code == 200, answer.text
        e = whyformer.explain("bundled:digits", ROOT / "examples/pictures/digits_37.png", "rollout", 3)
        torch.testing.assert_close(torch.tensor(answer.json()["explanations"][0]["scores"]), e.scores)
        assert client.post("/v1/explain/picture?format=png", content=raw).content[:4] == b"\x89PNG"
        for bad, status in [(b"no picture", 400), (b"", 400), (raw[:90], 400)]:
            assert client.post("/v1/explain/picture", content=bad).status_code == status
        assert asked(client, "a text").status_code == 400
    with served(build(digits, "image", limits(pixels=100))) as client:
        assert client.post("/v1/explain/picture", content=raw).status_code == 413


WRONG = {
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


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_told_with_its_status(client, name):
    body, status = WRONG[name]
    answer = client.post("/v1/explain/text", json=body)
    assert answer.status_code == status, answer.text
    assert status == 200 or answer.json()["detail"]


@pytest.mark.parametrize("body", [b"{", b"\xff\xfe", b"[" * 4000, b"null", b"", b'{"text": NaN}'], ids=["torn", "no text", "deep", "null", "empty", "NaN"])
def test_a_body_that_is_no_request_is_refused(client, body):
    answer = client.post("/v1/explain/text", content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 422), answer.text


def test_running_out_of_memory_has_its_status(sst2, monkeypatch):
    def full(self, *args, **kwargs):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")

    with served(build(sst2, "text", limits())) as client:
        monkeypatch.setattr(Task, "at_work", full)
        answer = asked(client, "A charming film, though it drags. " * 8, method="gae")
        assert answer.status_code == 413
        assert "memory" in answer.json()["detail"]


def test_a_body_without_a_length_is_counted_while_it_arrives(client):
    def chunks():
        for _ in range(20):
            yield b" " * 1000

    assert client.post("/v1/explain/text", content=chunks()).status_code == 413


def test_a_key_is_asked_for(sst2):
    with served(build(sst2, "text", limits(), (KEY, "another key, long enough")), "any.example") as client:
        assert asked(client, "a film").status_code == 401
        assert asked(client, "a film").headers["www-authenticate"] == "Bearer"
        for headers in ({"Authorization": f"Bearer {KEY}"}, {"Authorization": f"bearer  {KEY}"}, {"X-API-Key": "another key, long enough"}):
            assert client.post("/v1/explain/text", json={"text": "a film"}, headers=headers).status_code == 200
        for headers in ({"X-API-Key": KEY[:-1]}, {"Authorization": f"Basic {KEY}"}, {"Authorization": "Bearer "}, {"X-API-Key": b"\xff"}, {"Host": "x/health?"}):
            assert client.post("/v1/explain/text", json={"text": "a film"}, headers=headers).status_code == 401
        for path in ("/metrics", "/v1/methods", "/openapi.json", "/docs", "/redoc"):
            assert client.get(path).status_code == 401, path
        assert client.get("/openapi.json", headers={"X-API-Key": KEY}).status_code == 200
        assert client.get("/health").json() == {"status": "ok"}
        assert client.get("/ready").json()["status"] == "ready"
    for host, keys, words in [("0.0.0.0", (), "needs a key"), ("127.0.0.1", ("short",), "at least 16"), ("::", (), "needs a key")]:
        with pytest.raises(InputError, match=words):
            require_key_if_public(host, keys)
    require_key_if_public("0.0.0.0", (KEY,))
    require_key_if_public("::1", ())


def test_without_a_key_it_answers_to_names_of_this_machine_alone(sst2):
    with served(build(sst2, "text", limits())) as client:
        for host in ("evil.example:8000", "testserver", "localhost.evil.example", ""):
            assert client.get("/health", headers={"host": host}).status_code == 400, host
        for host in ("127.0.0.1:8000", "localhost", "[::1]:8000"):
            assert client.get("/health", headers={"host": host}).status_code == 200, host
    with served(build(sst2, "text", limits(), hosts=("127.0.0.5",)), "127.0.0.5:8000") as client:
        assert client.get("/health").status_code == 200


def test_no_page_is_served_that_loads_scripts_from_elsewhere(client):
    assert [client.get(path).status_code for path in ("/docs", "/redoc", "/openapi.json")] == [404, 404, 200]


@pytest.mark.parametrize("kind", ["application/json", "text/plain", "application/x-www-form-urlencoded", ""])
@pytest.mark.parametrize("headers", [{"Origin": "https://evil.example"}, {"Origin": "null"}, {"Origin": "http://127.0.0.1:1"}, {"Sec-Fetch-Site": "cross-site"}], ids=str)
def test_pages_of_other_sites_are_refused(client, headers, kind):
    for path in ("/v1/explain/text", "/v1/explain/picture"):
        answer = client.post(path, content=b'{"text": "a film"}', headers={"content-type": kind, **headers})
        assert answer.status_code == 403
        assert answer.json()["detail"]


def test_a_page_of_this_address_is_not_refused(client):
    headers = {"Origin": "http://127.0.0.1:8000", "Sec-Fetch-Site": "same-origin"}
    assert client.post("/v1/explain/text", json={"text": "a film"}, headers=headers).status_code == 200


def test_figures_and_the_list_of_methods(client):
    asked(client, "a film")
    asked(client, "")
    said = client.get("/metrics").text
    assert 'whyformer_requests_total{status="200"} 1.0' in said
    assert 'whyformer_requests_total{status="422"} 1.0' in said
    assert "whyformer_batch_count 1.0" in said
    names = [m["name"] for m in client.get("/v1/methods").json()]
    assert "gae" in names
    assert "vit_cx" not in names


# -- many at once ------------------------------------------------------------------------------------------------------
def test_64_clients_at_once_get_their_own_answers(sst2):
    words = ["charming", "dull", "superb", "awful", "fine", "slow", "clever", "empty"]
    texts = [f"{'Very ' * (i % 3)}{words[i % 8]} and {words[i // 8]} film number {i}." for i in range(64)]
    methods = ["gae", "input_x_gradient"]
    wanted = {(t, m): e for m in methods for t, e in zip(texts, whyformer.explain_many(sst2.model, texts, m, processor=sst2.processor), strict=True)}
    with served(build(sst2, "text", limits(batch=16, wait=0.02))) as client:

        def one(i: int) -> list:
            return [asked(client, texts[i], method=m).json()["explanations"][0] for m in methods]

        with ThreadPoolExecutor(64) as pool:
            found = list(pool.map(one, range(64)))
        batches = client.get("/metrics").text
    for text, answers in zip(texts, found, strict=True):
        for method, answer in zip(methods, answers, strict=True):
            assert answer["texts"] == [text]
            torch.testing.assert_close(torch.tensor(answer["scores"]), wanted[text, method].scores, rtol=1e-4, atol=1e-6)
    count = float(next(line.split()[1] for line in batches.splitlines() if line.startswith("whyformer_batch_count")))
    assert count < 128  # some were explained together


def waiting(content: str = "a film", seconds: float = HANG, **more) -> PendingRequest:
    return PendingRequest(content, more.pop("method", "gae"), more.pop("settings", {}), None, time.monotonic() + seconds)


def test_a_queue_has_an_end_and_what_was_accepted_is_finished(sst2, monkeypatch):
    go, begun = threading.Event(), threading.Event()
    original = Session.explain

    def slow(self, reads, size):
        begun.set()
        assert go.wait(HANG)
        return original(self, reads, size)

    monkeypatch.setattr(Session, "explain", slow)
    batcher = Batcher(sst2, limits(batch=1, queue=2))
    answers = [batcher.submit(waiting())]
    assert begun.wait(HANG)
    answers += [batcher.submit(waiting(f"film {i}")) for i in range(2)]
    with pytest.raises(HTTPException, match="429"):
        batcher.submit(waiting())
    answers[1].cancel()  # whoever waited for it is gone, and leaves room
    answers.append(batcher.submit(waiting("film 2")))
    closing = threading.Thread(target=batcher.close)
    go.set()
    closing.start()
    assert answers[0].result(HANG).method == "gae"
    assert answers[2].result(HANG).texts == ["film 1"]
    assert answers[3].result(HANG).texts == ["film 2"]
    closing.join(HANG)
    assert answers[1].cancelled()
    with pytest.raises(HTTPException, match="429"):
        batcher.submit(waiting())


def test_work_that_takes_too_long_is_ended(sst2, monkeypatch):
    batcher, looks = Batcher(sst2, limits()), itertools.count()
    monkeypatch.setattr(batching, "time", SimpleNamespace(monotonic=lambda: next(looks)))  # a clock that goes on when it is read
    late = batcher.submit(PendingRequest("a film", "integrated_gradients", {"steps": 1000}, None, deadline=0))
    with pytest.raises(TimeoutError):
        late.result(HANG)
    assert next(looks) == 2  # after the first step, and none was taken after it
    with pytest.raises(HTTPException, match="the text is empty"):
        batcher.submit(waiting(" ")).result(HANG)
    assert batcher.submit(waiting()).result(HANG).method == "gae"  # and the thread lives
    batcher.close()


def test_work_that_nobody_waits_for_ends_at_its_next_step():
    both = [waiting(), waiting()]
    steps = while_awaited(both, range(9))
    assert next(steps) == 0
    both[0].answer.cancel()
    assert next(steps) == 1
    both[1].answer.cancel()
    with pytest.raises(TimeoutError):
        next(steps)


def test_of_one_batch_what_was_cancelled_meanwhile_is_not_begun(sst2, monkeypatch):
    go, begun, explained = threading.Event(), threading.Event(), []
    original = Session.explain

    def slow(self, reads, size):
        explained.extend(read.content for read in reads)
        begun.set()
        assert go.wait(HANG)
        return original(self, reads, size)

    monkeypatch.setattr(Session, "explain", slow)
    batcher = Batcher(sst2, limits(batch=3, wait=HANG))
    first, second, third = (batcher.submit(waiting(m, method=m)) for m in ("gae", "rollout", "saliency"))
    assert begun.wait(HANG)
    second.cancel()
    go.set()
    assert first.result(HANG).method == "gae"
    assert third.result(HANG).method == "saliency"
    assert explained == ["gae", "saliency"]
    batcher.close()


# -- clients that go, and the end -----------------------------------------------------------------------------------------
@contextlib.contextmanager
def running(app, grace: float = HANG):
    """The application behind uvicorn: (its address, a function that ends it, and waits for that)."""
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


def posted(address, text: str) -> socket.socket:
    body = json.dumps({"text": text}).encode()
    line = socket.create_connection(address, timeout=HANG)
    line.sendall(b"POST /v1/explain/text HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    return line


def reached(address) -> httpx.Client:
    return httpx.Client(base_url=f"http://127.0.0.1:{address[1]}")


@pytest.fixture
def held(monkeypatch):
    """Explanations wait for ``go``; ``explained`` are the texts that were begun."""
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


def test_a_full_queue_has_its_status(sst2, held):
    go, begun, _ = held
    with served(build(sst2, "text", limits(batch=1, queue=1))) as client, ThreadPoolExecutor(8) as pool:
        first = pool.submit(asked, client, "first")
        assert begun.wait(HANG)
        second = pool.submit(asked, client, "second")
        wait_for(lambda: client.get("/ready").status_code == 503, "a full queue")
        assert {a.status_code for a in pool.map(lambda i: asked(client, f"film {i}"), range(6))} == {429}
        go.set()
        assert [first.result().status_code, second.result().status_code] == [200, 200]


def test_a_late_answer_has_its_status(sst2, held):
    go, _, _ = held
    with served(build(sst2, "text", Limits(batch=1, seconds=0.3))) as client, ThreadPoolExecutor(8) as pool:
        assert {a.status_code for a in pool.map(lambda i: asked(client, f"film {i}"), range(8))} == {504}
        go.set()


def is_waiting(client, count: int) -> None:
    wait_for(lambda: client.get("/ready").json()["waiting"] == count, f"{count} requests in the queue")


def test_a_request_whose_client_is_gone_leaves_the_queue(sst2, held):
    go, begun, explained = held
    with running(build(sst2, "text", limits(batch=1))) as (address, _), reached(address) as client:
        with posted(address, "first") as first:
            assert begun.wait(HANG)
            lines = [posted(address, f"gone {i}") for i in range(10)]
            is_waiting(client, 10)
            for line in lines:
                line.close()
            is_waiting(client, 0)
            go.set()
            assert first.recv(12) == b"HTTP/1.1 200"
        assert asked(client, "last").status_code == 200
        assert 'whyformer_requests_total{status="499"} 10.0' in client.get("/metrics").text
    assert explained == ["first", "last"]


def test_a_body_that_ends_early_is_no_request(sst2, held):
    go, _, explained = held
    go.set()
    with running(build(sst2, "text", limits())) as (address, _), reached(address) as client:
        with socket.create_connection(address) as line:
            line.sendall(b'POST /v1/explain/text HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"text": "a film"}')
        assert asked(client, "whole").status_code == 200
    assert explained == ["whole"]


def test_what_is_not_finished_within_the_grace_is_told_so(sst2, held, capfd):
    _, begun, _ = held
    with running(build(sst2, "text", limits(batch=1)), grace=0.5) as (address, end), reached(address) as client, posted(address, "first") as first, posted(address, "second") as second:
        assert begun.wait(HANG)
        is_waiting(client, 1)
        end()
        assert first.recv(12) == second.recv(12) == b"HTTP/1.1 503"
    assert "Traceback" not in capfd.readouterr().err


# -- a process of its own ------------------------------------------------------------------------------------------------
PROGRAM = "import sys; sys.argv[0] = 'whyformer'; sys.modules['torchvision'] = None; from whyformer.apps.cli import main; main()"


def accepted(client) -> float:
    """The requests that wait or are explained, or were."""
    said = dict(line.split() for line in client.get("/metrics").text.splitlines() if line.startswith(("whyformer_waiting", "whyformer_batch_sum")))
    return float(said["whyformer_waiting"]) + float(said["whyformer_batch_sum"])


def test_a_server_that_is_told_to_end_finishes_what_it_accepted(free_port):
    port = free_port()
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "WHYFORMER_API_KEY": KEY}
    command = [sys.executable, "-c", PROGRAM, "serve", "bundled:sst2", "--port", str(port), "--wait", "2000", "--seconds", str(HANG), "--grace", str(HANG), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, text=True) as process:
        line = process.stdout.readline()
        try:
            assert line, process.stderr.read()[-2000:]
            assert json.loads(line)["url"] == f"http://127.0.0.1:{port}"
            headers = {"Authorization": f"Bearer {KEY}"}
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers) as client, ThreadPoolExecutor(5) as pool:
                assert client.get("/ready").status_code == 200
                answers = [pool.submit(client.post, "/v1/explain/text", json={"text": f"film number {i}"}) for i in range(5)]
                wait_for(lambda: accepted(client) == 5, "five requests that wait for others")
                process.send_signal(signal.SIGTERM)
                found = [a.result() for a in answers]
            assert [a.status_code for a in found] == [200] * 5
            assert [a.json()["explanations"][0]["texts"] for a in found] == [[f"film number {i}"] for i in range(5)]
            process.wait(HANG)
        finally:
            process.kill()
    assert process.returncode in (0, -signal.SIGTERM)

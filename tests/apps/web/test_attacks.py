"""Attacks on the page and its server: endless work, calls that bypass the queue, other sites, guessed passwords, full disks."""

import gc
import os
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import gradio as gr
import httpx
import numpy as np
import pytest
from PIL import Image

from apps.web.visitor import SENTENCE
from waiting import HANG
from whyformer.apps.web import gate, server, visitor_session
from whyformer.apps.web.api import endpoint
from whyformer.apps.web.limits import PageLimits, has_room
from whyformer.apps.web.running import USER
from whyformer.apps.web.visitor_session import Stopped, VisitorSession
from whyformer.errors import InputError
from whyformer.explaining import open_model
from whyformer.methods import METHODS
from whyformer.prepared import Prepared

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
HUGE = 10**9


@pytest.fixture(scope="module", autouse=True)
def _collect_garbage():
    yield
    gc.collect()


@pytest.fixture(scope="module")
def site(catalogue, free_port):
    urls = []
    close = server.serve(catalogue, PageLimits(size=200_000), port=free_port(), started=urls.append, wait=False)
    yield urls[0].rstrip("/")
    close()


@pytest.fixture(scope="module")
def guarded(catalogue, free_port):
    urls = []
    close = server.serve(catalogue, port=free_port(), password="correct horse", started=urls.append, wait=False)
    yield urls[0].rstrip("/")
    close()


# -- endless work ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_numeric_setting_is_bounded(name):
    method = METHODS[name]
    for key, default in method.settings.items():
        if (isinstance(default, int | float) and not isinstance(default, bool)) or default is None:
            for value in (HUGE**2, float("inf"), float("nan")):
                if key in ("block", "start_layer", "blocks") or (isinstance(value, int) and key == "fill_id"):
                    continue  # block indices are validated against the model
                with pytest.raises(InputError, match=key):
                    method.complete({key: value})


def test_lists_of_heads_and_blocks_are_bounded():
    for name, settings in (("rollout", {"aggregation": {"heads": [0] * 10_000}}), ("gradcam", {"blocks": [0] * 10_000})):
        with pytest.raises(InputError):
            METHODS[name].complete(settings)


def test_request_for_billion_samples_is_refused_immediately(site, catalogue):
    body = {"data": [SENTENCE, None, "", ["smoothgrad"], [], {"smoothgrad": {"samples": HUGE}}, False, False, False, ""]}
    passes = []
    handle = catalogue.load("bundled:sst2").model.register_forward_pre_hook(lambda *_: passes.append(1))
    event = httpx.post(f"{site}/gradio_api/call/explain", json=body).json()["event_id"]
    events = httpx.get(f"{site}/gradio_api/call/explain/{event}").text
    handle.remove()
    assert "at most 10,000" in events
    assert len(passes) <= 1


def test_invalid_request_is_not_logged(site, capfd):
    event = httpx.post(f"{site}/gradio_api/call/explain", json={"data": ["", None, "", [], [], {}, False, False, False, ""]}).json()["event_id"]
    assert "give either text or picture" in httpx.get(f"{site}/gradio_api/call/explain/{event}").text
    assert "Traceback" not in capfd.readouterr().err


def test_request_time_is_limited():
    track = VisitorSession().track(seconds=0.05)
    with pytest.raises(InputError, match=r"smoothgrad took more than 0\.05 s"):
        for _ in track(range(100), "smoothgrad"):
            time.sleep(0.01)


def test_work_ends_when_visitor_leaves(handlers):
    session = VisitorSession()
    handlers.visitors["me"] = session
    session.begin()
    track = session.track()
    with pytest.raises(Stopped):
        for i in track(range(3)):
            if i == 1:
                handlers.visits("me", False)


def test_work_ends_when_page_ends(handlers, monkeypatch):
    visitor, original = VisitorSession(), visitor_session.predict
    handlers.visitors["me"] = visitor
    monkeypatch.setattr(visitor_session, "predict", lambda *args: (handlers.end(), original(*args))[1])
    with pytest.raises(gr.Error, match="Cancelled"):
        endpoint(handlers)(text=SENTENCE, methods=["integrated_gradients"])
    with pytest.raises(Stopped):
        next(iter(visitor.track()(range(3))))


def test_truncated_requests_are_not_logged(site, capfd):
    host, port = site.removeprefix("http://").split(":")
    for path in ("/gradio_api/call/explain", "/gradio_api/upload", "/login"):
        kind = "multipart/form-data; boundary=x" if path.endswith("upload") else "application/json"
        with socket.create_connection((host, int(port)), timeout=HANG) as connection:
            connection.sendall(f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: {kind}\r\nContent-Length: 500\r\n\r\n--x".encode())
    assert httpx.get(site).status_code == 200  # the page still responds
    assert capfd.readouterr().err == ""


# -- memory ----------------------------------------------------------------------------------------------------------
def test_session_memory_is_limited():
    session = VisitorSession(most=10**6)
    for i in range(40):
        session.once(str(i), lambda: np.zeros(10**5, np.uint8))
    assert session.bytes <= 10**6
    assert list(session.cache) == [str(i) for i in range(30, 40)]


def test_shared_objects_are_counted_once():
    session, picture = VisitorSession(), Image.new("RGB", (1000, 1000))
    for i in range(8):
        session.once(str(i), lambda: [picture])
    assert 3 * 10**6 <= session.bytes < 3.1 * 10**6


def test_total_session_memory_is_limited(monkeypatch):
    monkeypatch.setattr(visitor_session, "MOST_BYTES", 3 * 10**6)
    sessions = [VisitorSession() for _ in range(6)]
    for session in sessions:
        session.once("x", lambda: np.zeros(10**6, np.uint8))
    assert sum(session.bytes for session in sessions) <= 3 * 10**6
    assert sessions[-1].cache
    assert not sessions[0].cache


def test_session_of_departed_visitor_is_cleared_unless_visitor_returns(monkeypatch):
    departed, returned = VisitorSession(), VisitorSession()
    for session in (departed, returned):
        session.once("x", lambda: b"x" * 100)
        session.visit(here=False)
    returned.visit(here=True)
    monkeypatch.setattr(visitor_session, "GONE", 0.0)
    VisitorSession().once("y", lambda: b"y")
    assert not departed.cache
    assert returned.cache


def test_model_is_not_counted_in_session_memory(handlers):
    model = handlers.catalogue.load("bundled:digits").model
    session = VisitorSession()
    session.once("ready", lambda: Prepared(open_model(model), None, None, None))
    assert session.bytes < 1000


# -- requests that bypass the page -----------------------------------------------------------------------------------
@pytest.mark.parametrize("path", [
    "run/explain", "run/look", "run/look_1", "run/show_maps", "run/stop", "run/predict", "api/explain", "api/look", "run/download", "call/look",
    "call/v2/look", "profiling/clear", "run-history/connect",
])  # fmt: skip
def test_functions_cannot_be_called_outside_queue(site, path):
    with httpx.Client() as client:
        numbers = [function["id"] for function in client.get(f"{site}/config").json()["dependencies"]]
        for prefix in ("/gradio_api/", "/"):
            for name in (path, f"{path}/", f"/{path}"):
                for number in numbers[:: 1 if path == "run/explain" else 10]:
                    response = client.post(f"{site}{prefix}{name}", json={"data": [], "fn_index": number, "session_hash": "x"})
                    assert response.status_code in (403, 404, 405), (prefix, name, number)


def test_browser_functions_are_refused_in_queue(site, capfd):
    config = httpx.get(f"{site}/config").json()["dependencies"]
    numbers = [function["id"] for function in config if not function["backend_fn"]]
    assert numbers
    for number in [*numbers, str(numbers[0]), float(numbers[0]), len(config) + 9, None]:
        body = {"data": [], "fn_index": number, "session_hash": "x"}
        for path in ("/gradio_api/queue/join", "/queue/join"):
            assert httpx.post(f"{site}{path}", json=body).status_code == 403
    assert capfd.readouterr().err == ""


def test_other_http_methods_are_refused(site):
    for method in ("PUT", "DELETE", "PATCH"):
        assert httpx.request(method, f"{site}/gradio_api/run/look", json={}).status_code in (403, 405)


@pytest.mark.parametrize("headers", [{"Origin": "https://evil.example"}, {"Origin": "null"}, {"Origin": "http://127.0.0.1:1"}, {"Sec-Fetch-Site": "cross-site"}])
def test_cross_site_post_is_refused(site, headers):
    for path in ("/gradio_api/call/explain", "/gradio_api/queue/join", "/gradio_api/cancel", "/login"):
        assert httpx.post(f"{site}{path}", json={"data": ["hi"]}, headers=headers).status_code == 403, path
    assert httpx.post(f"{site}/gradio_api/upload", files={"files": ("a.png", b"x")}, headers=headers).status_code == 403


def test_same_origin_post_is_accepted(site):
    headers = {"Origin": site, "Sec-Fetch-Site": "same-origin"}
    assert httpx.post(f"{site}/gradio_api/call/explain", json={"data": ["hi"]}, headers=headers).status_code == 200


def test_login_is_delayed_after_wrong_passwords(catalogue, free_port, monkeypatch):
    urls, now = [], 1000.0
    monkeypatch.setattr(gate, "time", SimpleNamespace(monotonic=lambda: now))
    close = server.serve(catalogue, port=free_port(), password="correct horse", started=urls.append, wait=False)
    site = urls[0].rstrip("/")

    def login_status(password):
        return httpx.post(f"{site}/login", data={"username": USER, "password": password}).status_code

    try:
        assert [login_status("wrong") for _ in range(3)] == [400, 400, 400]
        assert login_status("correct horse") == 429
        now += 1.1
        assert login_status("wrong") == 400
        assert login_status("correct horse") == 429
        now += 2.1
        assert login_status("correct horse") == 200
        assert [login_status("wrong"), login_status("correct horse")] == [400, 200]
    finally:
        close()


@pytest.mark.parametrize("path", ["/gradio_api/call/explain", "/gradio_api/upload", "/login"])
def test_missing_body_times_out(site, monkeypatch, path):
    monkeypatch.setattr(gate, "PATIENCE", 0.5)
    host, port = site.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=HANG) as connection:
        kind = "multipart/form-data; boundary=x" if path.endswith("upload") else "application/json"
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: {kind}\r\nContent-Length: 500\r\n\r\n--x".encode())
        response = b""
        while not response.endswith((b"within 0.5 seconds", b"too slow")) and (chunk := connection.recv(10_000)):
            response += chunk
        assert response.split()[1] in (b"408", b"400")
        assert response.endswith(b"too slow" if path.endswith("upload") else b"within 0.5 seconds")  # not an error for another reason


# -- uploads ---------------------------------------------------------------------------------------------------------
def test_uploads_are_limited_in_size_and_expire(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "new.png").write_bytes(b"x" * 600)
    assert has_room(tmp_path, 1000, HANG)
    old = tmp_path / "a" / "old.png"
    old.write_bytes(b"x" * 600)
    assert not has_room(tmp_path, 1000, HANG)
    os.utime(old, (time.time() - 2 * HANG,) * 2)
    assert has_room(tmp_path, 1000, HANG)
    assert not old.exists()


def test_upload_beyond_quota_is_refused(catalogue, free_port):
    urls = []
    close = server.serve(catalogue, PageLimits(uploads=0), port=free_port(), started=urls.append, wait=False)
    try:
        assert httpx.post(f"{urls[0].rstrip('/')}/gradio_api/upload", files={"files": ("a.png", b"x")}).status_code == 507
    finally:
        close()


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), pytest.param(signal.SIGINT, marks=pytest.mark.whole)])
def test_terminated_server_deletes_uploads(tmp_path, free_port, number):
    command = [sys.executable, "-c", "from whyformer.apps.cli import main; main()", "app", "--port", str(free_port())]
    process = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONFAULTHANDLER": "1"}, stdout=subprocess.PIPE, text=True)
    try:
        assert "whyformer serves" in process.stdout.readline()
        assert list(tmp_path.glob("whyformer-app-*"))
        process.send_signal(number)
        assert process.wait(HANG) == 0
    finally:
        process.send_signal(signal.SIGABRT)  # prints the stacks of all threads, if it hangs
        process.wait()
    assert not list(tmp_path.glob("whyformer-app-*"))

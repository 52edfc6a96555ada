"""Attacks on the page and its server: endless work, calls that bypass the queue, other sites, guessed passwords, full disks."""

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import gradio as gr
import httpx
import numpy as np
import pytest
from PIL import Image

from apps.web.visitor import SENTENCE
from waiting import HANG
from whyformer.apps.web import running, server, visitor_session
from whyformer.apps.web.api import endpoint
from whyformer.apps.web.handlers import Handlers
from whyformer.apps.web.limits import PageLimits
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


# -- endless work ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_numeric_setting_is_bounded(name):
    method = METHODS[name]
    for key, default in method.settings.items():
        if (isinstance(default, int | float) and not isinstance(default, bool)) or default is None:
            for value in (HUGE**2, float("inf"), float("nan")):
                if key in ("block", "start_layer", "blocks"):
                    continue  # block indices are validated against the model
                with pytest.raises(InputError, match=key):
                    method.complete({key: value})


def test_lists_of_heads_and_blocks_are_bounded():
    for name, settings in (("rollout", {"aggregation": {"heads": [0] * 10_000}}), ("gradcam", {"blocks": [0] * 10_000})):
        with pytest.raises(InputError):
            METHODS[name].complete(settings)


def test_request_for_billion_samples_is_refused_immediately(site, catalogue):
    body = {"data": [SENTENCE, None, "", ["smoothgrad"], [], {"smoothgrad": {"samples": HUGE}}, False, "", False, False]}
    passes = []
    handle = catalogue.load("bundled:sst2").model.register_forward_pre_hook(lambda *_: passes.append(1))
    event = httpx.post(f"{site}/gradio_api/call/explain", json=body).json()["event_id"]
    events = httpx.get(f"{site}/gradio_api/call/explain/{event}").text
    handle.remove()
    assert "at most 10,000" in events
    assert len(passes) <= 1


def test_invalid_request_is_not_logged(site, capfd):
    event = httpx.post(f"{site}/gradio_api/call/explain", json={"data": ["", None, "", [], [], {}, False, "", False, False]}).json()["event_id"]
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
                handlers.unload(gr.Request(session_hash="me"))


def test_closed_tab_ends_work(catalogue, free_port, monkeypatch):
    closed, urls = threading.Event(), []

    def unload(self, request: gr.Request) -> None:
        if request.session_hash == "visitor":
            closed.set()

    monkeypatch.setattr(Handlers, "unload", unload)
    close = server.serve(catalogue, port=free_port(), started=urls.append, wait=False)
    try:
        with httpx.stream("GET", f"{urls[0]}gradio_api/heartbeat/visitor", timeout=HANG) as stream:
            next(stream.iter_bytes())
            assert not closed.is_set()
        assert closed.wait(HANG)
    finally:
        close()


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


def test_model_is_not_counted_in_session_memory(handlers):
    model = handlers.catalogue.load("bundled:digits").model
    session = VisitorSession()
    session.once("ready", lambda: Prepared(open_model(model), None, None, None))
    assert session.bytes < 1000


# -- requests that bypass the page -----------------------------------------------------------------------------------
@pytest.mark.parametrize("headers", [{"Origin": "https://evil.example"}, {"Origin": "null"}, {"Origin": "http://127.0.0.1:1"}, {"Sec-Fetch-Site": "cross-site"}])
def test_cross_site_post_is_refused(site, headers):
    for path in ("/gradio_api/call/explain", "/gradio_api/queue/join", "/gradio_api/cancel", "/login"):
        assert httpx.post(f"{site}{path}", json={"data": ["hi"]}, headers=headers).status_code == 403, path
    assert httpx.post(f"{site}/gradio_api/upload", files={"files": ("a.png", b"x")}, headers=headers).status_code == 403


def test_same_origin_post_is_accepted(site):
    headers = {"Origin": site, "Sec-Fetch-Site": "same-origin"}
    assert httpx.post(f"{site}/gradio_api/call/explain", json={"data": ["hi"]}, headers=headers).status_code == 200


def test_missing_body_times_out(catalogue, free_port, monkeypatch):
    monkeypatch.setattr(running, "PATIENCE", 0.5)
    port = free_port()
    close = server.serve(catalogue, port=port, wait=False)
    try:
        for path in ("/gradio_api/call/explain", "/gradio_api/upload", "/login"):
            with socket.create_connection(("127.0.0.1", port), timeout=HANG) as connection:
                kind = "multipart/form-data; boundary=x" if path.endswith("upload") else "application/json"
                head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: {kind}\r\nContent-Length: 500\r\n\r\n--x"
                connection.sendall(head.encode())
                assert connection.recv(10_000).split()[1] == b"408", path
    finally:
        close()


# -- uploads ---------------------------------------------------------------------------------------------------------
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

"""The page and its server under hostile use: work without end, functions beside the queue, other sites, guessed passwords, full disks."""

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

from apps.web.visiting import SENTENCE
from waiting import HANG
from whyformer.apps.web import gate, server, uploads, visitor_session
from whyformer.apps.web.api import endpoint
from whyformer.apps.web.limits import PageLimits
from whyformer.apps.web.running import USER
from whyformer.apps.web.uploads import Uploads, sweep_the_dead
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
def _nothing_left_for_the_tests_that_follow():
    yield
    gc.collect()


@pytest.fixture(scope="module")
def site(catalogue, free_port):
    found = []
    close = server.serve(catalogue, PageLimits(size=200_000), port=free_port(), started=found.append, wait=False)
    yield found[0].rstrip("/")
    close()


@pytest.fixture(scope="module")
def guarded(catalogue, free_port):
    found = []
    close = server.serve(catalogue, port=free_port(), password="correct horse", started=found.append, wait=False)
    yield found[0].rstrip("/")
    close()


# -- work without end ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", sorted(METHODS))
def test_no_setting_is_without_a_bound(name):
    method = METHODS[name]
    for key, default in method.settings.items():
        if (isinstance(default, int | float) and not isinstance(default, bool)) or default is None:
            for value in (HUGE**2, float("inf"), float("nan")):
                if key in ("block", "start_layer", "blocks") or (isinstance(value, int) and key == "fill_id"):
                    continue  # blocks are looked up in the model
                with pytest.raises(InputError, match=key):
                    method.complete({key: value})


def test_lists_of_heads_and_blocks_have_a_bound():
    for name, given in (("rollout", {"aggregation": {"heads": [0] * 10_000}}), ("gradcam", {"blocks": [0] * 10_000})):
        with pytest.raises(InputError):
            METHODS[name].complete(given)


def test_a_request_for_a_billion_samples_is_refused_at_once(site, catalogue):
    asked = {"data": [SENTENCE, None, "", ["smoothgrad"], [], {"smoothgrad": {"samples": HUGE}}, False, False, False]}
    passes = []
    handle = catalogue.load("bundled:sst2").model.register_forward_pre_hook(lambda *_: passes.append(1))
    event = httpx.post(f"{site}/gradio_api/call/explain", json=asked).json()["event_id"]
    told = httpx.get(f"{site}/gradio_api/call/explain/{event}").text
    handle.remove()
    assert "at most 10,000" in told
    assert len(passes) <= 1


def test_a_visitor_s_mistake_does_not_fill_the_log(site, capfd):
    event = httpx.post(f"{site}/gradio_api/call/explain", json={"data": ["", None, "", [], [], {}, False, False, False]}).json()["event_id"]
    assert "give either text or picture" in httpx.get(f"{site}/gradio_api/call/explain/{event}").text
    assert "Traceback" not in capfd.readouterr().err


def test_a_request_has_a_budget_of_time():
    track = VisitorSession().track(seconds=0.05)
    with pytest.raises(InputError, match=r"smoothgrad took more than 0\.05 s"):
        for _ in track(range(100), "smoothgrad"):
            time.sleep(0.01)


def test_work_ends_when_the_visitor_leaves(handlers):
    session = VisitorSession()
    handlers.visitors["me"] = session
    session.begin()
    track = session.track()
    with pytest.raises(Stopped):
        for i in track(range(3)):
            if i == 1:
                handlers.visits("me", False)


def test_work_ends_when_the_page_does(handlers, monkeypatch):
    visitor, original = VisitorSession(), visitor_session.predict
    handlers.visitors["me"] = visitor
    monkeypatch.setattr(visitor_session, "predict", lambda *given: (handlers.end(), original(*given))[1])
    with pytest.raises(gr.Error, match="Cancelled"):
        endpoint(handlers)(text=SENTENCE, methods=["integrated_gradients"])
    with pytest.raises(Stopped):
        next(iter(visitor.track()(range(3))))


def test_requests_that_break_off_do_not_fill_the_log(site, capfd):
    host, port = site.removeprefix("http://").split(":")
    for path in ("/gradio_api/call/explain", "/gradio_api/upload", "/login"):
        kind = "multipart/form-data; boundary=x" if path.endswith("upload") else "application/json"
        with socket.create_connection((host, int(port)), timeout=HANG) as line:
            line.sendall(f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: {kind}\r\nContent-Length: 500\r\n\r\n--x".encode())
    assert httpx.get(site).status_code == 200  # after them
    assert capfd.readouterr().err == ""


# -- memory ----------------------------------------------------------------------------------------------------------
def test_a_session_is_bounded_in_bytes():
    session = VisitorSession(most=10**6)
    for i in range(40):
        session.once(str(i), lambda: np.zeros(10**5, np.uint8))
    assert session.bytes <= 10**6
    assert list(session.made) == [str(i) for i in range(30, 40)]


def test_what_several_results_share_counts_once():
    session, picture = VisitorSession(), Image.new("RGB", (1000, 1000))
    for i in range(8):
        session.once(str(i), lambda: [picture])
    assert 3 * 10**6 <= session.bytes < 3.1 * 10**6


def test_all_sessions_together_are_bounded(monkeypatch):
    monkeypatch.setattr(visitor_session, "MOST_BYTES", 3 * 10**6)
    sessions = [VisitorSession() for _ in range(6)]
    for session in sessions:
        session.once("x", lambda: np.zeros(10**6, np.uint8))
    assert sum(session.bytes for session in sessions) <= 3 * 10**6
    assert sessions[-1].made
    assert not sessions[0].made


def test_who_left_is_forgotten_and_who_came_back_is_not(monkeypatch):
    gone, back = VisitorSession(), VisitorSession()
    for one in (gone, back):
        one.once("x", lambda: b"x" * 100)
        one.visit(here=False)
    back.visit(here=True)
    monkeypatch.setattr(visitor_session, "GONE", 0.0)
    VisitorSession().once("y", lambda: b"y")
    assert not gone.made
    assert back.made


def test_a_model_is_nobodys_memory(handlers):
    model = handlers.catalogue.load("bundled:digits").model
    session = VisitorSession()
    session.once("ready", lambda: Prepared(open_model(model), None, None, None))
    assert session.bytes < 1000


# -- doors beside the page -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", [
    "run/explain", "run/look", "run/look_1", "run/show_maps", "run/stop", "run/predict", "api/explain", "api/look", "run/download", "call/look",
    "call/v2/look", "profiling/clear", "run-history/connect",
])  # fmt: skip
def test_functions_cannot_be_called_beside_the_queue(site, path):
    numbers = [one["id"] for one in httpx.get(f"{site}/config").json()["dependencies"]]
    for prefix in ("/gradio_api/", "/"):
        for name in (path, f"{path}/", f"/{path}"):
            for number in numbers[:: 1 if path == "run/explain" else 10]:
                answer = httpx.post(f"{site}{prefix}{name}", json={"data": [], "fn_index": number, "session_hash": "x"})
                assert answer.status_code in (403, 404, 405), (prefix, name, number)


def test_functions_of_the_browser_are_refused_in_the_queue_too(site, capfd):
    config = httpx.get(f"{site}/config").json()["dependencies"]
    numbers = [one["id"] for one in config if not one["backend_fn"]]
    assert numbers
    for number in [*numbers, str(numbers[0]), float(numbers[0]), len(config) + 9, None]:
        body = {"data": [], "fn_index": number, "session_hash": "x"}
        for place in ("/gradio_api/queue/join", "/queue/join"):
            assert httpx.post(f"{site}{place}", json=body).status_code == 403
    assert capfd.readouterr().err == ""


def test_other_methods_are_refused_too(site):
    for method in ("PUT", "DELETE", "PATCH"):
        assert httpx.request(method, f"{site}/gradio_api/run/look", json={}).status_code in (403, 405)


@pytest.mark.parametrize("headers", [{"Origin": "https://evil.example"}, {"Origin": "null"}, {"Origin": "http://127.0.0.1:1"}, {"Sec-Fetch-Site": "cross-site"}])
def test_another_site_cannot_post(site, headers):
    for path in ("/gradio_api/call/explain", "/gradio_api/queue/join", "/gradio_api/cancel", "/login"):
        assert httpx.post(f"{site}{path}", json={"data": ["hi"]}, headers=headers).status_code == 403, path
    assert httpx.post(f"{site}/gradio_api/upload", files={"files": ("a.png", b"x")}, headers=headers).status_code == 403


def test_the_page_itself_may_post(site):
    own = {"Origin": site, "Sec-Fetch-Site": "same-origin"}
    assert httpx.post(f"{site}/gradio_api/call/explain", json={"data": ["hi"]}, headers=own).status_code == 200


def test_a_login_slows_down_after_wrong_passwords(catalogue, free_port, monkeypatch):
    found, now = [], 1000.0
    monkeypatch.setattr(gate, "time", SimpleNamespace(monotonic=lambda: now))
    close = server.serve(catalogue, port=free_port(), password="correct horse", started=found.append, wait=False)
    site = found[0].rstrip("/")

    def tried(password):
        return httpx.post(f"{site}/login", data={"username": USER, "password": password}).status_code

    try:
        assert [tried("wrong") for _ in range(3)] == [400, 400, 400]
        assert tried("correct horse") == 429
        now += 1.1
        assert tried("wrong") == 400
        assert tried("correct horse") == 429
        now += 2.1
        assert tried("correct horse") == 200
        assert [tried("wrong"), tried("correct horse")] == [400, 200]
    finally:
        close()


@pytest.mark.parametrize("path", ["/gradio_api/call/explain", "/gradio_api/upload", "/login"])
def test_a_body_that_never_comes_is_not_waited_for(site, monkeypatch, path):
    monkeypatch.setattr(gate, "PATIENCE", 0.5)
    host, port = site.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=HANG) as line:
        kind = "multipart/form-data; boundary=x" if path.endswith("upload") else "application/json"
        line.sendall(f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: {kind}\r\nContent-Length: 500\r\n\r\n--x".encode())
        said = b""
        while not said.endswith((b"within 0.5 seconds", b"too slow")) and (more := line.recv(10_000)):
            said += more
        assert said.split()[1] in (b"408", b"400")
        assert said.endswith(b"too slow" if path.endswith("upload") else b"within 0.5 seconds")  # and not for another reason


# -- uploads ---------------------------------------------------------------------------------------------------------
def test_uploads_have_a_quota_and_expire(tmp_path, monkeypatch):
    monkeypatch.setattr(uploads.tempfile, "tempdir", str(tmp_path))
    made = Uploads(most=1000, age=HANG)
    (made.folder / "a").mkdir()
    (made.folder / "a" / "new.png").write_bytes(b"x" * 600)
    assert made.room()
    old = made.folder / "a" / "old.png"
    old.write_bytes(b"x" * 600)
    assert not made.room()
    os.utime(old, (time.time() - 2 * HANG,) * 2)
    assert made.room()
    assert not old.exists()
    made.delete()
    assert not made.folder.exists()


def test_an_upload_without_room_is_refused(catalogue, free_port):
    found = []
    close = server.serve(catalogue, PageLimits(uploads=0), port=free_port(), started=found.append, wait=False)
    try:
        assert httpx.post(f"{found[0].rstrip('/')}/gradio_api/upload", files={"files": ("a.png", b"x")}).status_code == 507
    finally:
        close()


def test_folders_of_killed_servers_are_swept(tmp_path, monkeypatch):
    monkeypatch.setattr(uploads.tempfile, "tempdir", str(tmp_path))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for name in (f"whyformer-app-{dead.pid}-x", f"whyformer-app-{os.getpid()}-x", "whyformer-app-mine", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / f"whyformer-app-{dead.pid}-link").symlink_to(tmp_path / "other")
    sweep_the_dead()
    assert {p.name for p in tmp_path.iterdir()} == {f"whyformer-app-{os.getpid()}-x", "whyformer-app-mine", "other", f"whyformer-app-{dead.pid}-link"}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_ended_leaves_no_uploads(tmp_path, free_port, number):
    command = [sys.executable, "-c", "from whyformer.apps.cli import main; main()", "app", "--port", str(free_port())]
    running = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, text=True)
    try:
        assert "whyformer is at" in running.stdout.readline()
        assert list(tmp_path.glob("whyformer-app-*"))
        running.send_signal(number)
        assert running.wait(HANG) == 0
    finally:
        running.kill()
    assert not list(tmp_path.glob("whyformer-app-*"))

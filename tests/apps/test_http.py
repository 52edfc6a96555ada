"""Connections of the server and the page: those that send nothing, or half a request, keep nobody out and end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from starlette.datastructures import Headers

pytest.importorskip("uvicorn", reason="needs whyformer[serve]")

from waiting import HANG, wait_for
from whyformer.apps import http
from whyformer.errors import LoadError

ROOT = Path(__file__).parents[2]
HALF = b"GET / HTTP/1.1\r\nHost: x\r\nX-Half"
WHOLE = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
HALF_A_BODY = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"


class App:
    """Reads the body, and answers once it may; ``streams``: without end."""

    def __init__(self, streams: bool = False) -> None:
        self.streams = streams
        self.may, self.asked = threading.Event(), threading.Event()
        self.may.set()

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return
        while (message := await receive()).get("more_body"):
            pass
        self.asked.set()
        while not self.may.is_set() and message["type"] != "http.disconnect":
            await asyncio.sleep(0.01)
        if self.streams:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


class Running:
    def __init__(self, app: App, connections: int, grace: float) -> None:
        self.sock = http.listen("127.0.0.1", [0])
        self.server = http.Server(app, grace, connections)
        self.server.config.loop = "asyncio"  # whose clock a test may change
        self.thread = threading.Thread(target=self.server.run, args=([self.sock],))
        self.thread.start()
        self.address = self.sock.getsockname()
        self.lines = contextlib.ExitStack()

    def sent(self, data: bytes) -> socket.socket:
        line = self.lines.enter_context(socket.create_connection(self.address, timeout=HANG))
        line.sendall(data)
        return line

    def pass_time(self, seconds: float) -> None:
        """For the event loop: when this returns, every timer that was due by then has had its turn."""
        (connection, *_) = self.server.server_state.connections
        loop = connection.loop

        async def passing() -> None:
            slept = asyncio.create_task(asyncio.sleep(seconds))
            await asyncio.sleep(0)  # it sleeps
            loop.time = lambda: time.monotonic() + 2 * seconds
            await slept

        asyncio.run_coroutine_threadsafe(passing(), loop).result(HANG)

    def end(self) -> None:
        self.server.should_exit = True

    def ended(self, seconds: float) -> bool:
        self.thread.join(seconds)
        return not self.thread.is_alive()


@pytest.fixture
def running():
    started = []

    def run(connections: int = 100, grace: float = 10 * HANG, app: App | None = None) -> Running:
        started.append(Running(app or App(), connections, grace))
        return started[-1]

    yield run
    for one in started:
        one.lines.close()
        one.end()
        assert one.ended(HANG)


def answered(line: socket.socket) -> bool:
    return line.recv(1000).startswith(b"HTTP/1.1 200")


def closed(line: socket.socket) -> bool:
    """Whether the other side closes the connection."""
    with contextlib.suppress(ConnectionResetError):
        while line.recv(1000):
            pass
    return True


@pytest.mark.parametrize("data", [b"", HALF, WHOLE + HALF], ids=["nothing", "half a head", "half of a second head"])
def test_a_head_that_does_not_come_is_not_waited_for(running, monkeypatch, data):
    monkeypatch.setattr(http, "HEAD_SECONDS", 0.3)
    assert closed(running().sent(data))


def test_a_head_that_comes_letter_by_letter_is_not_waited_for(running, monkeypatch):
    monkeypatch.setattr(http, "HEAD_SECONDS", 0.5)
    line = running().sent(HALF)

    def refused() -> bool:
        with contextlib.suppress(OSError):
            line.sendall(b"x")
            return False
        return True

    wait_for(refused, "the end of the connection")


def test_a_request_may_take_longer_than_its_head(running):
    app = App()
    app.may.clear()
    server = running(app=app)
    line = server.sent(WHOLE)
    assert app.asked.wait(HANG)
    server.pass_time(10 * http.HEAD_SECONDS)
    app.may.set()
    assert answered(line)


def test_time_that_passes_ends_a_head_that_does_not_come(running):
    server = running()
    line = server.sent(HALF)
    wait_for(lambda: server.server.server_state.connections, "the connection")
    server.pass_time(10 * http.HEAD_SECONDS)
    assert closed(line)


@pytest.mark.parametrize("data", [b"", HALF, HALF_A_BODY], ids=["nothing", "half a head", "half a body"])
def test_connections_that_wait_for_their_client_keep_nobody_out(running, data):
    server = running(connections=16)
    lines = [server.sent(data) for _ in range(40)]
    assert answered(server.sent(WHOLE))
    assert all(closed(line) for line in lines[:32])  # the eldest, though their time is not over
    assert answered(server.sent(WHOLE))


def test_where_all_connections_have_a_request_a_further_one_is_refused(running, capfd):
    app = App()
    app.may.clear()
    server = running(connections=4, app=app)
    busy = []
    for _ in range(3):
        app.asked.clear()
        busy.append(server.sent(WHOLE))
        assert app.asked.wait(HANG)
    assert server.sent(WHOLE).recv(1000).startswith(b"HTTP/1.1 503")
    app.may.set()
    assert all(answered(line) for line in busy)
    assert capfd.readouterr().err == ""  # no line for each


def test_the_end_waits_for_what_was_asked_and_for_no_half_request(running):
    app = App()
    server = running(app=app)
    halves = [server.sent(data) for data in (b"", HALF, HALF_A_BODY, WHOLE + HALF)]
    assert answered(halves[-1])
    app.may.clear()
    app.asked.clear()
    whole = server.sent(WHOLE)
    assert app.asked.wait(HANG)
    server.end()
    assert all(closed(line) for line in halves)
    assert not server.ended(0.3)
    app.may.set()
    assert answered(whole)
    assert server.ended(HANG)


@pytest.mark.parametrize("late", [False, True], ids=["now", "once the server ends"])
def test_the_end_waits_for_no_stream(running, late):
    app = App(streams=True)
    server = running(app=app)
    if late:
        app.may.clear()
    line = server.sent(WHOLE)
    assert app.asked.wait(HANG)
    assert late or answered(line)
    server.end()
    if late:
        assert not server.ended(0.3)
        app.may.set()
    assert closed(line)
    assert server.ended(HANG)


def test_the_end_waits_no_longer_than_its_grace(running):
    app = App()
    app.may.clear()
    server = running(grace=0.5, app=app)
    server.sent(WHOLE)
    assert app.asked.wait(HANG)
    server.end()
    assert server.ended(HANG)


def test_the_number_of_connections_fits_the_files_that_may_be_open(monkeypatch):
    assert http.Server(App(), 1, 100).config.limit_concurrency == 100
    monkeypatch.setattr(os, "sysconf", lambda name: 64)
    few = http.Server(App(), 1, 100).config
    assert few.limit_concurrency + 4 * few.backlog <= 48


def test_a_port_that_is_taken_is_told_or_the_next_one_taken(free_port):
    port = free_port()
    with http.listen("127.0.0.1", [port]) as first:
        with pytest.raises(LoadError, match=str(port)):
            http.listen("127.0.0.1", [port])
        with http.listen("127.0.0.1", [port, 0]) as second:
            assert second.getsockname() != first.getsockname()
    with pytest.raises(LoadError, match=r"none\.invalid"):
        http.listen("none.invalid", [0])


def test_requests_of_other_sites():
    own = {"host": "127.0.0.1:8000"}
    for foreign in ({"origin": "https://evil.example"}, {"origin": "null"}, {"origin": "http://127.0.0.1:1"}, {"sec-fetch-site": "cross-site"}):
        assert http.is_foreign(Headers(own | foreign))
    for fine in ({}, {"origin": "http://127.0.0.1:8000"}, {"origin": "http://127.0.0.1:8000", "sec-fetch-site": "same-origin"}):
        assert not http.is_foreign(Headers(own | fine))


# -- processes of their own ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("command", "path"),
    [pytest.param(("serve", "bundled:sst2"), "/health", id="serve"), pytest.param(("app",), "/config", id="app", marks=pytest.mark.slow)],
)
def test_300_half_heads_at_256_files_keep_nobody_out(free_port, tmp_path, command, path):
    port = free_port()
    program = [sys.executable, "-c", "import sys; sys.modules['torchvision'] = None; from whyformer.apps.cli import main; main()"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    log = tmp_path / "log"
    with log.open("wb") as file, contextlib.ExitStack() as lines:
        shell = ["bash", "-c", 'ulimit -n 256; exec "$@"', "bash", *program, *command, "--port", str(port), "--json"]
        process = lines.enter_context(subprocess.Popen(shell, stdout=subprocess.PIPE, stderr=file, env=env, text=True))
        lines.callback(process.kill)
        assert str(port) in process.stdout.readline()
        for _ in range(300):
            line = lines.enter_context(socket.create_connection(("127.0.0.1", port), timeout=HANG))
            line.sendall(HALF)
        other = lines.enter_context(socket.create_connection(("127.0.0.1", port), timeout=HANG))
        other.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
        assert answered(other)
        process.send_signal(signal.SIGTERM)
        process.wait(HANG)
    assert log.read_bytes() == b""

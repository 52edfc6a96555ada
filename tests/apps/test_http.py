"""uvicorn as the server and the page run it: the limit of connections, the limit of a head, ports, and a graceful end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

import pytest
from starlette.datastructures import Headers

pytest.importorskip("uvicorn", reason="needs whyformer[serve]")

from waiting import HANG
from whyformer.apps import http
from whyformer.errors import LoadError

HALF = b"GET / HTTP/1.1\r\nHost: x\r\nX-Half"
WHOLE = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


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
        self.server = http.server(app, connections, grace)
        self.thread = threading.Thread(target=self.server.run, args=([self.sock],))
        self.thread.start()
        self.address = self.sock.getsockname()
        self.lines = contextlib.ExitStack()

    def sent(self, data: bytes) -> socket.socket:
        line = self.lines.enter_context(socket.create_connection(self.address, timeout=HANG))
        line.sendall(data)
        return line

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


def test_a_head_without_end_is_refused(running):
    line = running().sent(b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: ")
    with contextlib.suppress(OSError):  # the connection ends meanwhile
        for _ in range(100):
            line.sendall(b"x" * 10_000)
    assert closed(line)


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
    halves = [server.sent(data) for data in (b"", HALF, WHOLE + HALF)]
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


@pytest.mark.parametrize("streams", [False, True], ids=["answer", "stream"])
def test_the_end_waits_no_longer_than_its_grace(running, streams):
    app = App(streams)
    if not streams:
        app.may.clear()
    server = running(grace=0.5, app=app)
    server.sent(WHOLE)
    assert app.asked.wait(HANG)
    server.end()
    assert server.ended(HANG)


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

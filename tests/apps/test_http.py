"""The uvicorn server behind the API and the page: limits of connections and headers, ports, graceful shutdown."""

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


class BlockingApp:
    """An ASGI application that reads the body and responds once ``released`` is set; ``streams``: the response never ends."""

    def __init__(self, streams: bool = False) -> None:
        self.streams = streams
        self.released, self.received = threading.Event(), threading.Event()
        self.released.set()

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return
        while (message := await receive()).get("more_body"):
            pass
        self.received.set()
        while not self.released.is_set() and message["type"] != "http.disconnect":
            await asyncio.sleep(0.01)
        if self.streams:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


class ServerThread:
    def __init__(self, app: BlockingApp, connections: int, grace: float) -> None:
        self.sock = http.listen("127.0.0.1", [0])
        self.server = http.server(app, connections, grace)
        self.thread = threading.Thread(target=self.server.run, args=([self.sock],))
        self.thread.start()
        self.address = self.sock.getsockname()
        self.lines = contextlib.ExitStack()

    def connect(self, data: bytes) -> socket.socket:
        connection = self.lines.enter_context(socket.create_connection(self.address, timeout=HANG))
        connection.sendall(data)
        return connection

    def shut_down(self) -> None:
        self.server.should_exit = True

    def wait_for_end(self, seconds: float) -> bool:
        self.thread.join(seconds)
        return not self.thread.is_alive()


@pytest.fixture
def start_server():
    started = []

    def run(connections: int = 100, grace: float = 10 * HANG, app: BlockingApp | None = None) -> ServerThread:
        started.append(ServerThread(app or BlockingApp(), connections, grace))
        return started[-1]

    yield run
    for server in started:
        server.lines.close()
        server.shut_down()
        assert server.wait_for_end(HANG)


def is_ok(connection: socket.socket) -> bool:
    return connection.recv(1000).startswith(b"HTTP/1.1 200")


def is_closed_by_server(connection: socket.socket) -> bool:
    """True once the server has closed the connection."""
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(1000):
            pass
    return True


def test_endless_header_closes_connection(start_server):
    connection = start_server().connect(b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: ")
    with contextlib.suppress(OSError):  # the server may close the connection during the loop
        for _ in range(100):
            connection.sendall(b"x" * 10_000)
    assert is_closed_by_server(connection)


def test_request_beyond_connection_limit_has_status_503(start_server, capfd):
    app = BlockingApp()
    app.released.clear()
    server = start_server(connections=4, app=app)
    busy = []
    for _ in range(3):
        app.received.clear()
        busy.append(server.connect(WHOLE))
        assert app.received.wait(HANG)
    assert server.connect(WHOLE).recv(1000).startswith(b"HTTP/1.1 503")
    app.released.set()
    assert all(is_ok(connection) for connection in busy)
    assert capfd.readouterr().err == ""  # refused requests are not logged


def test_shutdown_waits_for_complete_requests_only(start_server):
    app = BlockingApp()
    server = start_server(app=app)
    halves = [server.connect(data) for data in (b"", HALF, WHOLE + HALF)]
    assert is_ok(halves[-1])
    app.released.clear()
    app.received.clear()
    request = server.connect(WHOLE)
    assert app.received.wait(HANG)
    server.shut_down()
    assert all(is_closed_by_server(connection) for connection in halves)
    assert not server.wait_for_end(0.3)
    app.released.set()
    assert is_ok(request)
    assert server.wait_for_end(HANG)


@pytest.mark.parametrize("streams", [False, True], ids=["answer", "stream"])
def test_shutdown_waits_no_longer_than_grace_period(start_server, streams):
    app = BlockingApp(streams)
    if not streams:
        app.released.clear()
    server = start_server(grace=0.5, app=app)
    server.connect(WHOLE)
    assert app.received.wait(HANG)
    server.shut_down()
    assert server.wait_for_end(HANG)


def test_occupied_port_raises_or_next_port_is_used(free_port):
    port = free_port()
    with http.listen("127.0.0.1", [port]) as first:
        with pytest.raises(LoadError, match=str(port)):
            http.listen("127.0.0.1", [port])
        with http.listen("127.0.0.1", [port, 0]) as second:
            assert second.getsockname() != first.getsockname()
    with pytest.raises(LoadError, match=r"none\.invalid"):
        http.listen("none.invalid", [0])


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_body_is_not_delayed_after_header(host):
    with http.listen(host, [0]) as sock, socket.create_connection((host, sock.getsockname()[1]), timeout=HANG), sock.accept()[0] as connection:
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_cross_site_requests_are_foreign():
    headers = {"host": "127.0.0.1:8000"}
    for foreign in ({"origin": "https://evil.example"}, {"origin": "null"}, {"origin": "http://127.0.0.1:1"}, {"sec-fetch-site": "cross-site"}):
        assert http.is_foreign(Headers(headers | foreign))
    for allowed in ({}, {"origin": "http://127.0.0.1:8000"}, {"origin": "http://127.0.0.1:8000", "sec-fetch-site": "same-origin"}):
        assert not http.is_foreign(Headers(headers | allowed))

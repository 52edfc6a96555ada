"""HTTP for the server and the page: limits of connections and of bodies, and requests that other sites make."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from whyformer.errors import LoadError

HEAD_SECONDS = 10.0
"""How long the head of a request may take to arrive."""
LOCAL = ("localhost", "127.0.0.1", "[::1]")
"""Names of this machine in the header ``Host``."""
CONNECTIONS = 256
BACKLOG = 128


class Connection(H11Protocol):  # type: ignore[misc]
    """uvicorn's HTTP/1.1, with what it lacks: a time limit for the head of a request, and for open sockets a limit that
    idle connections cannot use up.

    Beyond half of ``limit_concurrency``, a new connection ends the oldest one that waits for its client. At the limit
    itself, which only requests in progress can reach, uvicorn answers 503.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.since = 0.0
        self.timer: asyncio.TimerHandle | None = None

    @property
    def waits_for_client(self) -> bool:
        """Whether the client has to go on: with a request, with its body, or by reading the response."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body or self.flow.write_paused

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.expect_head()
        if len(self.connections) > self.limit_concurrency // 2:
            oldest = min((one for one in self.connections if one.waits_for_client), key=lambda one: one.since)
            if oldest is not self:
                self.connections.discard(oldest)  # now, for others that connect before it is lost
                oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_timer()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self.stop_timer()

    def on_response_complete(self) -> None:
        self.expect_head()
        super().on_response_complete()

    def shutdown(self) -> None:
        """End, unless a whole request waits for its response."""
        if self.waits_for_client or self.cycle.response_started:
            self.transport.close()
        else:
            super().shutdown()

    def expect_head(self) -> None:
        self.stop_timer()
        self.since = self.loop.time()
        self.timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Server(uvicorn.Server):  # type: ignore[misc]
    """uvicorn with :class:`Connection`, quiet, and within limits.

    Args:
        grace: seconds that requests may take to finish when the server ends.
        connections: the most sockets; fewer where the system allows the process few open files.
    """

    def __init__(self, app: Any, grace: float, connections: int = CONNECTIONS) -> None:
        files = os.sysconf("SC_OPEN_MAX") if hasattr(os, "sysconf") else -1
        backlog = BACKLOG
        if files > 0:
            # accepted sockets may be open for some rounds of the event loop before they are counted
            connections, backlog = min(connections, files // 2), max(1, min(backlog, files // 16))
        config = uvicorn.Config(
            app, http=Connection, ws="none", log_level="error", access_log=False, server_header=False,
            h11_max_incomplete_event_size=64 * 1024, limit_concurrency=connections, backlog=backlog,
            timeout_graceful_shutdown=grace,
        )  # fmt: skip
        super().__init__(config)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        closing = asyncio.ensure_future(self._close_connections())
        try:
            await super().shutdown(sockets)
        finally:
            closing.cancel()

    async def _close_connections(self) -> None:
        """Again and again: some were accepted only just now, and some begin to stream after the server was to end."""
        while True:
            for connection in list(self.server_state.connections):
                connection.shutdown()
            await asyncio.sleep(0.1)


def listen(host: str, ports: Iterable[int]) -> socket.socket:
    """A socket on the first of the ports that is free. Clients can connect at once.

    Raises:
        LoadError: none is.
    """
    tried = list(ports)
    for port in tried:
        try:
            if ":" in host:
                return socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=host == "::")
            return socket.create_server((host, port))
        except OSError as error:
            reason = error
    raise LoadError(
        f"cannot listen on port {tried[-1]} of {host}: it is taken, or not this machine's; try another --port"
    ) from reason


def is_foreign(headers: Headers) -> bool:
    """Whether a page of another site made the request. Programs send neither of the two headers."""
    origin = headers.get("origin")
    if headers.get("sec-fetch-site") == "cross-site":
        return True
    return origin is not None and urlsplit(origin).netloc.lower() != headers.get("host", "").lower()


async def read_body(scope: Any, receive: Any, size: int, seconds: float) -> bytes:
    """The whole body of a request.

    Raises:
        HTTPException: 413, it has more than ``size`` bytes; 408, it took longer than ``seconds``.
        ClientDisconnect: the client is gone.
    """
    large = HTTPException(413, f"a request may have {size} bytes")
    length = Headers(scope=scope).get("content-length", "0")
    if length.isdecimal() and int(length) > size:
        raise large
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in Request(scope, receive).stream():
                body += chunk
                if len(body) > size:
                    raise large
    except TimeoutError:
        raise HTTPException(408, f"the request did not arrive within {seconds:g} seconds") from None
    return bytes(body)

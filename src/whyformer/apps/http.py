"""HTTP for the server and the page: uvicorn with limits, and checks of requests."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request

from whyformer.errors import LoadError

LOCAL = ("localhost", "127.0.0.1", "[::1]")
"""Names of this machine in the header ``Host``."""


def server(app: Any, connections: int, grace: float) -> uvicorn.Server:
    """Return uvicorn with limits and without logs of requests.

    Args:
        app: the application.
        connections: maximum number of connections; further requests are answered 503.
        grace: seconds in which requests may finish when the server ends.
    """
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        log_level="error",
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=64 * 1024,
        limit_concurrency=connections,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=grace,
    )
    return uvicorn.Server(config)


def listen(host: str, ports: Iterable[int]) -> socket.socket:
    """Return a listening socket on the first free port.

    Raises:
        LoadError: no port is free.
    """
    tried = list(ports)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in tried:
        try:
            sock = socket.create_server((host, port), family=family, dualstack_ipv6=host == "::")
        except OSError as error:
            reason = error
        else:
            # connections inherit it; asyncio sets it only for sockets that name their protocol, and without it the
            # body of a response waits about 40 ms for the acknowledgement of its header
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
    raise LoadError(
        f"cannot listen on port {tried[-1]} of {host}: the port is in use, or the address is not of this machine; "
        "choose another --port"
    ) from reason


def is_foreign(headers: Headers) -> bool:
    """Return True if a page of another site sent the request. Programs send neither of the two headers."""
    origin = headers.get("origin")
    if headers.get("sec-fetch-site") == "cross-site":
        return True
    return origin is not None and urlsplit(origin).netloc.lower() != headers.get("host", "").lower()


async def read_body(scope: Any, receive: Any, size: int, seconds: float) -> bytes:
    """Return the whole body of a request.

    Raises:
        HTTPException: 413, it has more than ``size`` bytes; 408, it took longer than ``seconds``.
        ClientDisconnect: the client is gone.
    """
    too_large = HTTPException(413, f"a request may have {size} bytes")
    length = Headers(scope=scope).get("content-length", "0")
    if length.isdecimal() and int(length) > size:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in Request(scope, receive).stream():
                body += chunk
                if len(body) > size:
                    raise too_large
    except TimeoutError:
        raise HTTPException(408, f"the request did not arrive within {seconds:g} seconds") from None
    return bytes(body)

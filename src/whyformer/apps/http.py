"""HTTP for the server and the page: uvicorn and its limits, and what both refuse."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from whyformer.errors import LoadError

LOCAL = ("localhost", "127.0.0.1", "[::1]")
"""Names of this machine in the header ``Host``."""


def server(app: Any, connections: int, grace: float) -> uvicorn.Server:
    """uvicorn, quiet and within limits.

    Args:
        connections: the most at once; a request beyond is answered 503.
        grace: seconds that requests may take to finish when the server ends.
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


class SecurityMiddleware:
    """Refuses what a page of another site sends (403), bodies that are too large (413) or too slow (408).

    Args:
        size: the most bytes of a body; seconds: for all of it to arrive.
        headers: for every response.
    """

    def __init__(self, app: Any, *, size: int, seconds: float, headers: Mapping[str, str] | None = None) -> None:
        self.app, self.size, self.seconds, self.headers = app, size, seconds, headers or {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                found = MutableHeaders(scope=message)
                for name, value in self.headers.items():
                    found.setdefault(name, value)
            await send(message)

        try:
            if scope["method"] not in ("GET", "HEAD", "OPTIONS") and is_foreign(Headers(scope=scope)):
                raise HTTPException(403, "requests from pages of other sites are refused")
            body = [await read_body(scope, receive, self.size, self.seconds)]
        except HTTPException as error:
            await JSONResponse({"detail": error.detail}, error.status_code)(scope, receive, with_headers)
            return
        except ClientDisconnect:
            return

        async def replay() -> Any:
            return {"type": "http.request", "body": body.pop(), "more_body": False} if body else await receive()

        await self.app(scope, replay, with_headers)


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

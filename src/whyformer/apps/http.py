"""HTTP for the server and the page: uvicorn with limits, and checks of requests."""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections.abc import Callable, Collection, Iterable
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
NO_KEY = ("/health", "/ready")
"""Paths that need no key: their answers do not depend on anybody's inputs."""
_HEADERS = {
    # all that the page needs comes from the page itself
    "content-security-policy": (
        "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; worker-src 'self' blob:; "
        "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
}


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


class RequestChecks:
    """Middleware that refuses requests without a key (401), from pages of other sites (403), too large (413) and too
    slow (408), and adds security headers to responses.

    This is a middleware because FastAPI reads the body before it calls dependencies, and does not call them for
    ``/openapi.json``. A request that is cancelled because the server ends is answered 503.

    Args:
        app: the application.
        size: maximum bytes of a body.
        seconds: maximum time for all of a body to arrive.
        keys: one of them is required, as ``Authorization: Bearer KEY`` or ``X-API-Key: KEY``; none if empty.
        count: called with the status of each response.
    """

    def __init__(
        self,
        app: Any,
        *,
        size: int,
        seconds: float,
        keys: Collection[str] = (),
        count: Callable[[int], None] = lambda status: None,
    ) -> None:
        self.app, self.size, self.seconds, self.count = app, size, seconds, count
        self.keys = [key.encode() for key in keys]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 0

        async def send_with_headers(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            await self._respond(Request(scope, receive), send_with_headers)
        except HTTPException as error:
            answer = JSONResponse({"detail": error.detail}, error.status_code, error.headers)
            await answer(scope, receive, send_with_headers)
        except ClientDisconnect:
            status = 499
        except asyncio.CancelledError:
            if status:
                raise
            await JSONResponse({"detail": "the server is stopping"}, 503)(scope, receive, send_with_headers)
        finally:
            self.count(status or 500)

    async def _respond(self, request: Request, send: Any) -> None:
        if self.keys and request.scope["path"] not in NO_KEY and not self._has_key(request.headers):
            raise HTTPException(
                401, "this server requires a key: Authorization: Bearer KEY", {"WWW-Authenticate": "Bearer"}
            )
        if request.method not in ("GET", "HEAD", "OPTIONS") and is_foreign(request.headers):
            raise HTTPException(403, "requests from pages of other sites are refused")
        body = [await self._read_body(request)]

        async def replay() -> Any:
            return {"type": "http.request", "body": body.pop(), "more_body": False} if body else await request.receive()

        await self.app(request.scope, replay, send)

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        key = headers.get("x-api-key") or (token.strip() if scheme.lower() == "bearer" else "")
        # in the same time whichever matches
        return sum(hmac.compare_digest(key.encode(), expected) for expected in self.keys) > 0

    async def _read_body(self, request: Request) -> bytes:
        too_large = HTTPException(413, f"a request may have {self.size} bytes")
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self.size:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self.seconds):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > self.size:
                        raise too_large
        except TimeoutError:
            raise HTTPException(408, f"the request did not arrive within {self.seconds:g} seconds") from None
        return bytes(body)


def is_foreign(headers: Headers) -> bool:
    """Return True if a page of another site sent the request. Programs send neither of the two headers."""
    origin = headers.get("origin")
    if headers.get("sec-fetch-site") == "cross-site":
        return True
    return origin is not None and urlsplit(origin).netloc.lower() != headers.get("host", "").lower()

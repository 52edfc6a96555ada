"""What stands between the network and gradio: an ASGI middleware that refuses what the page has no use for."""

from __future__ import annotations

import json
from typing import Any

MOST_JSON = 2 * 2**20
# The page needs nothing from elsewhere, so the browser is told to fetch nothing from elsewhere.
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; worker-src 'self' blob:; "
    "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
}


class Gate:
    """Refuses, with 403 or 413, before gradio sees the request:

    * a ``Host`` that is none of ``hosts``: another site's script could reach a local page under its own name
      (DNS rebinding); None takes any host;
    * whatever makes the server fetch an address: gradio's proxy, and files named by one;
    * more than 2 MB of JSON (uploads have their own limit).
    """

    def __init__(self, app: Any, hosts: frozenset[str] | None = None) -> None:
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope.get("path", "").replace("\\", "/")
        host = next((v.decode("latin-1") for k, v in scope["headers"] if k == b"host"), "")
        if (self.hosts is not None and _name(host) not in self.hosts) or "/proxy=" in path or _address_in(path):
            await _refuse(send, 403)
            return
        if scope["method"] == "POST" and not path.rstrip("/").endswith("/upload"):
            body = await _read(receive)
            if body is None:
                await _refuse(send, 413)
                return
            if _names_address(body):
                await _refuse(send, 403)
                return
            receive = _replay(body, receive)

        async def sealed(message: Any) -> None:
            if message["type"] == "http.response.start":
                there = {k.lower() for k, _ in message["headers"]}
                more = [(k.encode(), v.encode()) for k, v in _HEADERS.items() if k.encode() not in there]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        await self.app(scope, receive, sealed)


def _name(host: str) -> str:
    """The host without its port."""
    return (host if host.endswith("]") else host.rpartition(":")[0] or host).strip("[]").lower()


def _address_in(path: str) -> bool:
    _, sign, place = path.partition("file=")
    return bool(sign) and place.lstrip("/").lower().startswith(("http:", "https:", "ftp:", "data:"))


async def _refuse(send: Any, code: int) -> None:
    await send({"type": "http.response.start", "status": code, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": b"not on this page"})


async def _read(receive: Any) -> bytes | None:
    """The whole body, or None if it is too long."""
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > MOST_JSON:
            return None
        if message["type"] != "http.request" or not message.get("more_body"):
            return body


def _replay(body: bytes, receive: Any) -> Any:
    """A ``receive`` that gives the body once, and then waits as the real one does."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return waiting.pop() if waiting else await receive()

    return again


def _names_address(body: bytes) -> bool:
    """Whether a file in the request is an address, which gradio would fetch."""
    try:
        todo = [json.loads(body)]
    except (ValueError, RecursionError):
        return False
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            place = value.get("path")
            if isinstance(place, str) and "://" in place[:16]:
                return True
            todo += value.values()
        elif isinstance(value, list):
            todo += value
    return False

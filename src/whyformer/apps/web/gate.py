"""What stands between the network and gradio: an ASGI middleware that refuses what the page has no use for."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse

MOST_JSON = 2 * 2**20
_HEADERS = {
    # the page needs nothing from elsewhere, so the browser is told to fetch nothing from elsewhere
    "content-security-policy": (
        "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; worker-src 'self' blob:; "
        "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
    ),
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
        foreign = self.hosts is not None and _name(Headers(scope=scope).get("host", "")) not in self.hosts
        status, body = 403 if foreign or "/proxy=" in path or _address_in(path) else 200, None
        if status == 200 and scope["method"] == "POST" and not path.rstrip("/").endswith("/upload"):
            body = b""
            with contextlib.suppress(ClientDisconnect):
                async for chunk in Request(scope, receive).stream():
                    body += chunk
                    if len(body) > MOST_JSON:
                        status = 413
                        break
            status = 403 if status == 200 and _names_address(body) else status
        if status != 200:
            await PlainTextResponse("not on this page", status)(scope, receive, send)
            return
        waiting = [] if body is None else [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Any:
            """The body that was read, and then whatever comes."""
            return waiting.pop() if waiting else await receive()

        async def sealed(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self.app(scope, again, sealed)


def _name(host: str) -> str:
    """The host without its port."""
    return (host if host.endswith("]") else host.rpartition(":")[0] or host).strip("[]").lower()


def _address_in(path: str) -> bool:
    _, sign, place = path.partition("file=")
    return bool(sign) and place.lstrip("/").lower().startswith(("http:", "https:", "ftp:", "data:"))


def _names_address(body: bytes) -> bool:
    """Whether a file in the request is an address, which gradio would fetch."""
    places: list[Any] = []
    with contextlib.suppress(ValueError, RecursionError):
        json.loads(body, object_hook=lambda found: places.append(found.get("path")))
    return any(isinstance(place, str) and "://" in place[:16] for place in places)

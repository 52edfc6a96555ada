"""What a request has to pass before anything reads it: its key, its host, its size, and how long it takes to arrive."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

from whyformer.apps import without_port

Message = MutableMapping[str, Any]
App = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]
OPEN = ("/health", "/ready", "/openapi.json", "/docs")
"""Paths that need no key: they say nothing about anybody's inputs."""
LOCAL = frozenset({"localhost", "127.0.0.1", "[::1]", "testserver"})


class Gate:
    """ASGI middleware that refuses with 401, 400, 413 or 408, and gives the application the whole body otherwise.

    Args:
        keys: one of which a client has to send, as ``Authorization: Bearer KEY`` or ``X-API-Key: KEY``; none is asked
            for if there is none, and then the host has to be this machine, whatever page of the web asks.
        size: the most bytes of a body; seconds: for all of it to arrive.
    """

    def __init__(self, app: App, *, keys: Collection[str], size: int, seconds: float) -> None:
        self.app, self.keys, self.size, self.seconds = app, [k.encode() for k in keys], size, seconds

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        if self.keys and scope["path"] not in OPEN and not self._known(headers):
            await _refuse(
                send, 401, "this server asks for a key: Authorization: Bearer KEY", (b"www-authenticate", b"Bearer")
            )
            return
        host = headers.get(b"host", b"").decode("latin-1")
        if not self.keys and without_port(host) not in LOCAL:
            await _refuse(send, 400, "this server answers to localhost alone")
            return
        try:
            body = await asyncio.wait_for(self._body(headers, receive), self.seconds)
        except TimeoutError:
            await _refuse(send, 408, f"the request did not arrive within {self.seconds:g} seconds")
            return
        if body is None:
            await _refuse(send, 413, f"a request may have {self.size} bytes")
            return
        given = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return given.pop() if given else await receive()

        await self.app(scope, replay, send)

    def _known(self, headers: dict[bytes, bytes]) -> bool:
        given = headers.get(b"x-api-key") or headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        fitting = [key for key in self.keys if hmac.compare_digest(given, key)]  # all are compared, in the same time
        return bool(fitting)

    async def _body(self, headers: dict[bytes, bytes], receive: Any) -> bytes | None:
        """The whole body; None where it is too large."""
        said = headers.get(b"content-length", b"0")
        if said.isdigit() and int(said) > self.size:
            return None
        found = bytearray()
        while True:
            message = await receive()
            found += message.get("body", b"")
            if len(found) > self.size:
                return None
            if not message.get("more_body"):
                return bytes(found)


async def _refuse(send: Any, status: int, reason: str, *headers: tuple[bytes, bytes]) -> None:
    body = json.dumps({"detail": reason}).encode()
    listed = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": listed})
    await send({"type": "http.response.body", "body": body})

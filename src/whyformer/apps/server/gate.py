"""ASGI middleware of the server: who may ask, how large a request may be, and its end once the client is gone."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

from fastapi.security import APIKeyHeader, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from whyformer.apps.http import is_foreign, read_body

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
OPEN = ("/health", "/ready")
"""Paths that need no key: they say nothing about anybody's inputs."""
_BEARER, _HEADER = HTTPBearer(auto_error=False), APIKeyHeader(name="X-API-Key", auto_error=False)


class Gate:
    """Refuses with 401, 403, 413 or 408, or gives the application the whole body.

    The application is cancelled once the client is gone.

    Args:
        keys: one of which a client has to send, as ``Authorization: Bearer KEY`` or ``X-API-Key: KEY``; no key is asked
            for if there is none.
        size: the most bytes of a body; seconds: for all of it to arrive.
    """

    def __init__(self, app: App, *, keys: Collection[str], size: int, seconds: float) -> None:
        self.app, self.keys, self.size, self.seconds = app, [k.encode() for k in keys], size, seconds

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            await self._check(scope["path"], Request(scope))
            body = await read_body(scope, receive, self.size, self.seconds)
        except HTTPException as error:
            refusal = JSONResponse({"detail": error.detail}, error.status_code, error.headers)
            await refusal(scope, receive, send)
        except ClientDisconnect:
            pass
        else:
            await self._answer(scope, body, receive, send)

    async def _check(self, path: str, request: Request) -> None:
        if self.keys and path not in OPEN:
            bearer = await _BEARER(request)
            given = (await _HEADER(request) or (bearer.credentials if bearer else "")).encode()
            fitting = [key for key in self.keys if hmac.compare_digest(given, key)]  # in the same time whichever fits
            if not fitting:
                reason = "this server asks for a key: Authorization: Bearer KEY"
                raise HTTPException(401, reason, {"WWW-Authenticate": "Bearer"})
        if request.method not in ("GET", "HEAD", "OPTIONS") and is_foreign(request.headers):
            raise HTTPException(403, "this server answers to no page of another site")

    async def _answer(self, scope: Message, body: bytes, receive: Receive, send: Send) -> None:
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        async def gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        tasks = [asyncio.ensure_future(self.app(scope, replay, send)), asyncio.ensure_future(gone())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if not tasks[0].cancelled():
            tasks[0].result()


class Outcomes:
    """Counts the status of each response: 499 where the client was gone before it.

    Where the server ends before a response, which it does by cancelling the request, the response is 503.
    """

    def __init__(self, app: App, *, count: Callable[[int], None]) -> None:
        self.app, self.count = app, count

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 499

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noting)
        except asyncio.CancelledError:
            if status != 499:
                raise
            await JSONResponse({"detail": "the server is about to end"}, 503)(scope, receive, noting)
        except Exception:
            status = 500
            raise
        finally:
            self.count(status)

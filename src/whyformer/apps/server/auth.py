"""Keys of the server, and the status of every response."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Collection
from typing import Any

from fastapi.security import APIKeyHeader, HTTPBearer
from starlette.requests import Request
from starlette.responses import JSONResponse

OPEN = ("/health", "/ready")
"""Paths that need no key: they say nothing about anybody's inputs."""
_BEARER, _HEADER = HTTPBearer(auto_error=False), APIKeyHeader(name="X-API-Key", auto_error=False)


class RequireKey:
    """Answers 401 to a request without one of the keys, sent as ``Authorization: Bearer KEY`` or ``X-API-Key: KEY``.

    A middleware and no dependency: FastAPI reads the body before its dependencies, and has ``/openapi.json`` beside
    them.
    """

    def __init__(self, app: Any, *, keys: Collection[str]) -> None:
        self.app, self.keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN and not await self._allows(Request(scope)):
            reason = {"detail": "this server asks for a key: Authorization: Bearer KEY"}
            await JSONResponse(reason, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _allows(self, request: Request) -> bool:
        bearer = await _BEARER(request)
        given = (await _HEADER(request) or (bearer.credentials if bearer else "")).encode()
        fitting = [key for key in self.keys if hmac.compare_digest(given, key)]  # in the same time whichever fits
        return bool(fitting)


class CountStatus:
    """Tells ``count`` the status of each response. A request that the server cancels at its end is answered 503."""

    def __init__(self, app: Any, *, count: Callable[[int], None]) -> None:
        self.app, self.count = app, count

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 0

        async def counted(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self.app(scope, receive, counted)
        except asyncio.CancelledError:
            if status:
                raise
            await JSONResponse({"detail": "the server is about to end"}, 503)(scope, receive, counted)
        finally:
            self.count(status or 500)

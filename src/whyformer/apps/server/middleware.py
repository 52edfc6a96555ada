"""Requests that are refused before the application sees them, and the status of every response."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Collection
from typing import Any

from fastapi.security import APIKeyHeader, HTTPBearer
from prometheus_client import Counter
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from whyformer.apps.http import is_foreign, read_body
from whyformer.apps.server.limits import Limits

NO_KEY = ("/health", "/ready")
"""Paths that need no key: their answers do not depend on anybody's inputs."""
_BEARER, _HEADER = HTTPBearer(auto_error=False), APIKeyHeader(name="X-API-Key", auto_error=False)


class RequestGate:
    """Refuses requests without a key (401), from pages of other sites (403), too large (413) and too slow (408).

    This is a middleware because FastAPI reads the body before it calls dependencies, and does not call them for
    ``/openapi.json``. A request that the server cancels when it ends is answered 503.

    Args:
        app: the application.
        limits: size of a body, and seconds for all of it to arrive.
        keys: one of them is required, as ``Authorization: Bearer KEY`` or ``X-API-Key: KEY``; none if empty.
        counter: counts the responses by status.
    """

    def __init__(self, app: Any, *, limits: Limits, keys: Collection[str], counter: Counter) -> None:
        self.app, self.limits, self.keys, self.counter = app, limits, [key.encode() for key in keys], counter

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
            await self._respond(Request(scope, receive), counted)
        except HTTPException as error:
            await JSONResponse({"detail": error.detail}, error.status_code, error.headers)(scope, receive, counted)
        except ClientDisconnect:
            status = 499
        except asyncio.CancelledError:
            if status:
                raise
            await JSONResponse({"detail": "the server is stopping"}, 503)(scope, receive, counted)
        finally:
            self.counter.labels(str(status or 500)).inc()

    async def _respond(self, request: Request, send: Any) -> None:
        if self.keys and request.scope["path"] not in NO_KEY and not await self._has_key(request):
            raise HTTPException(
                401, "this server requires a key: Authorization: Bearer KEY", {"WWW-Authenticate": "Bearer"}
            )
        if request.method not in ("GET", "HEAD", "OPTIONS") and is_foreign(request.headers):
            raise HTTPException(403, "requests from pages of other sites are refused")
        body = [await read_body(request.scope, request.receive, self.limits.size, self.limits.seconds)]

        async def replay() -> Any:
            return {"type": "http.request", "body": body.pop(), "more_body": False} if body else await request.receive()

        await self.app(request.scope, replay, send)

    async def _has_key(self, request: Request) -> bool:
        bearer = await _BEARER(request)
        sent = (await _HEADER(request) or (bearer.credentials if bearer else "")).encode()
        return sum(hmac.compare_digest(sent, key) for key in self.keys) > 0  # in the same time whichever matches

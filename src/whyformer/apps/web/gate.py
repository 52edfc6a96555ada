"""ASGI middleware in front of gradio: refuses other sites, guessed passwords and large bodies."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse

from whyformer.apps.http import is_foreign, read_body

MOST_JSON = 2 * 2**20
PATIENCE = 30.0
"""Seconds for a body to arrive, and for each part of an upload."""
_TRIES, _LONGEST_WAIT, _CLIENTS = 3, 300.0, 10_000
# paths for which gradio fetches an address, also one of another site
_FETCHED = re.compile(r".*(file|proxy)=/*(https?|ftp|data):.*", re.IGNORECASE | re.DOTALL)
# paths that call a function beside the queue, or by a name that is not public
_DIRECT = re.compile(r".*/((run|api)/.*|call/(?!(v2/)?explain$).*)", re.IGNORECASE | re.DOTALL)
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


class PageGate:
    """Refuses requests before gradio reads them:

    * POST requests from another site, by ``Origin`` or ``Sec-Fetch-Site`` (403), and direct calls of functions (403);
    * logins after too many wrong passwords (429);
    * calls of functions that run in the browser alone (403);
    * requests that make the server fetch an address: gradio's proxy, and files named by an address (403);
    * more than 2 MB of JSON (413; uploads have their own limit), bodies that do not arrive (408), and bodies that are
      no JSON object or, in an upload, no form (400);
    * uploads while the folder of uploads is full (507).

    Args:
        app: the application.
        room: return True if another upload fits.
        visits: called with the visitor's identifier when a tab opens (True) and when it closes (False).
        runs_here: return True for the number of a function of this server, of any type.
    """

    def __init__(
        self,
        app: Any,
        room: Callable[[], bool] = lambda: True,
        visits: Callable[[str, bool], None] = lambda visitor, here: None,
        runs_here: Callable[[Any], bool] = lambda number: True,
    ) -> None:
        self.app, self.room, self.visits, self.runs_here = app, room, visits, runs_here
        self.wrong: OrderedDict[str, tuple[int, float]] = OrderedDict()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = "/" + scope.get("path", "").replace("\\", "/").strip("/")
        upload = path.endswith("/upload")
        body = None
        try:
            self._check_head(scope, path)
            if scope["method"] == "POST" and not upload:
                body = await read_body(scope, receive, MOST_JSON, PATIENCE)
            if body and path != "/login":
                number = _check_body(body).get("fn_index")
                if path.endswith("/queue/join") and not self.runs_here(number):
                    raise HTTPException(403, "not on this page")
        except HTTPException as error:
            await PlainTextResponse(error.detail, error.status_code)(scope, receive, send)
            return
        except ClientDisconnect:
            return
        messages = [] if body is None else [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Any:
            if messages:
                return messages.pop()
            return await asyncio.wait_for(receive(), PATIENCE) if upload else await receive()

        started = False

        async def send_with_headers(message: Any) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if path == "/login" and scope["method"] == "POST":
                    self._record_login(_client(scope), message["status"] < 400)
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        visitor = path.rpartition("/heartbeat/")[2] if "/heartbeat/" in path else None
        if visitor is not None:
            self.visits(visitor, True)
        try:
            await self.app(scope, replay, send_with_headers)
        except ClientDisconnect:
            pass  # during an upload
        except TimeoutError:
            await PlainTextResponse("too slow", 408)(scope, receive, send)
        except (ValueError, TypeError, KeyError, AttributeError):
            if not upload or started:
                raise
            # gradio raises these for a malformed form
            await PlainTextResponse("the body is not a form with a readable file", 400)(scope, receive, send)
        finally:
            if visitor is not None:
                self.visits(visitor, False)

    def _check_head(self, scope: Any, path: str) -> None:
        """Raise the status with which a request is refused before its body is read."""
        if _FETCHED.fullmatch(path):
            raise HTTPException(403, "not on this page")
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return
        if is_foreign(Headers(scope=scope)) or _DIRECT.fullmatch(path):
            raise HTTPException(403, "not on this page")
        if path == "/login" and time.monotonic() < self.wrong.get(_client(scope), (0, 0.0))[1]:
            raise HTTPException(429, "too many wrong passwords: try again later")
        if path.endswith("/upload") and not self.room():
            raise HTTPException(507, "the folder of uploads is full: try again later")

    def _record_login(self, client: str, success: bool) -> None:
        """After three wrong passwords, double the waiting time of a client with each further one."""
        count = self.wrong.pop(client, (0, 0.0))[0] + 1
        if not success:
            wait = 0.0 if count < _TRIES else min(_LONGEST_WAIT, 2.0 ** (count - _TRIES))
            self.wrong[client] = count, time.monotonic() + wait
            while len(self.wrong) > _CLIENTS:
                self.wrong.popitem(last=False)


def _client(scope: Any) -> str:
    return str((scope.get("client") or ("",))[0])


def _check_body(body: bytes) -> dict[str, Any]:
    """Return a JSON object; refuse any other body (400), and an address as a file, which gradio would fetch (403)."""
    paths: list[Any] = []

    def collect(value: dict[str, Any]) -> dict[str, Any]:
        paths.append(value.get("path"))
        return value

    try:
        read = json.loads(body.decode(), object_hook=collect)
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        raise HTTPException(400, "the body is not a JSON object")
    if any(isinstance(path, str) and "://" in path[:16] for path in paths):
        raise HTTPException(403, "not on this page")
    return read

"""An ASGI middleware before gradio: other sites, guessed passwords, fetched addresses, large bodies, full disks."""

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
"""Seconds that a body may take to arrive, and an upload to send its next part."""
_TRIES, _LONGEST_WAIT, _CLIENTS = 3, 300.0, 10_000
# where gradio would fetch an address, or send the browser to it
_FETCHED = re.compile(r".*(file|proxy)=/*(https?|ftp|data):.*", re.IGNORECASE | re.DOTALL)
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


class PageGate:
    """Refuses before gradio sees the request:

    * a POST that comes from another site, by its ``Origin`` or ``Sec-Fetch-Site`` (403);
    * where a login is set, a login after too many wrong ones (429);
    * whatever may make the server fetch an address: gradio's proxy, and files named by one (403);
    * more than 2 MB of JSON (413; uploads have their own limit), bodies that do not arrive (408), and those that are
      no JSON object or, of an upload, no form (400);
    * an upload where there is no room (507).

    Args:
        room: whether a further upload may be kept.
        visits: told of each visitor's identifier when a tab opens (True) and when it is gone (False).
    """

    def __init__(
        self, app: Any, room: Callable[[], bool] = lambda: True,
        visits: Callable[[str, bool], None] = lambda visitor, here: None,
    ) -> None:  # fmt: skip
        self.app, self.room, self.visits = app, room, visits
        self.wrong: OrderedDict[str, tuple[int, float]] = OrderedDict()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = "/" + scope.get("path", "").replace("\\", "/").strip("/")
        status, body = self._refused(scope, path), None
        upload = path.endswith("/upload")
        try:
            if status != 200:
                raise HTTPException(status, "not on this page")
            if scope["method"] == "POST" and not upload:
                body = await read_body(scope, receive, MOST_JSON, PATIENCE)
            if body and path != "/login":
                _judge(body)
        except HTTPException as error:
            await PlainTextResponse(error.detail, error.status_code)(scope, receive, send)
            return
        except ClientDisconnect:
            return
        waiting = [] if body is None else [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Any:
            """The body that was read, and then whatever comes."""
            if waiting:
                return waiting.pop()
            return await asyncio.wait_for(receive(), PATIENCE) if upload else await receive()

        begun = False

        async def sealed(message: Any) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                if path == "/login" and scope["method"] == "POST":
                    self._tried(_client(scope), message["status"] < 400)
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        visitor = path.rpartition("/heartbeat/")[2] if "/heartbeat/" in path else None
        if visitor is not None:
            self.visits(visitor, True)
        try:
            await self.app(scope, again, sealed)
        except ClientDisconnect:
            pass  # in the middle of an upload
        except TimeoutError:
            await PlainTextResponse("too slow", 408)(scope, receive, send)
        except (ValueError, TypeError, KeyError, AttributeError):
            if not upload or begun:
                raise
            # what gradio's reader of forms stumbles over
            await PlainTextResponse("this is no form with a file that can be read", 400)(scope, receive, send)
        finally:
            if visitor is not None:
                self.visits(visitor, False)

    def _refused(self, scope: Any, path: str) -> int:
        """The status with which a request is refused by what stands in its head; 200 if it is not."""
        posted = scope["method"] not in ("GET", "HEAD", "OPTIONS")
        if _FETCHED.fullmatch(path) or (posted and is_foreign(Headers(scope=scope))):
            return 403
        if posted and path == "/login" and time.monotonic() < self.wrong.get(_client(scope), (0, 0.0))[1]:
            return 429
        return 507 if posted and path.endswith("/upload") and not self.room() else 200

    def _tried(self, client: str, right: bool) -> None:
        """After three wrong passwords each further one has to wait, twice as long as the one before."""
        count = self.wrong.pop(client, (0, 0.0))[0] + 1
        if not right:
            wait = 0.0 if count < _TRIES else min(_LONGEST_WAIT, 2.0 ** (count - _TRIES))
            self.wrong[client] = count, time.monotonic() + wait
            while len(self.wrong) > _CLIENTS:
                self.wrong.popitem(last=False)


def _client(scope: Any) -> str:
    return str((scope.get("client") or ("",))[0])


def _judge(body: bytes) -> None:
    """Refuse a body that is no JSON object (400), and one with an address as a file, which gradio would fetch (403)."""
    places: list[Any] = []

    def seen(found: dict[str, Any]) -> dict[str, Any]:
        places.append(found.get("path"))
        return found

    try:
        fine = isinstance(json.loads(body.decode(), object_hook=seen), dict)
    except (ValueError, RecursionError):
        fine = False
    if not fine:
        raise HTTPException(400, "the body is no JSON object")
    if any(isinstance(place, str) and "://" in place[:16] for place in places):
        raise HTTPException(403, "not on this page")

"""Run the page with uvicorn and the limits of :mod:`whyformer.apps.http`, and open a public tunnel to it."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import gradio as gr
import httpx
from fastapi import FastAPI
from gradio.exceptions import ChecksumMismatchError
from gradio.networking import setup_tunnel
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from whyformer.apps.http import RequestChecks, server
from whyformer.apps.web.handlers import Handlers
from whyformer.apps.web.page import build, look
from whyformer.errors import LoadError

USER = "whyformer"
CONNECTIONS = 256
PATIENCE = 30.0
"""Seconds for a body to arrive."""
GRACE = 2.0
"""Seconds in which requests may finish when the page ends. Streams, such as progress, end then."""


def application(handlers: Handlers, hosts: list[str], password: str | None) -> FastAPI:
    """Return the page as an ASGI application.

    Args:
        handlers: functions of the page.
        hosts: accepted values of the header ``Host``: the name of another site may resolve to the address of this
            machine (DNS rebinding).
        password: required for a login; no login if None.
    """
    page = build(handlers)
    page.queue(max_size=32, default_concurrency_limit=4, api_open=False)
    middleware = [
        Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False),
        # a form is a little larger than the file in it
        Middleware(RequestChecks, size=handlers.limits.size + 2**16, seconds=PATIENCE),
    ]
    app: FastAPI = gr.mount_gradio_app(
        FastAPI(openapi_url=None), page, "/", auth=None if password is None else (USER, password),
        max_file_size=handlers.limits.size, allowed_paths=[], show_error=False, ssr_mode=False, pwa=False,
        mcp_server=False, enable_monitoring=False, footer_links=[], app_kwargs={"middleware": middleware}, **look(),
    )  # fmt: skip
    return app


def run(app: Any, sock: socket.socket) -> Callable[[], None]:
    """Serve in a thread, wait until requests are answered, and return a function that ends the thread."""
    running = server(app, CONNECTIONS, GRACE)
    # not a daemon, because threads inherit this: a process aborts if it ends while a thread runs torch
    thread = threading.Thread(target=running.run, args=([sock],), name="whyformer-page")
    thread.start()
    while not running.started:
        if not thread.is_alive():
            raise LoadError("the page did not start; the log says why")
        time.sleep(0.01)

    def end() -> None:
        running.should_exit = True
        thread.join()

    return end


def open_tunnel(host: str, port: int) -> str:
    """Return a public address of the page through gradio's servers, valid until the process ends.

    Raises:
        LoadError: gradio's servers cannot be reached.
    """
    try:
        address = setup_tunnel(host, port, secrets.token_urlsafe(32), None, None)
    except (RuntimeError, ValueError, OSError, httpx.HTTPError, ChecksumMismatchError) as error:
        raise LoadError(f"gradio's servers give no public address ({error}); try again, or without --share") from error
    return urlsplit(address)._replace(scheme="https").geturl()

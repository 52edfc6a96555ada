"""Serve the page: on this machine alone unless asked otherwise, and then with a password."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

from whyformer.apps import is_local
from whyformer.apps.web.limits import Catalogue, Limits
from whyformer.apps.web.uploads import Uploads
from whyformer.errors import InputError, LoadError, MissingExtra

USER = "whyformer"
SHORTEST_PASSWORD = 8


def check_door(host: str, share: bool, password: str | None) -> bool:
    """Whether others than this machine can reach the page; refuses that without a password.

    Raises:
        InputError: no password, or one of fewer than 8 characters.
    """
    local = is_local(host)
    if password is not None and len(password) < SHORTEST_PASSWORD:
        raise InputError(f"the password needs at least {SHORTEST_PASSWORD} characters")
    if (share or not local) and password is None:
        how = "--share puts the page on the internet" if share else f"--host {host} opens the page to other machines"
        raise InputError(f"{how}, so it needs a password: set WHYFORMER_PASSWORD, or give --password")
    return share or not local


def serve(
    catalogue: Catalogue | None = None,
    limits: Limits | None = None,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    share: bool = False,
    password: str | None = None,
    browser: bool = False,
    started: Callable[[str], None] = lambda address: None,
    wait: bool = True,
) -> Callable[[], None]:
    """Serve the page until interrupted.

    Args:
        catalogue, limits: which models, and how much is taken.
        host, port: where; the first free port from 7860 by default.
        share: open a public tunnel (through gradio's servers); like other hosts only with a password.
        password: asked of every visitor, together with the user name "whyformer".
        browser: open the page in the browser.
        started: called with the address once the page answers.
        wait: return at once if False.

    Returns:
        A function that closes the page and deletes what was uploaded.

    Raises:
        InputError: others could reach the page, and there is no password.
        MissingExtra: gradio is not installed.
    """
    public = check_door(host, share, password)
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    limits = limits or Limits()
    uploads = Uploads(limits.uploads)
    os.environ["GRADIO_TEMP_DIR"] = str(uploads.folder)
    try:
        from starlette.middleware import Middleware

        from whyformer.apps.web.gate import Gate
        from whyformer.apps.web.handlers import Handlers
        from whyformer.apps.web.page import build, look
    except ImportError as error:
        uploads.delete()
        raise MissingExtra('the web page needs gradio: pip install "whyformer[app]"') from error
    handlers = Handlers(catalogue or Catalogue(hub=not public), limits, uploads.folder)
    page = build(handlers)
    page.queue(max_size=32, default_concurrency_limit=4)
    # a page that others reach under names that it cannot know takes any
    hosts = None if share or host in ("0.0.0.0", "::", "") else frozenset({"localhost", "127.0.0.1", "::1", host})
    gate = Middleware(Gate, hosts=hosts, room=uploads.room, visits=handlers.visits)
    try:
        _, local, remote = page.launch(
            server_name=host, server_port=port, share=share, inbrowser=browser, quiet=True, prevent_thread_lock=True,
            auth=None if password is None else (USER, password), max_file_size=limits.size, allowed_paths=[],
            show_error=False, ssr_mode=False, pwa=False, mcp_server=False, enable_monitoring=False, footer_links=[],
            app_kwargs={"middleware": [gate]}, **look(),
        )  # fmt: skip
    except OSError as error:
        uploads.delete()
        where = f"port {port} of {host}" if port is not None else host
        raise LoadError(f"cannot open the page on {where}: it is taken, or not this machine's; try another") from error

    def close() -> None:
        page.close(verbose=False)
        uploads.delete()

    if not wait:
        started(remote or local)
        return close
    try:
        with contextlib.suppress(KeyboardInterrupt), _ended_by_signal():
            started(remote or local)
            page.block_thread()
    finally:
        close()
    return close


@contextlib.contextmanager
def _ended_by_signal() -> Iterator[None]:
    """SIGTERM ends the page as Ctrl+C does, so that uploads are deleted; only the main thread can be told of it."""

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

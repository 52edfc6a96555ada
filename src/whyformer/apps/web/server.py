"""Serve the page on this machine; for other machines a password is required."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
import webbrowser
from collections.abc import Callable
from pathlib import Path

from whyformer.apps import ended_by_signal, is_local
from whyformer.apps.web.limits import Catalogue, PageLimits
from whyformer.errors import InputError, import_optional

SHORTEST_PASSWORD = 12
PORTS = range(7860, 7960)
EVERYWHERE = ("0.0.0.0", "::", "")
"""Hosts for which the page listens on all addresses of the machine."""


def check_exposure(host: str, share: bool, password: str | None) -> bool:
    """Return True if other machines can reach the page, after checking that there is a password.

    Raises:
        InputError: no password, or one of fewer than 12 characters.
    """
    local = is_local(host)
    if password is not None and len(password) < SHORTEST_PASSWORD:
        raise InputError(f"the password needs at least {SHORTEST_PASSWORD} characters")
    if (share or not local) and password is None:
        how = "--share puts the page on the internet" if share else f"--host {host} opens the page to other machines"
        raise InputError(f"{how}, so it needs a password: set WHYFORMER_PASSWORD, or pass --password")
    return share or not local


def serve(
    catalogue: Catalogue | None = None,
    limits: PageLimits | None = None,
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
        catalogue: the models.
        limits: limits of inputs.
        host: address to listen on.
        port: port to listen on; the first free port from 7860 by default.
        share: open a public tunnel through gradio's servers; requires a password, as other hosts do.
        password: password of all visitors; the user name is "whyformer".
        browser: open the page in the browser.
        started: called with the address once the page answers.
        wait: False to return at once.

    Returns:
        A function that closes the page and deletes what was uploaded.

    Raises:
        InputError: other machines could reach the page, and there is no password.
        LoadError: the port is not free, or there is no tunnel.
        MissingExtra: gradio is not installed.
    """
    public = check_exposure(host, share, password)
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["GRADIO_RUN_HISTORY"] = "False"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    limits = limits or PageLimits()
    with contextlib.ExitStack() as stack:
        folder = tempfile.TemporaryDirectory(prefix="whyformer-app-", ignore_cleanup_errors=True)
        uploads = Path(stack.enter_context(folder))
        os.environ["GRADIO_TEMP_DIR"] = str(uploads)
        import_optional("gradio", "the web page", "app")
        from whyformer.apps.http import LOCAL, listen
        from whyformer.apps.web.handlers import Handlers
        from whyformer.apps.web.running import application, open_tunnel, run

        sock = stack.enter_context(listen(host, PORTS if port is None else [port]))
        name = "localhost" if host in EVERYWHERE else f"[{host}]" if ":" in host else host
        handlers = Handlers(catalogue or Catalogue(hub=not public), limits, uploads)
        # the names under which others reach the page are not known, so all are accepted
        hosts = ["*"] if share or host in EVERYWHERE else [*LOCAL, name]
        stack.callback(run(application(handlers, hosts, password), sock))
        loading = threading.Thread(target=handlers.load_models, name="whyformer-models")
        stack.callback(loading.join)
        stack.callback(handlers.end)
        loading.start()
        number = sock.getsockname()[1]
        address = open_tunnel(host, number) if share else f"http://{name}:{number}/"
        if browser:
            webbrowser.open(address)
        if not wait:
            started(address)
            return stack.pop_all().close
        with contextlib.suppress(KeyboardInterrupt), ended_by_signal():
            started(address)
            # in steps, because a signal that arrives just before the thread blocks does not wake it
            while True:
                time.sleep(1)
        return stack.close

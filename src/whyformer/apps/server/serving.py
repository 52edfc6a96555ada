"""Serve explanations until interrupted; accepted requests are finished before the process ends."""

from __future__ import annotations

from collections.abc import Callable, Collection

from whyformer.apps import is_local
from whyformer.apps.server.limits import Limits
from whyformer.errors import InputError, import_optional
from whyformer.options import Options

SHORTEST_KEY = 16


def require_key_if_public(host: str, keys: Collection[str]) -> None:
    """Check that other machines need a key, and that no key is easy to guess.

    Raises:
        InputError: there is no key, or one has fewer than 16 characters.
    """
    if not is_local(host) and not keys:
        raise InputError(f"--host {host} opens the server to other machines, which needs a key: set WHYFORMER_API_KEY")
    if any(len(key) < SHORTEST_KEY or not key.isascii() or not key.isprintable() for key in keys):
        raise InputError(f"a key must have at least {SHORTEST_KEY} printable ASCII characters")


def serve(
    model: str,
    *,
    host: str,
    port: int,
    keys: tuple[str, ...],
    limits: Limits,
    options: Options,
    started: Callable[[str], None],
) -> None:
    """Serve explanations of one model until SIGINT or SIGTERM.

    Args:
        keys: keys that clients may send; needed if other machines can reach the server.
        started: called with the address once requests are accepted.

    Raises:
        InputError: other machines could reach the server, and there is no key; or the model reads other inputs than a
            text or a picture.
        LoadError: the model cannot be loaded, or the port is not free.
        MissingExtra: fastapi or uvicorn is not installed.
    """
    require_key_if_public(host, keys)
    for package in ("fastapi", "uvicorn"):
        import_optional(package, "the server", "serve")
    from whyformer.apps.http import LOCAL, listen, server
    from whyformer.apps.server.app import build
    from whyformer.explainer import Explainer
    from whyformer.jobs.batching import Session
    from whyformer.models import load

    loaded = load(model, device=options.device, dtype=options.dtype)
    if loaded.modality not in ("text", "image"):
        raise InputError(
            f"{loaded.name} reads {loaded.reads}, and the server takes a text or a picture: use `whyformer explain`, "
            "or whyformer.explain in Python"
        )
    session = Session(Explainer(loaded, **options.named), ())
    shown = f"[{host}]" if ":" in host else host
    with listen(host, [port]) as sock:
        app = build(session, loaded.modality, limits, keys, (*LOCAL, shown), lambda: started(f"http://{shown}:{port}"))
        server(app, 4 * (limits.queue + limits.batch), limits.grace).run([sock])

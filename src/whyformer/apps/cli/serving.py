"""``whyformer serve``: explanations over HTTP."""

from __future__ import annotations

from dataclasses import dataclass

from whyformer.apps.cli import options as opt
from whyformer.apps.cli.telling import tell
from whyformer.explanation.versions import record
from whyformer.options import DEFAULTS, Options


@dataclass(kw_only=True)
class Serve(opt.Common):
    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: list[str] | None = None
    batch: int = 16
    wait: float = 5.0
    queue: int = 128
    seconds: float = 60.0
    grace: float = 30.0
    options: Options = DEFAULTS


def serve(asked: Serve) -> None:
    """Answer requests for explanations of one model, on this machine alone unless asked otherwise."""
    from whyformer.apps.server import Limits
    from whyformer.apps.server import serve as answer

    limits = Limits(
        batch=asked.batch, wait=asked.wait / 1000, queue=asked.queue, seconds=asked.seconds, grace=asked.grace
    )  # fmt: skip
    answer(
        asked.model, host=asked.host, port=asked.port, keys=tuple(asked.api_key or ()), limits=limits,
        options=asked.options,
        started=lambda address: tell(
            asked, record("serve", url=address),
            f"whyformer answers at {address}, described in {address}/openapi.json (Ctrl+C ends it)",
        ),
    )  # fmt: skip

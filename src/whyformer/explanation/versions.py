"""What a written result says of itself: the versions that made it, and the version of its form."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

SCHEMA_VERSION = 1
"""Counts up when a key changes its meaning or goes away; a new key leaves it as it is."""


def record(command: str, **facts: Any) -> dict[str, Any]:
    """What a command prints with ``--json``: which command it was, and its facts."""
    return {"schema_version": SCHEMA_VERSION, "command": command, **facts}


def versions() -> dict[str, str]:
    """Package -> version of whyformer and of what the figures depend on; those not installed are left out."""
    from whyformer import __version__

    found = {"whyformer": __version__}
    for name in ("torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found

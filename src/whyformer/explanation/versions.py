"""Versions recorded in written results: of the packages and of the JSON schema."""

from __future__ import annotations

from typing import Any

SCHEMA_VERSION = 1
"""Increases when a key changes its meaning or is removed; new keys do not change it."""


def record(command: str, **facts: Any) -> dict[str, Any]:
    """Return the JSON record of a command: schema version, name of the command, and its results."""
    return {"schema_version": SCHEMA_VERSION, "command": command, **facts}


def versions() -> dict[str, str]:
    """Return package -> version for whyformer and the installed packages that affect its results."""
    from importlib.metadata import PackageNotFoundError, version  # here, because --help imports this module

    from whyformer import __version__

    packages = {"whyformer": __version__}
    for name in ("torch", "transformers"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return packages

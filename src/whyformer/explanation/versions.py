"""Which versions made a result: kept with it, so that it can be repeated."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


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

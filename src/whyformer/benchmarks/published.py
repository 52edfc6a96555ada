"""Figures of the papers, and texts of the conventions in reports, from the data files in this folder."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any


def _data(name: str) -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


PUBLISHED, CONVENTIONS = _data("published.toml"), _data("conventions.toml")
"""Figures of the papers, and texts of the conventions, by benchmark."""


def conventions(section: str, **values: Any) -> dict[str, str]:
    """Return the texts of a section of :data:`CONVENTIONS`, formatted with ``values``."""
    return {name: text.format(**values) for name, text in CONVENTIONS[section].items()}

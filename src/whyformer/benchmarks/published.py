"""What the papers published and what the reports state: the data files beside this one."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any


def _data(name: str) -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


PUBLISHED, CONVENTIONS = _data("published.toml"), _data("conventions.toml")
"""Figures from the papers, and what the reports state, by benchmark."""


def conventions(section: str, **values: Any) -> dict[str, str]:
    """What a section of :data:`CONVENTIONS` states, with these values."""
    return {name: said.format(**values) for name, said in CONVENTIONS[section].items()}

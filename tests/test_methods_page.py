"""docs/methods.md is generated from the registry."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_methods_page_is_up_to_date() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "methods_page"))["page"]()
    assert (ROOT / "docs" / "methods.md").read_text(encoding="utf-8") == page, "run scripts/methods_page > docs/methods.md"

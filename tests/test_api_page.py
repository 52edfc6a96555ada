"""docs/api.md is generated from the public names and their docstrings."""

from __future__ import annotations

import runpy
from pathlib import Path

import whyformer

ROOT = Path(__file__).parents[1]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "api_page"))


def test_api_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "api.md").read_text(encoding="utf-8") == SCRIPT["page"](), "run scripts/api_page > docs/api.md"


def test_api_page_groups_contain_every_public_name() -> None:
    assert sorted(name for names in SCRIPT["GROUPS"].values() for name in names) == sorted(whyformer.__all__)

"""Every example in the README and the docs runs: Python blocks, and console blocks that begin with ``$ whyformer``."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from whyformer.apps.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OWN_TEST = "contributing.md"  # tests/test_contributing.py: its blocks add to registries


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    lines = [line for page in PAGES for block in blocks(page, "console") for line in block.splitlines()]
    assert all(line.startswith("$ whyformer ") for line in lines), "console blocks hold commands alone, no output"
    return list(dict.fromkeys(line.removeprefix("$ whyformer ") for line in lines))


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that has the examples, as the root of a checkout does."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != OWN_TEST and blocks(p, "python")], ids=lambda p: p.name)
def test_python(page, workplace, capsys):
    """The blocks of a page run one after the other, like cells of a notebook."""
    space: dict[str, object] = {"__name__": "__example__"}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), space)


@pytest.mark.parametrize("command", commands())
def test_console(command, workplace):
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if target.endswith("hero.png") and not (page.parent / target).exists():
            continue
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_the_patent_note_is_there():
    for name in ("README.md", "docs/how-it-works.md"):
        assert "patents in some" in (ROOT / name).read_text(encoding="utf-8")

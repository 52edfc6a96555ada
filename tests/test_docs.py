"""Every example in the README and the docs runs: Python blocks, and console blocks of ``$ whyformer`` commands."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weights import CACHE
from whyformer.apps.cli import app
from whyformer.rules import registered

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# hub ids in examples -> folder of their weights; blocks that name a missing model are skipped
WEIGHTS = {
    "facebook/deit-tiny-patch16-224": ROOT.parent / "shared" / "weights" / "deit_tiny_in1k",
    "HuggingFaceTB/SmolLM2-135M-Instruct": CACHE / "smollm2_135m_instruct",
}
OWN_TEST = "contributing.md"  # run by tests/test_contributing.py, because its blocks add to registries


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def consoles() -> list[tuple[str, ...]]:
    """The commands of each console block; those of one block run in order in one folder."""
    commands = [tuple(block.splitlines()) for page in PAGES for block in blocks(page, "console")]
    assert all(line.startswith("$ whyformer ") for block in commands for line in block), "console blocks hold commands alone"
    return list(dict.fromkeys(commands))


@pytest.fixture(autouse=True)
def _restored_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove rules that an example registers."""
    monkeypatch.setattr(registered, "_registered", dict(registered._registered))


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary working directory with a copy of the examples folder."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != OWN_TEST and blocks(p, "python")], ids=lambda p: p.name)
def test_python_blocks_run(page, workplace, capsys):
    """The blocks of a page run in order and share their names, like cells of a notebook."""
    space: dict[str, object] = {"__name__": "__example__"}
    absent = [name for name, folder in WEIGHTS.items() if not (folder / "model.safetensors").is_file()]
    for name in WEIGHTS.keys() - absent:
        (workplace / name).parent.mkdir()
        (workplace / name).symlink_to(WEIGHTS[name])
    for block in blocks(page, "python"):
        if not any(name in block for name in absent):
            exec(compile(block, str(page), "exec"), space)


@pytest.mark.parametrize("block", consoles(), ids=lambda block: block[0].removeprefix("$ "))
def test_console_blocks_run(block, workplace):
    for line in block:
        result = CliRunner().invoke(app, shlex.split(line.removeprefix("$ whyformer ")))
        assert result.exit_code == 0, f"{line}\n{result.output}"


def test_every_command_in_the_readme_is_run():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    run = {line for block in blocks(ROOT / "README.md", "console") for line in block.splitlines()}
    shown = {line for line in text.splitlines() if line.lstrip("$ ").startswith("whyformer ")}
    assert shown <= run
    scripts = {line.split()[0] for block in blocks(ROOT / "README.md", "bash") for line in block.splitlines()}
    assert scripts == {"./scripts/demo", "./scripts/test"}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_linked_files_exist(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if target.endswith("hero.png") and not (page.parent / target).exists():
            continue
        assert target.startswith("https://") or (page.parent / target).exists(), target


def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub generates them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = (re.sub(r"[^\w\s-]", "", title.lower()) for title in re.findall(r"^#+ +(.*)$", text, re.MULTILINE))
    return {title.replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_linked_headings_exist(page):
    for target, anchor in re.findall(r"\]\(([^):#]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
        assert anchor in anchors(page.parent / target if target else page), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES)
def test_pages_have_no_placeholder(page):
    assert "@@" not in page.read_text(encoding="utf-8")


def test_index_lists_every_page():
    listed = set(re.findall(r"\]\(([^):#]+\.md)\)", (ROOT / "docs" / "index.md").read_text(encoding="utf-8")))
    assert {str(p.relative_to(ROOT / "docs")) for p in PAGES[1:]} - {"index.md"} <= listed


def test_patent_note_is_in_readme_and_docs():
    for name in ("README.md", "docs/how-it-works.md"):
        assert "patents in some" in (ROOT / name).read_text(encoding="utf-8")

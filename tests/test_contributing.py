"""The recipes of docs/contributing.md run as written; registries are restored afterwards."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from whyformer.baselines import BASELINES
from whyformer.benchmarks import BENCHMARKS
from whyformer.datasets.readers import PICTURE_READERS
from whyformer.errors import UnknownOperation
from whyformer.evaluation import METRICS
from whyformer.methods import METHODS
from whyformer.tape.tables import KINDS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
REGISTRIES = (METHODS, METRICS, BASELINES, BENCHMARKS, PICTURE_READERS, KINDS)


@pytest.fixture
def _restored_registries():
    before = [dict(registry) for registry in REGISTRIES]
    yield
    for registry, saved in zip(REGISTRIES, before, strict=True):
        registry.clear()
        registry.update(saved)


@pytest.mark.usefixtures("_restored_registries")
def test_recipes_run(tmp_path, monkeypatch):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    space: dict = {"__name__": "__recipe__"}
    for block in blocks:
        exec(compile(block, "contributing.md", "exec", dont_inherit=True), space)
    assert len(blocks) == len(re.findall(r"^## An? ", PAGE, re.MULTILINE)) == 11
    KINDS.pop("i0")
    with pytest.raises(UnknownOperation, match="i0"):
        space["whyformer"].explain(space["Tail"]().eval(), space["x"][:1], "lrp", 0)


def test_paths_named_on_the_page_exist():
    named = set(re.findall(r"`((?:src|tests|scripts|docs)/[\w/.]+)`", PAGE))
    assert len(named) > 10
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []

"""Schemas of saved files: errors name the file and the path of the invalid value."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

import whyformer
from whyformer.errors import InputError, LoadError
from whyformer.explanation.result import Explanation
from whyformer.explanation.schemas import BenchmarkSchema, checked
from whyformer.explanation.storage import schema
from whyformer.jobs.manifest import Manifest, Part

WRONG: dict[str, tuple[Any, str]] = {
    "level": (3, "its level"), "settings": ([], "its settings"), "activation": ("tanh", "its activation"),
    "tokens": ([["a", 3]], "tokens.0.1"), "offsets": ([[[0, 1], [1]]], "offsets.0.1.1"), "unknown": ([[1.5]], "unknown.0.0"),
    "target_names": (["a", None], "target_names.1"), "labels": ({"zero": "a"}, "labels.zero"), "grid": ([4, "4"], "grid.1"), "method": (None, "method"),
    "geometry": ([3], "geometry.0"), "rate": ("fast", "rate"), "colour": ("red", "'colour'"),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    e = whyformer.explain("bundled:sst2", "A charming film, though it drags.", "rollout")
    return e.save(tmp_path_factory.mktemp("saved") / "film.safetensors")


def with_facts(path: Path, change: Any, out: Path) -> Path:
    """The file with changed metadata and no checksum, as written by an older version."""
    with safe_open(str(path), "pt") as file:
        facts, tensors = json.loads(file.metadata()["whyformer"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(facts)
    save_file(tensors, out, metadata={"whyformer": json.dumps(facts)})
    return out


@pytest.mark.parametrize("name", WRONG)
def test_invalid_value_raises_with_file_and_path(name: str, saved: Path, tmp_path: Path) -> None:
    value, message = WRONG[name]
    damaged = with_facts(saved, lambda facts: facts.update({name: value}), tmp_path / "wrong.safetensors")
    with pytest.raises(LoadError, match=r"wrong\.safetensors") as caught:
        Explanation.load(damaged)
    assert message.removeprefix("its ") in str(caught.value)
    facts = {**Explanation.load(saved).to_dict(), name: value}
    with pytest.raises(InputError) as caught_input_error:
        Explanation.from_dict(facts)
    assert message.removeprefix("its ") in str(caught_input_error.value)


@pytest.mark.parametrize("name", ["level", "method", "settings", "activation", "diagnostics"])
def test_missing_required_field_raises_with_its_name(name: str, saved: Path, tmp_path: Path) -> None:
    damaged = with_facts(saved, lambda facts: facts.pop(name), tmp_path / "less.safetensors")
    with pytest.raises(LoadError, match=f"less.safetensors is not a saved explanation: this explanation lacks its {name}"):
        Explanation.load(damaged)


def test_optional_fields_may_be_missing_and_tuples_become_lists(saved: Path, tmp_path: Path) -> None:
    whole = Explanation.load(saved)
    optional = [name for name, field in schema(Explanation).model_fields.items() if not field.is_required()]
    facts = whole.to_dict()
    less = {name: value for name, value in facts.items() if name not in optional or value is not None}
    assert len(less) < len(facts)
    restored = Explanation.from_dict({**less, "tokens": [tuple(row) for row in facts["tokens"]]})
    assert restored.to_dict() == facts
    assert whole.offsets is not None
    assert all(isinstance(pair, tuple) for row in whole.offsets for pair in row)


PART = {"file": "part-000000.parquet", "first": 0, "rows": 2, "written": 2, "failed": 0, "bytes": 10, "sha256": "ab"}
MANIFEST = {"format": 1, "job": {}, "model": {"name": "m", "labels": {"0": "a"}}, "source": {}, "complete": True, "parts": [PART], "batch_sizes": [[0, 2]]}
BENCHMARK = {
    "benchmark": "b", "conventions": {}, "counts": {"m": {"scored": 1, "failed": 0, "constant": 0, "nan": 0}}, "remarks": [], "curves": {}, "extra": {},
    "tables": [{"table": "b", "title": "B", "corner": "Method", "rows": ["m"], "columns": ["f"], "digits": 2}],
    "figures": [{"table": "b", "row": "m", "column": "f", "measured": 1.0, "low": None, "high": None, "published": None}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "whole", "location", "value"),
    [
        (Part, PART, "file", "../part-000000.parquet"), (Part, PART, "file", "part-000000.parquet\n"), (Part, PART, "rows", -1),
        (Part, PART, "bytes", True), (Part, PART, "sha256", None),
        (Manifest, MANIFEST, "format", 2), (Manifest, MANIFEST, "complete", 1), (Manifest, MANIFEST, "model.labels", {"zero": "a"}),
        (Manifest, MANIFEST, "parts.0.first", "0"), (Manifest, MANIFEST, "batch_sizes.0.1", -2), (Manifest, MANIFEST, "job", []),
        (BenchmarkSchema, BENCHMARK, "figures.0.measured", "much"), (BenchmarkSchema, BENCHMARK, "tables.0.rows", "m"), (BenchmarkSchema, BENCHMARK, "remarks", None),
        (BenchmarkSchema, BENCHMARK, "counts.m.scored", 1.5), (BenchmarkSchema, BENCHMARK, "tables.0.digits", "2"),
    ],
)  # fmt: skip
def test_invalid_records_and_reports_raise_with_path(kind: Any, whole: dict[str, Any], location: str, value: Any) -> None:
    assert checked(kind, whole, "it")
    wrong = copy.deepcopy(whole)
    *path, last = location.split(".")
    inner: Any = wrong
    for step in path:
        inner = inner[int(step) if isinstance(inner, list) else step]
    inner[int(last) if isinstance(inner, list) else last] = value
    with pytest.raises(InputError) as caught:
        checked(kind, wrong, "it")
    assert f"it's {location}" in str(caught.value)
    with pytest.raises(InputError, match="is invalid"):
        checked(kind, "no mapping", "it")

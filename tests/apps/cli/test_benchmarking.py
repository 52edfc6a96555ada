"""``whyformer benchmark``: options, exit status and output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from whyformer.apps.cli import app
from whyformer.apps.cli.printing import INCOMPLETE
from zoo_evaluate import picture_folder, tiny_vit


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    tiny_vit().save_pretrained(folder)
    settings = {
        "image_processor_type": "ViTImageProcessor", "do_resize": True, "size": {"height": 32, "width": 32}, "resample": 2,
        "do_rescale": True, "do_normalize": True, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def test_benchmark_writes_tables_and_resumes(tmp_path: Path, model_folder: Path) -> None:
    data, out = picture_folder(tmp_path / "data"), tmp_path / "out"
    arguments = [
        "segmentation",
        "--model",
        str(model_folder),
        "--data",
        str(data),
        "--out",
        str(out),
        "--methods",
        "rollout:start_layer=1",
        "--count",
        "3",
    ]
    first = CliRunner().invoke(app, ["benchmark", *arguments, "--option", "explained=target"])
    assert first.exit_code == 0, first.output
    assert "3 samples" in first.output
    assert "forward passes" in first.output
    for name in ("records.jsonl", "table.md", "table.csv", "report.json"):
        assert (out / name).is_file()
    repeated = CliRunner().invoke(app, ["benchmark", *arguments, "--option", "explained=target"])
    assert "9 of 9 records of an earlier run" in repeated.output
    quiet = CliRunner().invoke(app, ["benchmark", *arguments, "--option", "explained=target", "--quiet"])
    assert quiet.output == ""


def test_samples_without_figures_have_status_incomplete(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(sys.modules["whyformer.prepared"].Prepared, "explain", broken)
    arguments = [
        "segmentation",
        "--model",
        str(model_folder),
        "--data",
        str(picture_folder(tmp_path / "d")),
        "--out",
        str(tmp_path / "o"),
        "--methods",
        "rollout",
    ]
    result = CliRunner().invoke(app, ["benchmark", *arguments])
    assert result.exit_code == INCOMPLETE
    assert "no figures" in result.output


def test_option_without_value_is_refused(tmp_path: Path, model_folder: Path) -> None:
    arguments = ["segmentation", "--model", str(model_folder), "--data", str(tmp_path), "--option", "explained"]
    result = CliRunner().invoke(app, ["benchmark", *arguments])
    assert result.exit_code == 2
    assert "key=value" in result.stderr


def test_help_and_unknown_benchmark(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["benchmark", "--help"])
    assert result.exit_code == 0
    assert "--methods" in result.output
    result = CliRunner().invoke(app, ["benchmark", "nothing", "--model", "bundled:digits", "--out", str(tmp_path / "b")])
    assert result.exit_code == 2
    assert "perturbation" in result.output

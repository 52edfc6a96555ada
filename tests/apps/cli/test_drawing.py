"""``attention``, ``perturb``, and drawing options."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from whyformer.apps.cli import app
from whyformer.apps.cli.schema import make_schema

PICTURE = str(Path(__file__).parents[3] / "examples" / "pictures" / "digits_37.png")
DIGITS = ["--model", "bundled:digits"]
TEXT = "An utterly charming film, though it drags."


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def error_of(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2, result.output
    return result.stderr


def validated(command: str, output: str) -> dict:
    result = json.loads(output)
    jsonschema.validate(result, make_schema())
    assert result["command"] == command
    assert set(result) == set(make_schema()["$defs"][command]["properties"])
    return result


@pytest.mark.parametrize(("options", "drawn"), [
    ([], "blocks"), (["--heads"], "heads"), (["--block", "1", "--heads"], "block 1 heads"), (["--block", "-1"], "block {last} head mean"),
    (["--matrix"], "block {last} head mean matrix"), (["--matrix", "--block", "0", "--head", "1"], "block 0 head 1 matrix"),
])  # fmt: skip
@pytest.mark.parametrize("source", [[PICTURE, *DIGITS], [TEXT]], ids=["picture", "text"])
def test_attention_draws_selected_maps(source, options, drawn, tmp_path):
    result = validated("attention", run("attention", *source, *options, "--out", str(tmp_path), "--json"))
    assert result["drawn"] == drawn.format(last=result["blocks"] - 1)
    (path,) = result["files"]
    with Image.open(path) as picture:
        assert picture.width > 300


def test_attention_with_gradient_of_class(tmp_path):
    run("attention", PICTURE, *DIGITS, "--block", "2", "--gradient", "--target", "3", "--out", str(tmp_path), "--format", "svg,pdf", "-q")
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".pdf", ".svg"]


def test_perturb_reports_probabilities(tmp_path):
    result = validated("perturb", run("perturb", PICTURE, *DIGITS, "--target", "3", "--baseline", "zero", "--out", str(tmp_path), "--json"))
    assert result["target"] == "3"
    assert len(result["fractions"]) == len(result["probabilities"]["lowest_first"]) == 10
    assert result["probabilities"]["highest_first"][3] < 0.5 < result["probabilities"]["lowest_first"][3]
    assert result["predicted"]["highest_first"][0] == "3"
    output = run("perturb", PICTURE, *DIGITS, "--target", "3", "--format", "none")
    assert "  50%" in output and "wrote" not in output


@pytest.mark.parametrize(("arguments", "message"), [
    (["attention", TEXT, "--block", "9"], "no block 9"),
    (["attention", TEXT, "--matrix", "--block", "9"], "no block 9"),
    (["attention", TEXT, "--block", "0", "--head", "77"], "head 77"),
    (["attention", TEXT, "--head", "77"], "head 77"),
    (["attention", TEXT, "--head", "sum"], "head must be an index"),
    (["attention", TEXT, "--target", "positive"], "--gradient weights it"),
    (["attention", TEXT, "--format", "json"], "--format takes png, svg, pdf, html or none, not 'json'"),
    (["attention", PICTURE, "--format", "html"], "the page of heads is for text"),
    (["perturb", TEXT], "this is a text"),
    (["perturb", PICTURE, "--method", "gae,rollout"], "one method"),
    (["perturb", PICTURE, *DIGITS, "--baseline", "white"], "baseline must be one of zero, black, mean, blur"),
    (["explain", PICTURE, "--keep", "a lot"], "a share is written like 0.2 or 20%"),
    (["explain", PICTURE, "--keep", "130%"], "keep must be a share"),
    (["explain", PICTURE, "--keep", "0.2", "--above", "0.3"], "exclude each other"),
    (["explain", PICTURE, "--opacity", "2"], "opacity must be between 0 and 1"),
    (["explain", PICTURE, "--cmap", "nope"], "unknown colour map 'nope'"),
    (["compare", PICTURE, "--contours", "44"], "contours must be"),
    (["explain", PICTURE, "--format", "tex"], "or none, not 'tex'"),
])  # fmt: skip
def test_invalid_arguments_write_nothing(arguments, message, tmp_path):
    assert message in " ".join(error_of(*arguments, "--out", str(tmp_path / "out")).split())
    assert not (tmp_path / "out").exists()


@pytest.mark.part
@pytest.mark.parametrize("options", [["--keep", "20%"], ["--above", "0.5"], ["--contours", "3"], ["--cmap", "jet", "--cover", "--opacity", "0.5"]])
@pytest.mark.parametrize("command", ["explain", "compare"])
def test_drawing_options_change_picture(command, options, tmp_path):
    methods = ["--method", "transformer_attribution", "--target", "3"]
    (plain,) = json.loads(run(command, PICTURE, *DIGITS, *methods, "--out", str(tmp_path / "a"), "--format", "png", "--json"))["files"]
    (changed,) = json.loads(run(command, PICTURE, *DIGITS, *methods, *options, "--out", str(tmp_path / "b"), "--format", "png", "--json"))["files"]
    first, second = (np.asarray(Image.open(path).convert("RGB"), dtype=int) for path in (plain, changed))
    assert first.shape == second.shape
    assert (np.abs(first - second).max(-1) > 30).mean() > 0.002

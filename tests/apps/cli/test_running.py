"""``whyformer run``, and ``whyformer explain`` with several inputs."""

from __future__ import annotations

import json
import shutil
import sys
import wave
from pathlib import Path

import pytest
from PIL import Image
from test_json import PICTURE, assert_conforms
from typer.testing import CliRunner

import whyformer
from whyformer.apps import cli

sys.path.insert(0, str(Path(__file__).parents[2] / "jobs"))
from job_builders import text_model, text_table


def invoke(*arguments: str, status: int = 0):
    result = CliRunner().invoke(cli.app, list(arguments))
    assert result.exit_code == status, (result.output, result.stderr)
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("run")
    text_model(path / "bert")
    text_table(path / "data.csv", 12, bad=(4,))
    (path / "JOB.toml").write_text('model = "bert"\ninput = "data.csv"\nmethods = ["gae", "rollout"]\nout = "maps"\nrows_per_part = 5\n')
    return path


def test_job_file_and_equal_options_write_same_files(folder):
    file = json.loads(invoke("run", str(folder / "JOB.toml"), "--json", status=3).stdout)
    assert_conforms("run", file)
    assert (file["rows"], file["written"], file["failed"], file["complete"]) == (12, 22, 1, True)
    result = invoke("run", "-m", str(folder / "bert"), "-i", str(folder / "data.csv"), "--method", "gae,rollout", "-o", str(folder / "other"), "--rows-per-part", "5", status=3)
    assert "22 explanations of 12 rows in" in result.stdout
    assert "1 failed: see" in result.stderr
    for file in sorted((folder / "maps").glob("*.parquet")):
        assert file.read_bytes() == (folder / "other" / file.name).read_bytes()
    repeated = invoke("run", str(folder / "JOB.toml"), "--method", "gae", status=2)
    assert repeated.stderr.startswith(f"error: {folder / 'maps'} contains another job: methods was")
    assert whyformer.read(folder / "maps").table().num_rows == 22


def test_targets_that_contain_commas(folder):
    output = folder / "written"
    invoke("run", str(folder / "JOB.toml"), "--out", str(output), "--targets", "Contrast('good', 'bad'), bad, LogProbability(1, among=2)", status=3)
    names = [row["target_name"] for row in whyformer.read(output).table(["target_name"]).to_pylist()[:3]]
    assert names == ["good rather than bad", "bad", "good among the 2 likeliest"]
    one = folder / "one"
    invoke("run", str(folder / "JOB.toml"), "--out", str(one), "--targets", "Probability('good')", status=3)
    assert set(whyformer.read(one).table(["target_name"])["target_name"].to_pylist()) == {"good"}
    result = invoke("run", str(folder / "JOB.toml"), "--out", str(folder / "none"), "--targets", "Contrast(good, bad)", status=2)
    assert "cannot be read: put names in quotes" in result.stderr
    assert not (folder / "none").exists()


def test_dry_run_reports_cost_and_writes_nothing(folder):
    result = invoke("run", str(folder / "JOB.toml"), "--out", str(folder / "dry"), "--dry-run", "--json")
    facts = json.loads(result.stdout)
    assert_conforms("run", facts)
    assert facts["cost"]["rows"] == 12
    assert facts["cost"]["warnings"] == ["1 of 12 rows of the trial failed; the first: r4: the text is empty"]
    assert not (folder / "dry").exists()
    output = invoke("run", str(folder / "JOB.toml"), "--out", str(folder / "dry"), "--dry-run").stdout
    assert output.startswith("12 rows: about 1 s and ")


def test_options_set_settings_targets_and_numbers(folder):
    out = folder / "settings"
    invoke("run", str(folder / "JOB.toml"), "--method", "integrated_gradients:steps=3", "-t", "good,bad", "--limit", "2", "--batch-size", "2", "-o", str(out))
    e = whyformer.read(out)[0]
    assert (e.method, e.settings["steps"], e.target_names) == ("integrated_gradients", 3, ["good"])
    for options, message in [(["--batch-size", "many"], "batch_size must be"), (["--targets", "worst"], "targets must be"), (["--engine", "dask"], "engine must be one of")]:
        assert message in invoke("run", str(folder / "JOB.toml"), *options, status=2).stderr
    assert "a job lacks the key input" in invoke("run", "-m", "bundled:sst2", "-o", str(out), status=2).stderr.replace("the job", "a job")


def test_several_inputs_and_folders_are_explained(tmp_path):
    for name in ("a/one.png", "b/one.png", "b/two.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(PICTURE, tmp_path / name)
    (tmp_path / "b" / "note.txt").write_text("A charming film.")
    (tmp_path / "b" / "broken.png").write_bytes(b"\x89PNG")
    result = invoke("explain", str(tmp_path / "a" / "one.png"), str(tmp_path / "b"), "-m", "bundled:digits", "--out", str(tmp_path / "out"), "--json", status=3)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["input"] for line in lines] == ["one.png", "one.png", "two.png"]
    for line in lines:
        assert_conforms("explain", line)
    files = [Path(f) for line in lines for f in line["files"]]
    assert len(set(files)) == 3
    assert all(f.is_file() for f in files)
    assert "broken.png is not a picture" in result.stderr
    assert "reads a picture, and this is a text" in result.stderr.replace("reads pictures", "reads a picture")
    assert "2 of 5 inputs left out" in result.stderr
    Image.open(files[0]).verify()


@pytest.mark.parametrize("names", [
    ["a/x.png", "b/x.png", "x-2.png"], ["a b.png", "a_b.png"], [f"{'long' * 10}-{i}.png" for i in range(3)], ["X.png", "x.png"],
])  # fmt: skip
def test_inputs_with_similar_names_do_not_overwrite_each_other(tmp_path, names):
    files = [tmp_path / name for name in names]
    for number, file in enumerate(files):
        file.parent.mkdir(exist_ok=True)
        Image.new("L", (112, 112), 60 * number).save(file)
    out = tmp_path / "out"
    invoke("explain", *map(str, files), "-m", "bundled:digits", "--method", "raw_attention", "--format", "json", "-o", str(out))
    written = [json.loads(path.read_text())["input"] for path in out.iterdir()]
    assert sorted(written) == sorted(file.name for file in files)


def test_several_arguments_that_are_not_files_are_refused(tmp_path):
    for command in ("explain", "compare"):
        assert "quote a sentence" in invoke(command, "A", "charming", "film", status=2).stderr
    assert "is a folder that holds no picture" in invoke("explain", str(tmp_path), status=2).stderr
    sound = tmp_path / "beep.wav"
    with wave.open(str(sound), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(8000))
    result = invoke("explain", str(sound), PICTURE, "-m", "bundled:digits", "--format", "none", status=3)
    assert "left out" in result.stderr and "this is a sound" in result.stderr
    assert "Did you mean 'gae'" in invoke("explain", PICTURE, PICTURE, "--method", "gea", status=2).stderr

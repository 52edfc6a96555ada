"""``whyformer run``, and ``whyformer explain`` of several inputs."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from PIL import Image
from test_json import PICTURE, fits
from typer.testing import CliRunner

import whyformer
from whyformer.apps import cli

sys.path.insert(0, str(Path(__file__).parents[2] / "jobs"))
from made import text_model, text_table


def asked(*arguments: str, status: int = 0):
    result = CliRunner().invoke(cli.app, list(arguments))
    assert result.exit_code == status, (result.output, result.stderr)
    return result


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    text_model(folder / "bert")
    text_table(folder / "data.csv", 12, bad=(4,))
    (folder / "JOB.toml").write_text('model = "bert"\ninput = "data.csv"\nmethods = ["gae", "rollout"]\nout = "maps"\nrows_per_part = 5\n')
    return folder


def test_a_job_file_and_the_same_as_options_write_the_same(place):
    file = json.loads(asked("run", str(place / "JOB.toml"), "--json", status=3).stdout)
    fits("run", file)
    assert (file["rows"], file["written"], file["failed"], file["complete"]) == (12, 22, 1, True)
    said = asked("run", "-m", str(place / "bert"), "-i", str(place / "data.csv"), "--method", "gae,rollout", "-o", str(place / "other"), "--rows-per-part", "5", status=3)
    assert "22 explanations of 12 rows in" in said.stdout
    assert "1 failed: see" in said.stderr
    for file in sorted((place / "maps").glob("*.parquet")):
        assert file.read_bytes() == (place / "other" / file.name).read_bytes()
    again = asked("run", str(place / "JOB.toml"), "--method", "gae", status=2)
    assert again.stderr.startswith(f"error: {place / 'maps'} contains another job: methods was")
    assert whyformer.read(place / "maps").table().num_rows == 22


def test_targets_with_commas_of_their_own(place):
    folder = place / "written"
    asked("run", str(place / "JOB.toml"), "--out", str(folder), "--targets", "Contrast('good', 'bad'), bad, LogProbability(1, among=2)", status=3)
    names = [row["target_name"] for row in whyformer.read(folder).table(["target_name"]).to_pylist()[:3]]
    assert names == ["good rather than bad", "bad", "good among the 2 likeliest"]
    one = place / "one"
    asked("run", str(place / "JOB.toml"), "--out", str(one), "--targets", "Probability('good')", status=3)
    assert set(whyformer.read(one).table(["target_name"])["target_name"].to_pylist()) == {"good"}
    said = asked("run", str(place / "JOB.toml"), "--out", str(place / "none"), "--targets", "Contrast(good, bad)", status=2)
    assert "cannot be read: put names in quotes" in said.stderr
    assert not (place / "none").exists()


def test_a_dry_run_says_what_it_costs_and_writes_nothing(place):
    found = asked("run", str(place / "JOB.toml"), "--out", str(place / "dry"), "--dry-run", "--json")
    facts = json.loads(found.stdout)
    fits("run", facts)
    assert facts["cost"]["rows"] == 12
    assert facts["cost"]["warnings"] == ["1 of 12 rows of the trial failed; the first: r4: the text is empty"]
    assert not (place / "dry").exists()
    said = asked("run", str(place / "JOB.toml"), "--out", str(place / "dry"), "--dry-run").stdout
    assert said.startswith("12 rows: about 1 s and ")


def test_settings_targets_and_numbers_are_read_off_options(place):
    out = place / "settings"
    asked("run", str(place / "JOB.toml"), "--method", "integrated_gradients:steps=3", "-t", "good,bad", "--limit", "2", "--batch-size", "2", "-o", str(out))
    e = whyformer.read(out)[0]
    assert (e.method, e.settings["steps"], e.target_names) == ("integrated_gradients", 3, ["good"])
    for wrong, words in [(["--batch-size", "many"], "batch_size must be"), (["--targets", "worst"], "targets must be"), (["--engine", "dask"], "engine must be one of")]:
        assert words in asked("run", str(place / "JOB.toml"), *wrong, status=2).stderr
    assert "a job lacks the key input" in asked("run", "-m", "bundled:sst2", "-o", str(out), status=2).stderr.replace("the job", "a job")


def test_several_inputs_and_folders_are_explained_one_by_one(tmp_path):
    for name in ("a/one.png", "b/one.png", "b/two.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(PICTURE, tmp_path / name)
    (tmp_path / "b" / "note.txt").write_text("A charming film.")
    (tmp_path / "b" / "broken.png").write_bytes(b"\x89PNG")
    result = asked("explain", str(tmp_path / "a" / "one.png"), str(tmp_path / "b"), "-m", "bundled:digits", "--out", str(tmp_path / "out"), "--json", status=3)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["input"] for line in lines] == ["one.png", "one.png", "two.png"]
    for line in lines:
        fits("explain", line)
    files = [Path(f) for line in lines for f in line["files"]]
    assert len(set(files)) == 3
    assert all(f.is_file() for f in files)
    assert "broken.png is not a picture" in result.stderr
    assert "reads a picture, and this is a text" in result.stderr.replace("reads pictures", "reads a picture")
    assert "2 of 5 inputs left out" in result.stderr
    Image.open(files[0]).verify()


def test_what_stands_beside_files_and_is_none_is_refused(tmp_path):
    assert "quote a sentence" in asked("explain", "A", "charming", "film", status=2).stderr
    assert "is a folder that holds no picture" in asked("explain", str(tmp_path), status=2).stderr
    assert "Did you mean 'gae'" in asked("explain", PICTURE, PICTURE, "--method", "gea", status=2).stderr

"""``scripts/reproduce`` runs every benchmark with valid options, and reports missing data and failures."""

import argparse
import json
import subprocess
from pathlib import Path

import pytest

from whyformer.benchmarks import BENCHMARKS

ROOT = Path(__file__).parents[1]
DATA = ("sst2", "coco_objects", "imagenet_samples", "eraser_movies", "mnist", "bace", "meld", "imdb", "tweeteval/emotion", "tweeteval/hate", "tweeteval/sentiment")
RUNS = ("movies", "emotion", "hate", "sentiment", "mnist", "meld", "bace", "imdb", "smollm2")


def reproduce(tmp_path: Path, *arguments: str, code: int = 0) -> tuple[list[list[str]], subprocess.CompletedProcess[str]]:
    """The benchmark commands of the script, recorded by a program that replaces whyformer."""
    log = tmp_path / "told"
    log.touch()
    stand_in = tmp_path / "whyformer"
    stand_in.write_text(f'#!/usr/bin/env bash\nprintf "%s\\037" "$@" >> {log}\necho >> {log}\nexit {code}\n')
    stand_in.chmod(0o755)
    environment = {
        "WHYFORMER_COMMAND": str(stand_in), "WHYFORMER_SHARED": str(tmp_path / "shared"),
        "WHYFORMER_RUNS": str(tmp_path / "runs"), "PATH": "/usr/local/bin:/usr/bin:/bin",
    }  # fmt: skip
    completed = subprocess.run(
        [ROOT / "scripts" / "reproduce", *arguments, tmp_path / "out"], capture_output=True, text=True, env=environment, check=False
    )
    return [line.rstrip("\037").split("\037") for line in log.read_text().splitlines()], completed


@pytest.fixture
def all_data(tmp_path: Path) -> Path:
    for folder in (*(f"shared/data/{d}" for d in DATA), "shared/weights/deit_tiny_in1k", *(f"runs/{r}" for r in RUNS)):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("bace", "imdb"):
        (tmp_path / "runs" / name / "tested.json").write_text(json.dumps({"test_ids": ["7", "12"]}))
    return tmp_path


def parsed(command: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=["benchmark"])
    parser.add_argument("name", choices=list(BENCHMARKS))
    for option in ("--out", "--model", "--data", "--count"):
        parser.add_argument(option)
    parser.add_argument("--option", action="append", default=[])
    return parser.parse_args(command)


@pytest.mark.parametrize("full", [False, True], ids=["small", "full"])
def test_every_benchmark_runs_with_valid_options(all_data: Path, full: bool) -> None:
    commands, completed = reproduce(all_data, *(["--full"] if full else []))
    assert completed.returncode == 0, completed.stderr
    assert "left out" not in completed.stderr
    runs = [parsed(c) for c in commands]
    assert {a.name for a in runs} == set(BENCHMARKS)
    assert sum(a.name == "activation" for a in runs) == 8
    for run in runs:
        assert {o.partition("=")[0] for o in run.option} <= set(BENCHMARKS[run.name].options), run
        assert not (full and run.count), run
    assert all("files=7,12" in a.option for a in runs if a.data and a.data.endswith(("bace", "imdb")))


def test_missing_data_is_reported_and_the_rest_runs(tmp_path: Path) -> None:
    commands, completed = reproduce(tmp_path)
    assert completed.returncode == 0
    assert {parsed(c).name for c in commands} == {"segmentation", "sanity", "bias"}
    assert completed.stderr.count("left out") == 2 + len(RUNS)


def test_failure_is_reported_in_the_exit_status(all_data: Path) -> None:
    commands, completed = reproduce(all_data, code=1)
    assert completed.returncode == 1
    assert len(commands) > 15 and completed.stderr.count("failed (1)") == len(commands)
    assert reproduce(all_data, code=3)[1].returncode == 0

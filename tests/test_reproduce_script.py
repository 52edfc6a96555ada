"""``scripts/reproduce``: every benchmark is asked for, with options that it has, and what is missing is said."""

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
    """The benchmark commands that the script runs, with a program in whyformer's place that only writes them down."""
    told = tmp_path / "told"
    told.touch()
    stand_in = tmp_path / "whyformer"
    stand_in.write_text(f'#!/usr/bin/env bash\nprintf "%s\\037" "$@" >> {told}\necho >> {told}\nexit {code}\n')
    stand_in.chmod(0o755)
    environment = {
        "WHYFORMER_COMMAND": str(stand_in), "WHYFORMER_SHARED": str(tmp_path / "shared"),
        "WHYFORMER_RUNS": str(tmp_path / "runs"), "PATH": "/usr/local/bin:/usr/bin:/bin",
    }  # fmt: skip
    done = subprocess.run(
        [ROOT / "scripts" / "reproduce", *arguments, tmp_path / "out"], capture_output=True, text=True, env=environment, check=False
    )
    return [line.rstrip("\037").split("\037") for line in told.read_text().splitlines()], done


@pytest.fixture
def everything(tmp_path: Path) -> Path:
    for place in (*(f"shared/data/{d}" for d in DATA), "shared/weights/deit_tiny_in1k", *(f"runs/{r}" for r in RUNS)):
        (tmp_path / place).mkdir(parents=True)
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
def test_every_benchmark_with_options_that_it_has(everything: Path, full: bool) -> None:
    commands, done = reproduce(everything, *(["--full"] if full else []))
    assert done.returncode == 0, done.stderr
    assert "left out" not in done.stderr
    asked = [parsed(c) for c in commands]
    assert {a.name for a in asked} == set(BENCHMARKS)
    assert sum(a.name == "activation" for a in asked) == 8
    for one in asked:
        assert {o.partition("=")[0] for o in one.option} <= set(BENCHMARKS[one.name].options), one
        assert not (full and one.count), one
    assert all("files=7,12" in a.option for a in asked if a.data and a.data.endswith(("bace", "imdb")))


def test_what_is_missing_is_said_and_the_rest_runs(tmp_path: Path) -> None:
    commands, done = reproduce(tmp_path)
    assert done.returncode == 0
    assert {parsed(c).name for c in commands} == {"segmentation", "sanity", "bias"}
    assert done.stderr.count("left out") == 2 + len(RUNS)


def test_a_failure_is_said_and_kept_in_the_exit_status(everything: Path) -> None:
    commands, done = reproduce(everything, code=1)
    assert done.returncode == 1
    assert len(commands) > 15 and done.stderr.count("failed (1)") == len(commands)
    assert reproduce(everything, code=3)[1].returncode == 0

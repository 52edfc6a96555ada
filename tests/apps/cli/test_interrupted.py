"""Ctrl-C: one line, status 130, and work that can be resumed says so, and is."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from waiting import wait_for
from whyformer.apps.cli import app

ROOT = Path(__file__).parents[3]
RESUMES = "interrupted; the same command goes on where this one stopped\n"


def interrupted(*args: object, **kwargs: object) -> None:
    raise KeyboardInterrupt


COMMANDS = {
    "whyformer.inputs.argument.read_argument": (["explain", "A film."], "interrupted\n"),
    "whyformer.benchmarks.runner.run_benchmark": (["benchmark", "segmentation", "--model", "bundled:digits"], RESUMES),
    "whyformer.jobs.engines.run_job": (["run", "--input", "a.csv", "--model", "bundled:sst2", "--out", "o"], RESUMES),
}


@pytest.mark.parametrize("place", COMMANDS)
def test_one_line_and_its_status(place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words, said = COMMANDS[place]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("text\nA film.\n")
    monkeypatch.setattr(place, interrupted)
    result = CliRunner().invoke(app, words)
    assert (result.exit_code, result.stderr, result.stdout) == (130, said, "")


WORK = {
    "explain": (["explain", "pictures", "--model", "bundled:digits", "--method", "occlusion", "--setting", "stride=1"], "out/*.png", "interrupted\n"),
    "benchmark": (["benchmark", "perturbation", "--model", "bundled:digits", "--data", "scenes:400", "--method", "rollout"], "out/records.jsonl", RESUMES),
    "run": (["run", "--input", "pictures", "--model", "bundled:digits", "--method", "occlusion", "--rows-per-part", "2", "--batch-size", "1"], "out/*.parquet", RESUMES),
}  # fmt: skip


# Python drops what is raised while it calls back for a weak reference or a finalizer, and says so
LOST = re.compile(r"Exception ignored in.*?\n *KeyboardInterrupt: *\n+", re.DOTALL)


def interrupt(process: subprocess.Popen[bytes], err: Path) -> None:
    """Press Ctrl-C, and again each time that Python dropped it."""
    presses = 0

    def ended() -> bool:
        nonlocal presses
        if process.poll() is None and len(LOST.findall(err.read_text())) == presses:
            process.send_signal(signal.SIGINT)
            presses += 1
        return process.poll() is not None

    wait_for(ended, "the end of the command")


@pytest.mark.slow
@pytest.mark.parametrize("name", WORK)
def test_a_real_interrupt(name: str, tmp_path: Path) -> None:
    words, begun, said = WORK[name]
    (tmp_path / "pictures").mkdir()
    source = (ROOT / "examples" / "pictures" / "digits_37.png").read_bytes()
    for i in range(60):
        (tmp_path / "pictures" / f"{i}.png").write_bytes(source)
    line = [sys.executable, "-c", "from whyformer.apps.cli import main; main()", *words, "--out", "out"]
    # without the tests' own torchvision, which only imports with their help
    place = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    out, err = tmp_path / "stdout.txt", tmp_path / "stderr.txt"
    with out.open("w") as first, err.open("w") as second:
        process = subprocess.Popen(line, cwd=tmp_path, env=place, stdout=first, stderr=second)
    wait_for(lambda: any(path.stat().st_size for path in tmp_path.glob(begun)) or process.poll() is not None, begun)
    assert process.poll() is None, err.read_text()
    interrupt(process, err)
    assert process.returncode == 130, err.read_text()
    assert err.read_text().endswith(said)
    assert "Traceback" not in LOST.sub("", err.read_text())
    assert out.read_text() == "" or name == "explain"  # which tells of each input as it is done

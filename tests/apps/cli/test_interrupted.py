"""Interrupted commands: one line of output, status 130, and a note if the work can be resumed."""

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
RESUMABLE = "interrupted; the same command goes on where this one stopped\n"


def interrupted(*args: object, **kwargs: object) -> None:
    raise KeyboardInterrupt


COMMANDS = {
    "whyformer.inputs.argument.read_argument": (["explain", "A film."], "interrupted\n"),
    "whyformer.benchmarks.runner.run_benchmark": (["benchmark", "segmentation", "--model", "bundled:digits"], RESUMABLE),
    "whyformer.jobs.engines.run_job": (["run", "--input", "a.csv", "--model", "bundled:sst2", "--out", "o"], RESUMABLE),
}


@pytest.mark.parametrize("function", COMMANDS)
def test_interrupt_prints_one_line_with_status_130(function: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments, message = COMMANDS[function]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("text\nA film.\n")
    monkeypatch.setattr(function, interrupted)
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stderr, result.stdout) == (130, message, "")


WORK = {
    "explain": (["explain", "pictures", "--model", "bundled:digits", "--method", "occlusion", "--setting", "stride=1"], "out/*.png", "interrupted\n"),
    "benchmark": (["benchmark", "perturbation", "--model", "bundled:digits", "--data", "scenes:400", "--method", "rollout"], "out/records.jsonl", RESUMABLE),
    "run": (["run", "--input", "pictures", "--model", "bundled:digits", "--method", "occlusion", "--rows-per-part", "2", "--batch-size", "1"], "out/*.parquet", RESUMABLE),
}  # fmt: skip


# Python ignores exceptions raised in callbacks of weak references and finalizers, and reports them
IGNORED_INTERRUPT = re.compile(r"Exception ignored in.*?\n *KeyboardInterrupt: *\n+", re.DOTALL)


def interrupt(process: subprocess.Popen[bytes], err: Path) -> None:
    """Send SIGINT, and repeat it each time that Python ignored the exception."""
    signals = 0

    def is_ended() -> bool:
        nonlocal signals
        if process.poll() is None and len(IGNORED_INTERRUPT.findall(err.read_text())) == signals:
            process.send_signal(signal.SIGINT)
            signals += 1
        return process.poll() is not None

    wait_for(is_ended, "the end of the command")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["explain", pytest.param("benchmark", marks=pytest.mark.whole), "run"])
def test_sigint_ends_command(name: str, tmp_path: Path) -> None:
    arguments, output_files, message = WORK[name]
    (tmp_path / "pictures").mkdir()
    source = (ROOT / "examples" / "pictures" / "digits_37.png").read_bytes()
    for i in range(60):
        (tmp_path / "pictures" / f"{i}.png").write_bytes(source)
    command = [sys.executable, "-c", "from whyformer.apps.cli import main; main()", *arguments, "--out", "out"]
    # without the tests' torchvision, which imports only in the tests
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    out, err = tmp_path / "stdout.txt", tmp_path / "stderr.txt"
    with out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=stdout, stderr=stderr)
    wait_for(lambda: any(path.stat().st_size for path in tmp_path.glob(output_files)) or process.poll() is not None, output_files)
    assert process.poll() is None, err.read_text()
    interrupt(process, err)
    assert process.returncode == 130, err.read_text()
    assert err.read_text().endswith(message)
    assert "Traceback" not in IGNORED_INTERRUPT.sub("", err.read_text())
    assert out.read_text() == "" or name == "explain"  # it reports each input when it is done

"""What a user gets wrong ends with status 2 and one sentence, never with a traceback or a bug's status."""

import errno
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from whyformer.apps import cli
from whyformer.show import files

PICTURE = "examples/pictures/digits_37.png"


@pytest.mark.parametrize("arguments", [
    ["explain", "a film", "--target", "²"], ["explain", "a film", "--target", "9" * 5000], ["explain", "a film", "--target", "#" + "9" * 5000],
    ["explain", "a film", "--target", "٣"], ["explain", "a film", "--target", "\x00"], ["attention", "a film", "--head", "²"],
    ["maximize", "²"], ["explain", "a film", "--setting", "start_layer=²"], ["explain", "a film", "--method", "smoothgrad", "--setting", "samples=1000000000"],
    ["explain", "a film", "--method", "saliency,nope"], ["explain", "\ud800"], ["explain", "a\ud800 film", "--target", "\udcff"],
])  # fmt: skip
def test_a_mistake_is_a_sentence(arguments, tmp_path, monkeypatch):
    out = ["--out", str(tmp_path / ("x.png" if arguments[0] == "maximize" else "out"))]
    result = CliRunner().invoke(cli.app, [*arguments, *out])
    if result.exit_code == 0:  # some of them can be explained
        assert "\ud800" in arguments[1]
        return
    assert result.exit_code == 2, result.output
    assert "error: " in result.output or "Usage" in result.output
    assert "Traceback" not in result.output


def test_a_full_disk_is_no_bug(tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.Path, "write_bytes", full)
    result = CliRunner().invoke(cli.app, ["explain", "a film", "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "No space left on device" in result.output


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_standard_output_on_a_full_disk_is_no_bug():
    with open("/dev/full", "wb") as full:
        made = subprocess.run([sys.executable, "-c", "from whyformer.apps.cli import main; main()", "schema"], stdout=full, stderr=subprocess.PIPE, check=False)
    assert made.returncode == 2, made.stderr
    assert b"Traceback" not in made.stderr


def test_an_argument_that_is_no_text_is_no_bug(tmp_path):
    command = [sys.executable, "-c", "from whyformer.apps.cli import main; main()", "explain", b"caf\xe9.png", "--out", str(tmp_path)]
    made = subprocess.run(command, capture_output=True, check=False)
    assert made.returncode == 2
    assert b"Traceback" not in made.stderr

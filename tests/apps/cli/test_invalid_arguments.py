"""Invalid arguments and unwritable output end with status 2 and a message, without a traceback."""

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
    *([command, "a film", "--model", name] for command in ("explain", "compare", "generate", "attention") for name in ("", " ")),
    ["generate", "a film", "--model", "bundled:reader", "--truncate"], ["audit", ""], ["compare", "a film", "--method", ""], ["compare", "a film", "--method", ","],
    ["explain", "a film", "--method", "saliency,nope"], ["explain", "\ud800"], ["explain", "a\ud800 film", "--target", "\udcff"],
])  # fmt: skip
def test_invalid_argument_has_status_2_and_message(arguments, tmp_path, monkeypatch):
    out = ["--out", str(tmp_path / ("x.png" if arguments[0] == "maximize" else "out"))]
    result = CliRunner().invoke(cli.app, [*arguments, *out])
    if result.exit_code == 0:  # lone surrogates in a text can be explained
        assert "\ud800" in arguments[1]
        return
    assert result.exit_code == 2, result.output
    assert "error: " in result.output or "Usage" in result.output
    assert "Traceback" not in result.output


def test_full_disk_has_status_2(tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.Path, "write_bytes", full)
    result = CliRunner().invoke(cli.app, ["explain", "a film", "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "No space left on device" in result.output


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_standard_output_on_full_disk_has_status_2():
    with open("/dev/full", "wb") as full:
        completed = subprocess.run([sys.executable, "-c", "from whyformer.apps.cli import main; main()", "schema"], stdout=full, stderr=subprocess.PIPE, check=False)
    assert completed.returncode == 2, completed.stderr
    assert b"Traceback" not in completed.stderr


def test_argument_that_is_not_utf8_has_status_2(tmp_path):
    command = [sys.executable, "-c", "from whyformer.apps.cli import main; main()", "explain", b"caf\xe9.png", "--out", str(tmp_path)]
    completed = subprocess.run(command, capture_output=True, check=False)
    assert completed.returncode == 2
    assert b"Traceback" not in completed.stderr

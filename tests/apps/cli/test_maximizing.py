"""``whyformer maximize``."""

from __future__ import annotations

from pathlib import Path

from PIL import Image
from typer.testing import CliRunner

from whyformer.apps import cli


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, list(arguments))
    return result.exit_code, result.output


def test_maximize_draws_a_picture(tmp_path: Path) -> None:
    status, output = run("maximize", "3", "--steps", "3", "--quiet", "--out", str(tmp_path / "three.png"))
    assert status == 0, output
    with Image.open(tmp_path / "three.png") as picture:
        assert picture.size == (112, 112)


def test_maximize_refuses_what_it_cannot_write_or_climb(tmp_path: Path) -> None:
    status, output = run("maximize", "3", "--out", str(tmp_path / "three.gif"))
    assert (status, "must end in .png" in output) == (2, True)
    status, output = run("maximize", "elephant", "--quiet", "--out", str(tmp_path / "e.png"))
    assert status == 2
    assert not list(tmp_path.iterdir())

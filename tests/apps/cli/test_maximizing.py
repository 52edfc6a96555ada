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


def test_maximize_refuses_unknown_format_and_unit(tmp_path: Path) -> None:
    status, output = run("maximize", "3", "--out", str(tmp_path / "three.gif"))
    assert (status, "must end in .png" in output) == (2, True)
    status, output = run("maximize", "elephant", "--quiet", "--out", str(tmp_path / "e.png"))
    assert status == 2
    assert not list(tmp_path.iterdir())


def test_several_units_are_drawn_in_one_figure(tmp_path: Path) -> None:
    status, output = run("maximize", "3", "vit.layers.1:0:5", "-s", "scale=0.2", "--steps", "2", "-o", str(tmp_path / "two.png"))
    assert status == 0, output
    assert "3: activation" in output
    assert "vit.layers.1:0:5: activation" in output
    with Image.open(tmp_path / "two.png") as picture:
        assert picture.width > 1.7 * picture.height
    status, output = run("maximize", "3", "4", "-o", str(tmp_path / "two.safetensors"))
    assert (status, "must end in .png, .svg, .pdf" in output) == (2, True)
    status, output = run("maximize", "3", "-s", "sharpness=2", "-o", str(tmp_path / "3.png"))
    assert (status, "no setting 'sharpness'" in output) == (2, True)


def test_recipes_give_different_pictures(tmp_path: Path) -> None:
    for recipe in ("plain", "feature_visualisation"):
        status, output = run("maximize", "3", "--steps", "2", "--recipe", recipe, "-o", str(tmp_path / f"{recipe}.png"))
        assert status == 0, output
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 2

"""``scripts/pictures`` draws every picture of the docs, and the pictures of bundled models are up to date."""

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import whyformer
from whyformer.show import figure
from whyformer.show.paper import encode

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "pictures"


def test_script_draws_every_picture_of_the_docs():
    named = set(re.findall(r"""(?:\$images/|draw\(")([\w.]+)""", SCRIPT.read_text()))
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = {name for page in pages for name in re.findall(r"!\[[^\]]*\]\([^)]*images/([\w.]+)\)", page.read_text())}
    assert named == shown == {path.name for path in (ROOT / "docs" / "images").iterdir()}


def test_unknown_option_is_refused():
    completed = subprocess.run([SCRIPT, "--surprise"], capture_output=True, text=True, check=False)
    assert (completed.returncode, completed.stdout) == (2, "")
    assert "unknown option --surprise" in completed.stderr


def digits():
    return figure([whyformer.explain("bundled:digits", ROOT / "examples" / "pictures" / "digits_37.png", "auto", target) for target in (3, 7)])


def sentence():
    return figure(whyformer.explain("bundled:sst2", "It starts slowly, but turns into a warm and charming film.", target="positive"))


@pytest.mark.parametrize(("name", "drawn"), [("hero.png", digits), ("sentence.png", sentence)])
def test_pictures_of_bundled_models_are_up_to_date(tmp_path, name, drawn):
    (tmp_path / name).write_bytes(encode(drawn()))
    actual, stored = (np.asarray(Image.open(path).convert("RGB"), dtype=float) for path in (tmp_path / name, ROOT / "docs" / "images" / name))
    assert actual.shape == stored.shape
    assert np.abs(actual - stored).mean() < 1  # of 255; fonts and processors differ a little

"""``scripts/pictures``: every picture of the docs is in it, and those of bundled models are drawn as they stand there."""

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


def test_every_picture_of_the_docs_is_in_it():
    named = set(re.findall(r"""(?:\$images/|draw\(")([\w.]+)""", SCRIPT.read_text()))
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = {place for page in pages for place in re.findall(r"!\[[^\]]*\]\([^)]*images/([\w.]+)\)", page.read_text())}
    assert named == shown == {path.name for path in (ROOT / "docs" / "images").iterdir()}


def test_an_unknown_option_is_refused_before_anything_is_made():
    done = subprocess.run([SCRIPT, "--surprise"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "unknown option --surprise" in done.stderr


def digits():
    return figure([whyformer.explain("bundled:digits", ROOT / "examples" / "pictures" / "digits_37.png", "auto", target) for target in (3, 7)])


def sentence():
    return figure(whyformer.explain("bundled:sst2", "It starts slowly, but turns into a warm and charming film.", target="positive"))


@pytest.mark.parametrize(("name", "drawn"), [("hero.png", digits), ("sentence.png", sentence)])
def test_the_pictures_of_bundled_models_are_up_to_date(tmp_path, name, drawn):
    (tmp_path / name).write_bytes(encode(drawn()))
    made, kept = (np.asarray(Image.open(place).convert("RGB"), dtype=float) for place in (tmp_path / name, ROOT / "docs" / "images" / name))
    assert made.shape == kept.shape
    assert np.abs(made - kept).mean() < 1  # of 255; fonts and processors differ a little

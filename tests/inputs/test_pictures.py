"""Reading picture files."""

import numpy as np
import pytest
from PIL import Image

from whyformer.errors import InputError, LoadError
from whyformer.inputs.pictures import open_picture


def test_it_is_turned_upright(tmp_path):
    raw = Image.new("RGB", (40, 20), "black")
    raw.paste("white", (0, 0, 10, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned a quarter clockwise
    raw.save(tmp_path / "x.jpg", exif=exif)
    turned = open_picture(tmp_path / "x.jpg")
    assert turned.size == (20, 40)
    assert np.asarray(turned)[2].mean() > 200


@pytest.mark.parametrize(("mode", "suffix"), [("RGBA", "png"), ("LA", "png"), ("P", "gif"), ("1", "png"), ("L", "png"), ("CMYK", "jpg"), ("I;16", "png"), ("F", "tiff")])
def test_every_mode_becomes_rgb(tmp_path, mode, suffix):
    Image.new(mode, (9, 7)).save(tmp_path / f"x.{suffix}")
    made = open_picture(tmp_path / f"x.{suffix}")
    assert (made.mode, made.size) == ("RGB", (9, 7))


def test_transparency_becomes_white(tmp_path):
    Image.new("RGBA", (4, 4), (0, 0, 0, 0)).save(tmp_path / "x.png")
    assert np.asarray(open_picture(tmp_path / "x.png")).min() == 255


def test_sixteen_bit_grey_is_scaled_not_cut_off(tmp_path):
    Image.fromarray(np.linspace(0, 60_000, 100).reshape(10, 10).astype(np.uint16)).save(tmp_path / "x.png")
    values = np.unique(np.asarray(open_picture(tmp_path / "x.png")))
    assert len(values) > 50


def test_limits(tmp_path):
    Image.new("RGB", (20, 20)).save(tmp_path / "x.png")
    assert open_picture(tmp_path / "x.png", pixels=400).size == (20, 20)
    with pytest.raises(InputError, match="20 x 20 pixels"):
        open_picture(tmp_path / "x.png", pixels=399)
    with pytest.raises(InputError, match="MB"):
        open_picture(tmp_path / "x.png", size=10)


@pytest.mark.parametrize("name", ["missing.png", "a\0b.png", "x" * 400 + ".png"])
def test_what_cannot_be_found(tmp_path, name):
    with pytest.raises(LoadError):
        open_picture(tmp_path / name)

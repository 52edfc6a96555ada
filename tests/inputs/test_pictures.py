"""Images are read alike at every entry point, with notes on their conversion."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import whyformer
from whyformer.apps import cli
from whyformer.errors import InputError, LoadError
from whyformer.inputs import prepare
from whyformer.inputs.pictures import as_rgb, notes, open_picture
from whyformer.models.loading import load

DIGIT = Path(__file__).parents[2] / "examples" / "pictures" / "digits_37.png"


def test_image_is_rotated_by_exif_orientation(tmp_path):
    raw = Image.new("RGB", (40, 20), "black")
    raw.paste("white", (0, 0, 10, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be rotated a quarter clockwise
    raw.save(tmp_path / "x.jpg", exif=exif)
    upright = open_picture(tmp_path / "x.jpg")
    assert upright.size == (20, 40)
    assert np.asarray(upright)[2].mean() > 200


@pytest.mark.parametrize(("mode", "suffix"), [("RGBA", "png"), ("LA", "png"), ("P", "gif"), ("1", "png"), ("L", "png"), ("CMYK", "jpg"), ("I;16", "png"), ("F", "tiff")])
def test_every_mode_becomes_rgb(tmp_path, mode, suffix):
    Image.new(mode, (9, 7)).save(tmp_path / f"x.{suffix}")
    image = open_picture(tmp_path / f"x.{suffix}")
    assert (image.mode, image.size) == ("RGB", (9, 7))


def test_transparency_becomes_white(tmp_path):
    Image.new("RGBA", (4, 4), (0, 0, 0, 0)).save(tmp_path / "x.png")
    assert np.asarray(open_picture(tmp_path / "x.png")).min() == 255


def test_sixteen_bit_grey_is_scaled_not_cut_off(tmp_path):
    Image.fromarray(np.linspace(0, 60_000, 100).reshape(10, 10).astype(np.uint16)).save(tmp_path / "x.png")
    values = np.unique(np.asarray(open_picture(tmp_path / "x.png")))
    assert len(values) > 50


def test_image_size_limits(tmp_path):
    Image.new("RGB", (20, 20)).save(tmp_path / "x.png")
    assert open_picture(tmp_path / "x.png", pixels=400).size == (20, 20)
    with pytest.raises(InputError, match="20 x 20 pixels"):
        open_picture(tmp_path / "x.png", pixels=399)
    with pytest.raises(InputError, match="MB"):
        open_picture(tmp_path / "x.png", size=10)


@pytest.mark.parametrize("name", ["missing.png", "a\0b.png", "x" * 400 + ".png"])
def test_missing_image_raises(tmp_path, name):
    with pytest.raises(LoadError):
        open_picture(tmp_path / name)


# -- one reader for all entry points ------------------------------------------------------------------------------------
def digit(kind, folder):
    """(file, notes of reading it): the same digit in a given format."""
    grey = Image.open(DIGIT).convert("L")
    path = folder / "digit.png"
    if kind == "16-bit grey":
        Image.fromarray(np.asarray(grey).astype(np.uint16) * 257).save(path)
        return path, ["grey values 0 to 65535 scaled to 0 to 255"]
    if kind == "float grey":
        path = folder / "digit.tiff"
        Image.fromarray(np.asarray(grey).astype(np.float32) / 255).save(path)
        return path, ["grey values 0 to 1 scaled to 0 to 255"]
    if kind == "transparent":
        # black with the darkness of the digit as opacity, so on white it is the digit again
        alpha = Image.eval(grey, lambda v: 255 - v)
        Image.merge("LA", (Image.new("L", grey.size, 0), alpha)).save(path)
        return path, ["transparency replaced by white"]
    if kind == "turned":
        path, exif = folder / "digit.jpg", Image.Exif()
        exif[0x0112] = 6
        grey.convert("RGB").transpose(Image.Transpose.ROTATE_90).save(path, exif=exif, quality=98, subsampling=0)
        return path, ["turned upright by its EXIF orientation 6"]
    if kind == "several frames":
        path = folder / "digit.gif"
        grey.save(path, save_all=True, append_images=[Image.new("L", grey.size, 9), Image.new("L", grey.size, 200)])
        return path, ["frame 1 of 3"]
    assert kind == "cmyk"
    path = folder / "digit.tif"
    grey.convert("RGB").convert("CMYK").save(path)
    return path, ["CMYK converted to RGB"]


KINDS = ["16-bit grey", "float grey", "transparent", "turned", "several frames", "cmyk"]


@pytest.mark.parametrize("kind", KINDS)
def test_entry_points_read_a_file_alike(kind, tmp_path):
    path, expected_notes = digit(kind, tmp_path)
    digits = load("bundled:digits")
    plain = np.asarray(Image.open(DIGIT).convert("L").convert("RGB")).astype(float)
    with Image.open(path) as lazily, path.open("rb") as opened:
        explanations = [
            whyformer.explain(digits.model, source, "raw_attention", processor=digits.processor)
            for source in (lazily, path, str(path), [path], opened, open_picture(path))
        ]
    reference = explanations[0]
    assert np.abs(np.asarray(reference.originals[0]).astype(float) - plain).mean() < 2
    for e in explanations:
        assert torch.equal(e.scores, reference.scores)
        assert torch.equal(e.logits, reference.logits)
        assert e.diagnostics["input"] == [expected_notes]
    printed = CliRunner().invoke(cli.app, ["explain", str(path), "--model", "bundled:digits", "--method", "raw_attention", "--format", "none", "--json", "--quiet"]).stdout
    shown = json.loads(printed)["explanations"][0]
    assert shown["logits"] == reference.logits.tolist()
    assert shown["diagnostics"]["input"] == [expected_notes]


def test_notes_are_recorded_per_sample_and_once(tmp_path):
    digits = load("bundled:digits")
    path, expected_notes = digit("transparent", tmp_path)
    e = whyformer.explain(digits.model, [DIGIT, path, str(DIGIT)], "raw_attention", processor=digits.processor)
    assert e.diagnostics["input"] == [[], expected_notes, []]
    assert e[1].diagnostics["input"] == [expected_notes]
    loaded = whyformer.Explanation.load(e.save(tmp_path / "e.safetensors"))
    assert loaded.diagnostics["input"] == e.diagnostics["input"]
    assert "input" not in whyformer.explain(digits.model, DIGIT, "raw_attention", processor=digits.processor).diagnostics
    once = as_rgb(Image.open(path))
    assert notes(as_rgb(once)) == notes(once) == expected_notes


def test_rgb_image_is_not_copied():
    plain = Image.new("RGB", (9, 9))
    assert as_rgb(plain) is plain
    assert notes(plain) == []


def test_open_image_is_read_at_its_current_frame(tmp_path):
    path, _ = digit("several frames", tmp_path)
    with Image.open(path) as opened:
        opened.seek(2)
        image = as_rgb(opened)
    assert notes(image) == ["frame 3 of 3"]
    assert np.asarray(image).mean() > 190


@pytest.mark.parametrize(("values", "kind", "expected"), [
    ([0, 256, 65535], np.uint16, [0, 1, 255]), ([0, 128, 255], np.int32, [0, 128, 255]), ([0, 257, 65535], np.int32, [0, 1, 255]),
    ([-1000, 0, 1000], np.int32, [0, 128, 255]), ([0, 0.5, 1], np.float32, [0, 128, 255]), ([0, 0.5, 200], np.float32, [0, 0, 200]),
    ([-1, 0, 1], np.float32, [0, 128, 255]), ([7e4, 7e4, 7e4], np.float32, [0, 0, 0]),
])  # fmt: skip
def test_grey_values_are_scaled_to_bytes(values, kind, expected):
    image = as_rgb(Image.fromarray(np.array([values], dtype=kind)))
    assert np.asarray(image)[0, :, 1].tolist() == pytest.approx(expected, abs=1)


def test_non_finite_grey_values_raise():
    with pytest.raises(InputError, match="NaN or infinity"):
        as_rgb(Image.fromarray(np.array([[0, np.nan]], dtype=np.float32)))


def test_damaged_image_raises_load_error(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (99, 99, 3)).astype(np.uint8)
    Image.fromarray(noise).save(tmp_path / "x.png")
    (tmp_path / "y.png").write_bytes((tmp_path / "x.png").read_bytes()[:9000])
    with Image.open(tmp_path / "y.png") as opened:
        for source in (tmp_path / "y.png", opened):
            with pytest.raises(LoadError, match="damaged"):
                prepare(torch.nn.Linear(1, 1), source, lambda picture: torch.zeros(3, 9, 9))


def test_stored_orientation_is_kept_for_masks(tmp_path):
    path, _ = digit("turned", tmp_path)
    stored = open_picture(path, upright=False)
    assert notes(stored) == []
    assert as_rgb(stored) is stored
    assert np.array_equal(np.asarray(stored), np.asarray(Image.open(path)))


def test_string_is_a_text_and_path_is_read(tmp_path):
    sst2 = load("bundled:sst2")
    e = whyformer.explain(sst2.model, "saved as cat.png", processor=sst2.processor)
    assert e.texts == ["saved as cat.png"]
    (tmp_path / "review.txt").write_text("A charming film.\n")
    e = whyformer.explain(sst2.model, tmp_path / "review.txt", processor=sst2.processor)
    assert e.texts == ["A charming film."]


@pytest.mark.parametrize(("name", "match"), [("none.png", "no such file"), (Path("none.png"), "no such file"), (Path("x.csv"), "not a picture"), (Path("none.txt"), "no such file")])
def test_unusable_file_raises(name, match):
    digits = load("bundled:digits")
    with pytest.raises(whyformer.WhyformerError, match=match):
        whyformer.explain(digits.model, name, processor=digits.processor)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((800, 100), "the picture was squeezed: 800×100 pixels became 112×112, which distorts shapes 8.0:1"),
        ((100, 300), "the picture was squeezed: 100×300 pixels became 112×112, which distorts shapes 3.0:1"),
        ((1, 1), "a picture of 1×1 pixels was enlarged to 112×112: the model sees only a few flat areas"),
        ((112, 112), None),
        ((130, 112), None),
    ],
)
def test_distortion_and_enlargement_of_image_are_noted(size, message):
    import whyformer
    from whyformer import show

    e = whyformer.explain("bundled:digits", Image.new("RGB", size, (200, 90, 20)))
    assert e.diagnostics.get("input") == (None if message is None else [[message]])
    if message is not None:
        assert f"note: {message}" in str(e)
        assert f"note: {message}" in show.page(e)
        assert f"note: {message}" in show.fragment(e)
        assert f"note: {message}" in " ".join(t.get_text() for t in show.figure(e).texts).replace("\n", " ") or len(message) > 60


@pytest.mark.parametrize("function", [whyformer.explain, whyformer.compare])
@pytest.mark.parametrize("name", ["x.png", "clip.wav", "folder/photo.JPG"])
def test_name_of_a_file_is_no_text(function, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    explain = lambda inputs: function("bundled:sst2", inputs, "rollout" if function is whyformer.explain else ["rollout"])  # noqa: E731
    explain(name)  # there is no such file, so it is a text
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"content")
    for inputs in (name, ["a film", name]):
        with pytest.raises(InputError, match="this model does not read it"):
            explain(inputs)
    explain([f"{name} ", "a film"])
    explain(f"a film called {name}")


def test_name_of_a_folder_is_no_text_unless_it_is_a_word(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs" / "pages").mkdir(parents=True)
    for name in ("docs/pages", "docs/", str(tmp_path)):
        with pytest.raises(InputError, match="is a folder"):
            whyformer.explain("bundled:sst2", ["a film", name], "rollout")
        whyformer.explain("bundled:sst2", f"{name} ", "rollout")
    word = whyformer.explain("bundled:sst2", "docs", "rollout")
    (row,) = whyformer.explain_many("bundled:sst2", ["docs"], "rollout")
    assert torch.equal(row.scores[0], word.scores[0])
    with pytest.raises(InputError, match="is a folder"):
        whyformer.explain("bundled:digits", "docs", "rollout")

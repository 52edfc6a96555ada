"""Limits of the page's inputs and of the files that it may open, with attempts to evade them."""

import os

import pytest
from PIL import Image

from whyformer.apps.web.limits import Catalogue, PageLimits, hub_id, uploaded
from whyformer.errors import InputError, LoadError, WhyformerError


@pytest.fixture
def uploads(tmp_path):
    folder = tmp_path / "uploads"
    folder.mkdir()
    return folder


def picture(path, size=(40, 30), **options):
    Image.new("RGB", size, "navy").save(path, **options)
    return path


def test_picture_within_limits_is_read(uploads):
    assert PageLimits().picture(str(picture(uploads / "a.png")), uploads).size == (40, 30)


def test_too_many_pixels_raise_before_decoding(uploads, monkeypatch):
    path = picture(uploads / "large.png", (500, 400))
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    with pytest.raises(InputError, match="500 x 400 pixels"):
        PageLimits(pixels=150_000).picture(str(path), uploads)


def test_too_many_bytes_raise(uploads):
    path = uploads / "noise.bmp"
    Image.effect_noise((700, 700), 90).save(path)
    with pytest.raises(InputError, match="MB"):
        PageLimits(size=100_000).picture(str(path), uploads)


def test_error_names_file_without_folder(uploads):
    (uploads / "note.png").write_text("no picture")
    with pytest.raises(InputError, match=r"note\.png") as caught:
        PageLimits().picture(str(uploads / "note.png"), uploads)
    assert str(uploads) not in str(caught.value)


def test_picture_format_that_starts_other_programs_raises(uploads):
    (uploads / "drawing.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n")
    with pytest.raises(InputError, match="not a picture"):
        PageLimits().picture(str(uploads / "drawing.png"), uploads)


@pytest.mark.parametrize("text", ["", "  \n", None, 3, ["a"]])
def test_missing_text_raises(text):
    with pytest.raises(InputError, match="no text"):
        PageLimits().text(text)


def test_text_keeps_its_blanks_and_loses_line_breaks_at_its_end():
    assert PageLimits().text(" a\nfilm \r\n\n") == " a\nfilm "


def test_long_text_raises():
    with pytest.raises(InputError, match="101 characters; at most 100"):
        PageLimits(characters=100).text("a" * 101)


def test_only_uploads_are_opened(uploads, tmp_path):
    outside = picture(tmp_path / "secret.png")
    os.symlink(outside, uploads / "link.png")
    os.symlink(tmp_path, uploads / "folder")
    paths = ["/etc/passwd", outside, uploads / ".." / "secret.png", uploads / "link.png", uploads / "folder" / "secret.png", uploads, uploads / "none.png", "a\0b", None, 7, {"path": "x"}]
    for path in paths:
        with pytest.raises(InputError, match="was not uploaded"):
            uploaded(path, uploads)
    assert uploaded(str(picture(uploads / "mine.png")), uploads).name == "mine.png"


@pytest.mark.parametrize("name", ["owner/model", "gpt2", "facebook/deit-tiny-patch16-224", "a/b.c_d-e"])
def test_valid_hub_id_is_accepted(name):
    assert hub_id(name) == name


@pytest.mark.parametrize("name", ["../x", "a/../b", "/etc", "~/x", "a/b/c", "a b", "a/b\n", "https://a/b", "a//b", "./a", "a/.b", "-a/b", "a/b.git", "x" * 97, "", "a\\b", "a/b?x=1", "a/b@main", "ä/b"])
def test_invalid_hub_id_raises(name):
    with pytest.raises(InputError, match="no model id"):
        hub_id(name)


def test_hub_id_that_is_also_a_folder_raises(tmp_path, monkeypatch):
    (tmp_path / "owner" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="also a folder"):
        hub_id("owner/model")


# -- models --------------------------------------------------------------------------------------------------------
@pytest.fixture
def folders(tmp_path):
    for name in ("one", "two"):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "config.json").write_text("{}")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "config.json").write_text("{}")
    os.symlink(tmp_path / "elsewhere", tmp_path / "models" / "link")
    return tmp_path / "models"


def test_folders_are_offered_by_name_without_symlinks(folders):
    catalogue = Catalogue([folders])
    assert catalogue.names() == ["bundled:digits", "bundled:sst2", "bundled:reader", "folder:one", "folder:two"]
    assert catalogue.place("folder:one") == str(folders / "one")


def test_folders_of_same_name_are_numbered(folders, tmp_path):
    (tmp_path / "other" / "one").mkdir(parents=True)
    (tmp_path / "other" / "one" / "config.json").write_text("{}")
    catalogue = Catalogue([folders / "one", tmp_path / "other" / "one"])
    assert {catalogue.place("folder:one"), catalogue.place("folder:one#2")} == {str(folders / "one"), str(tmp_path / "other" / "one")}


@pytest.mark.parametrize("name", ["folder:link", "folder:../elsewhere", "bundled:../x", "bundled:none", "/etc", "..", "", None, 5])
def test_other_folder_raises(folders, name):
    with pytest.raises(WhyformerError):
        Catalogue([folders]).place(name)
    with pytest.raises(WhyformerError):
        Catalogue([folders]).place(str(folders / "one"))


def test_unoffered_model_without_hub_raises(folders):
    with pytest.raises(InputError, match="only the models it was started with"):
        Catalogue([folders], hub=False).place("owner/model")


def test_folder_without_model_raises(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(LoadError):
            Catalogue([folder])


def test_model_code_is_not_executed(tmp_path):
    # a config that refers to its own code, as some models on the hub do
    ran = tmp_path / "ran"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "evil", "auto_map": {"AutoConfig": "code.Evil", "AutoModelForSequenceClassification": "code.Evil"}, "architectures": ["Evil"]}')
    (tmp_path / "model" / "code.py").write_text(f"open({str(ran)!r}, 'w').write('x')\nclass Evil: pass\n")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    with pytest.raises(LoadError):
        Catalogue([tmp_path / "model"]).load("folder:model")
    assert not ran.exists()

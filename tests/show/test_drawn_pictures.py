import io
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from show.builders import ATTACK, picture, sentence
from whyformer.errors import InputError
from whyformer.show import Look, bars, colours, encode, figure, files, html, overlay, summary


def test_most_colourful_pixel_of_overlay_is_in_patch_of_highest_score():
    e = picture(grid=(4, 6), size=(32, 48))
    drawn = overlay(e).astype(float)
    colourfulness = drawn.max(-1) - drawn.min(-1)
    row, column = np.unravel_index(colourfulness.argmax(), colourfulness.shape)
    height, width = colourfulness.shape
    assert (int(row * 4 / height), int(column * 6 / width)) == (1, 4)


@pytest.mark.parametrize(("size", "grid"), [((32, 48), (4, 6)), ((48, 32), (6, 4)), ((16, 160), (2, 20)), ((224, 224), (14, 14))])
def test_overlay_keeps_aspect_ratio(size, grid):
    height, width, _ = overlay(picture(torch.rand(grid), grid=grid, size=size)).shape
    assert height * size[1] == width * size[0]
    assert min(height, width) >= 224


def test_samples_of_a_batch_are_drawn_as_alone():
    maps = torch.rand(3, 24)
    pictures = torch.randint(0, 255, (3, 32, 48, 3), dtype=torch.uint8)
    singles = [picture(scores, pictures=pictures[i : i + 1]) for i, scores in enumerate(maps)]
    e = replace(singles[0], scores=maps, logits=singles[0].logits.expand(3, -1), target=torch.tensor([1, 1, 1]), target_names=["dog"] * 3)
    e = e.with_features(pictures=pictures)
    for i in (0, 1, 2, -1):
        assert np.array_equal(overlay(e, i), overlay(singles[i]))
    with pytest.raises(IndexError, match="out of range"):
        overlay(e, 3)


def test_zero_opacity_gives_grey_picture():
    drawn = overlay(picture(), opacity=0)
    assert (drawn == drawn[..., :1]).all()


def test_zero_scores_give_grey_picture():
    drawn = overlay(picture(torch.zeros(4, 6)))
    assert (drawn == drawn[..., :1]).all()


def test_full_opacity_without_fading_gives_colour_map():
    e = picture(torch.ones(4, 6))
    drawn = overlay(e, opacity=1, fade=False, cmap="jet")
    assert np.abs(drawn[0, 0] / 255 - colours.lookup("jet")[-1]).max() < 0.01


def test_positive_scores_are_orange_and_negative_blue():
    scores = torch.zeros(4, 6)
    scores[:, :3], scores[:, 3:] = 1, -1
    drawn = overlay(picture(scores)).astype(int)
    assert (drawn[:, 5, 0] > drawn[:, 5, 2]).all()
    assert (drawn[:, -5, 2] > drawn[:, -5, 0]).all()


def test_drawing_does_not_change_scores():
    e = picture(torch.randn(4, 6))
    before = e.scores.clone()
    encode(figure(e))
    assert torch.equal(e.scores, before)


@pytest.mark.parametrize("opacity", [-0.1, 1.5])
def test_opacity_out_of_range_raises(opacity):
    with pytest.raises(InputError, match="opacity must be between 0 and 1"):
        overlay(picture(), opacity=opacity)


@pytest.mark.parametrize(("options", "message"), [
    ({"contours": 10}, "contours must be"), ({"contours": 1.5}, "contours must be"), ({"keep": 0}, "keep must be"), ({"above": 1.1}, "above must be"),
    ({"opacity": "x"}, "opacity must be"), ({"opacity": None}, "opacity must be"), ({"keep": True}, "keep must be"), ({"smooth": "a"}, "smooth must be"),
    ({"keep": 0.5, "above": 0.5}, "exclude each other"), ({"alpha": 1}, "no option 'alpha'; its options: opacity, cmap"),
])  # fmt: skip
def test_invalid_style_raises(options, message):
    for draw in (overlay, figure, lambda e, **o: e and html.fragment(e, **o), lambda e, **o: html.page(e, **o), lambda e, **o: e.plot(**o), lambda e, **o: sentence().plot(**o)):
        with pytest.raises(InputError, match=message):
            draw(picture(), **options)


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_invalid_counts_raise(count):
    for draw in (lambda: overlay(picture(), longest=count), lambda: sentence().plot(k=count), lambda: bars(picture(), count), lambda: summary(sentence(), count)):
        with pytest.raises(InputError, match="must be an integer of at least 1"):
            draw()


@pytest.mark.parametrize("letter", ["a", "é", "字", "𠀀"])
def test_file_names_of_any_letters_can_be_written(tmp_path, letter):
    names = [f"{files.slug(letter * n, 'method', letter * 200)}.safetensors" for n in (1, 40)]
    assert files.write_all(tmp_path, dict.fromkeys(names, b"x")) == [tmp_path / name for name in names]
    assert all(letter in name for name in names)


def test_keep_shows_highest_scores_unchanged():
    """The given share of the picture keeps its colours; the rest is dark and grey."""
    red = torch.zeros(1, 64, 64, 3, dtype=torch.uint8)
    red[..., 0] = 220
    e = picture(torch.arange(64.0).reshape(8, 8), grid=(8, 8), size=(64, 64), pictures=red)
    for share in (0.1, 0.25, 0.6):
        drawn = overlay(e, keep=share).astype(int)
        unchanged = (drawn == [220, 0, 0]).all(-1)
        assert abs(unchanged.mean() - share) < 0.03
        assert unchanged[-1, -1] and not unchanged[0].any()
        assert drawn[0, :, 0].max() < 80
    half = overlay(e, above=0.5).astype(int)
    assert abs((half == [220, 0, 0]).all(-1).mean() - 0.5) < 0.05


def test_masked_view_hides_negative_scores():
    scores = torch.zeros(4, 6)
    scores[:, :3], scores[0, 5] = -5, 1
    bright = torch.full((1, 32, 48, 3), 200, dtype=torch.uint8)
    for options in ({"keep": 1.0}, {"keep": 0.9}, {"above": 0.01}):
        drawn = overlay(picture(scores, pictures=bright), **options)
        shown = (drawn == 200).all(-1)
        assert shown.any()
        assert not shown[:, : shown.shape[1] // 2].any()


def test_contours_are_at_level_of_map():
    e = picture(torch.linspace(0, 1, 8).repeat(8, 1), grid=(8, 8), size=(64, 64), pictures=torch.full((1, 64, 64, 3), 128, dtype=torch.uint8))
    drawn = overlay(e, contours=1, opacity=0)
    light = np.argwhere((drawn > 200).all(-1).all(0)).ravel()
    # half of the largest score is in the middle, for any enlargement
    assert abs((light.mean() + 0.5) / drawn.shape[1] - 0.5) < 0.01
    assert 1 <= len(light) <= 4
    assert (drawn < 60).all(-1).all(0).any()  # the dark rim
    lines = (overlay(e, contours=3, opacity=0) > 200).all(-1).all(0).astype(int)
    assert (np.diff(lines) == 1).sum() == 3


@pytest.mark.parametrize("options", [{}, {"contours": 3}, {"keep": 0.2}, {"above": 0.5, "cmap": "jet"}])
def test_painting_in_strips_gives_same_picture(options, monkeypatch):
    from whyformer.explanation.geometry import Geometry
    from whyformer.show import painting

    original = Image.fromarray(torch.randint(0, 255, (300, 420, 3), dtype=torch.uint8).numpy())
    for e in (picture(torch.rand(4, 6)), picture(torch.randn(4, 6), originals=[original], geometry=[Geometry((300, 420), (60.0, 0.0, 360.0, 300.0))])):
        expected = overlay(e, **options)
        monkeypatch.setattr(painting, "_AT_ONCE", 7 * expected.shape[1])
        assert np.array_equal(overlay(e, **options), expected)
        monkeypatch.undo()


def test_signed_maps_have_contours_of_both_signs():
    e = picture(torch.linspace(-1, 1, 8).repeat(8, 1), grid=(8, 8), size=(64, 64), pictures=torch.full((1, 64, 64, 3), 128, dtype=torch.uint8))
    lines = (overlay(e, contours=1, opacity=0) > 200).all(-1).all(0).astype(int)
    assert (np.diff(lines) == 1).sum() == 2


def test_masked_view_has_note():
    assert "the 20 % with the highest scores" in html.page(picture(), keep=0.2)
    assert any("20 %" in t.get_text() for axes in figure(picture(), keep=0.2).axes for t in axes.texts)
    assert Look(above=0.5).note == "at least 0.5 of the highest score"


def test_colour_map_is_used_by_picture_and_bar():
    plain, changed = html.page(picture()), html.page(picture(), cmap="viridis")
    assert "#440154" in changed and "#440154" not in plain


@pytest.mark.parametrize("size", [(3, 2), (1, 1), (1, 400), (2000, 3), (5000, 40)])
def test_pictures_of_any_size_can_be_drawn(size):
    e = picture(torch.rand(4, 6), size=size, pictures=torch.randint(0, 255, (1, *size, 3), dtype=torch.uint8))
    for options in ({}, {"contours": 2}, {"keep": 0.3}):
        drawn = overlay(e, **options)
        assert drawn.shape[0] * size[1] == drawn.shape[1] * size[0]
        assert max(drawn.shape) <= max(4096, *size)
    assert max(overlay(e, longest=300).shape) <= 300


@pytest.mark.parametrize("e", [picture(), picture(pictures=None), picture(pictures=None, image_size=None), sentence(), picture(torch.rand(8, 8), level="pixel", size=(8, 8))])
@pytest.mark.parametrize(("kind", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_formats_have_signature_and_are_deterministic(e, kind, magic):
    first = encode(figure(e), kind)
    assert first.startswith(magic)
    assert encode(figure(e), kind) == first


def test_unknown_format_raises():
    with pytest.raises(InputError, match="png, svg, pdf"):
        encode(figure(picture()), "bmp")


def test_patches_without_grid_raise():
    with pytest.raises(InputError, match="no grid"):
        figure(picture(grid=None))


def test_figure_has_a_cell_for_each_method_and_class():
    several = [picture(method=m, target=t) for m in ("gae", "lrp", "rollout") for t in (0, 1)]
    drawing = figure(several)
    bars = [axes for axes in drawing.axes if len(axes.get_yticks())and axes.axison]
    assert len(bars) == 3  # one per method
    titles = [t.get_text() for t in drawing.texts]
    assert titles.count("Why “cat”? 7.5 %") == 1
    assert [t for t in titles if t in ("gae", "lrp", "rollout")] == ["gae", "lrp", "rollout"]
    assert titles.count("Input") == 1
    assert {"90.9 %", "7.5 %", "1.7 %"} <= set(titles)  # the probabilities are below the picture


def test_several_pictures_are_in_separate_rows():
    black = picture(pictures=torch.zeros(1, 32, 48, 3, dtype=torch.uint8))
    drawing = figure([picture(), black])
    assert sum(1 for axes in drawing.axes if axes.images and not axes.axison) == 4


def test_pictures_of_different_shape_in_one_figure():
    wide = picture(torch.rand(2, 8), grid=(2, 8), size=(16, 64))
    tall = picture(torch.rand(8, 2), grid=(8, 2), size=(64, 16))
    assert Image.open(io.BytesIO(encode(figure([wide, tall])))).width > 100


def test_input_is_escaped_in_svg():
    labels = {0: ATTACK, 1: ATTACK + "--><script>", 2: "x"}
    for e in (picture(labels=labels, method=ATTACK), sentence(ATTACK, labels=labels, method=ATTACK)):
        source = encode(figure(e), "svg").decode()
        assert "<script" not in source
        from xml.etree import ElementTree

        tags = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(source).iter() if isinstance(element.tag, str)}
        assert "script" not in tags


@pytest.mark.parametrize("text", ["这部电影", "שלום עולם", "$x$ \\alpha", "😀 \u200b", "x" * 500, "\x1b[31m"])
def test_any_text_can_be_drawn(text):
    assert encode(figure(sentence(f"{text} end", labels={0: text, 1: text})))


@pytest.mark.parametrize("make", [sentence, picture])
def test_warnings_of_run_are_below_figure(make):
    without, with_warning = make(), make(diagnostics={"warnings": [["the map is constant, " * 30]]})
    drawing = figure(with_warning)
    warnings = [t for t in drawing.texts if "the map is constant" in t.get_text()]
    assert len(warnings) > 1
    plain = figure(without)
    assert drawing.get_figheight() > plain.get_figheight()
    assert min(t.get_position()[1] for t in warnings) > 0
    # the other texts are unchanged
    notes = [t for t in drawing.texts if t.get_color() == warnings[0].get_color()]
    assert [t.get_text() for t in drawing.texts if t not in notes] == [t.get_text() for t in plain.texts]
    edge = max(t.get_position()[1] for t in warnings)
    assert all(axes.get_position().y0 > edge for axes in drawing.axes)


@pytest.fixture
def speckled():
    """A pixel map of signed noise, with a positive mean in the upper left quarter."""
    noise = torch.randn(128, 128, generator=torch.Generator().manual_seed(0))
    noise[:64, :64] += 0.5
    return picture(noise, grid=None, size=(128, 128), level="pixel", diagnostics={"signed": True})


def orange_shares(drawn):
    """The share of pixels in each quarter that are more orange than blue."""
    warm = drawn[..., 0].astype(int) > drawn[..., 2]
    half = len(warm) // 2
    return {(i, j): warm[i * half : (i + 1) * half, j * half : (j + 1) * half].mean() for i in (0, 1) for j in (0, 1)}


def test_signed_pixel_map_is_smoothed_by_default(speckled):
    before = speckled.scores.clone()
    smooth, raw = orange_shares(overlay(speckled)), orange_shares(overlay(speckled, smooth=0))
    assert smooth[0, 0] > 0.95 > 0.8 > raw[0, 0]  # σ = 2 pixels: the noise is averaged over about 25 pixels
    assert all(0.3 < smooth[quarter] < 0.7 for quarter in smooth if quarter != (0, 0))
    assert torch.equal(speckled.scores, before)


def test_smoothing_is_stated(speckled):
    assert "smoothed here (σ 2)" in html.page(speckled)
    assert "smoothed here (σ 5)" in html.fragment(speckled, smooth=5)
    assert "smoothed" not in html.page(speckled, smooth=0)
    assert encode(figure(speckled)) != encode(figure(speckled, smooth=0))
    styles = re.findall(r'<p ([^>]*)>note: [^<]*smoothed', html.fragment(speckled) + html.page(speckled))
    assert len(styles) == 2 and not any(colours.WARN in style or "note" in style for style in styles)  # it is no warning


def test_only_large_signed_pixel_maps_are_smoothed(speckled):
    unsigned = picture(speckled.scores[0].abs(), grid=None, size=(128, 128), level="pixel")
    patches, small = picture(torch.randn(4, 6)), picture(torch.randn(28, 28), grid=None, size=(28, 28), level="pixel")
    for e in (unsigned, patches, small):
        assert (overlay(e) == overlay(e, smooth=0)).all()


@pytest.mark.parametrize("smooth", [-1, float("nan"), 1e6])
def test_smooth_out_of_range_raises(speckled, smooth):
    with pytest.raises(InputError, match="smooth must be a number of pixels from 0"):
        overlay(speckled, smooth=smooth)

import numpy as np
import pytest
import torch

from show.builders import picture
from whyformer.errors import InputError
from whyformer.show import colours, html, overlay, panels

GREYS = (0.05, 0.3, 0.6, 0.95)
COLOUR_VISION = {
    "all": np.eye(3),
    # Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB
    "protan": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    "deutan": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
    "tritan": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]),
}

CONES = np.array([
    [0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
])
LAB = np.array([
    [0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.8086757660],
])


def linear(srgb):
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def oklab(srgb):
    """Lightness and two colour axes (B. Ottosson, 2020)."""
    return np.cbrt(linear(srgb) @ CONES.T) @ LAB.T


def contrast(a, b, vision="all"):
    """The distance of two colours in OKLab × 100, for the given colour vision."""
    linear_rgb = [np.clip(linear(np.asarray(c)) @ COLOUR_VISION[vision].T, 0, 1) for c in (a, b)]
    first, second = (oklab(np.where(c <= 0.0031308, 12.92 * c, 1.055 * c ** (1 / 2.4) - 0.055)) for c in linear_rgb)
    return 100 * float(np.linalg.norm(first - second))


def drawn_colour(grey, score, signed, full=1.0):
    """The colour of a score on a uniformly grey picture in which another patch has the score ``full``."""
    scores = torch.full((4, 6), float(score))
    scores[0, 0] = full
    pictures = torch.full((1, 32, 48, 3), round(255 * grey), dtype=torch.uint8)
    e = picture(scores, pictures=pictures, diagnostics={"signed": signed})
    return overlay(e)[-5, -5] / 255


def test_scale_of_non_negative_scores_is_zero_to_maximum():
    scale = colours.scale(np.array([0.0, 1.0, 4.0]))
    assert (scale.limit, scale.signed, scale.note) == (4.0, False, None)
    assert scale.unit(np.array([0.0, 1.0, 4.0])).tolist() == [0.0, 0.25, 1.0]


def test_scale_of_signed_scores_is_symmetric():
    scale = colours.scale(np.array([-1.0, 0.0, 4.0]))
    assert scale.signed
    assert scale.unit(np.array([-1.0, 0.0, 4.0])).tolist() == [-0.25, 0.0, 1.0]
    middle = colours.paint(np.array(0.0), signed=True)
    assert np.allclose(middle, 1, atol=0.02)


def test_rounding_noise_below_zero_does_not_make_a_map_signed():
    assert not colours.scale(np.array([-1e-9, 1.0])).signed


@pytest.mark.parametrize("scores", [np.zeros(5), np.zeros((0,)), np.zeros((3, 4))])
def test_zero_scores_have_note(scores):
    scale = colours.scale(scores)
    assert scale.note == "all scores are 0"
    assert not scale.unit(scores).any()


@pytest.mark.parametrize("value", [1.0, -3.0, 1e-320, 1e308])
def test_constant_maps_do_not_divide_by_zero(value):
    scores = np.full(4, value)
    with np.errstate(all="raise"):
        unit = colours.scale(scores).unit(scores)
    assert np.allclose(unit, np.sign(value))


def test_scale_of_pixel_map_is_clipped_at_quantile_and_marked():
    scores = np.zeros((20, 20))
    scores[0, :10] = np.arange(1, 11)
    scale = colours.scale_of(picture(scores, level="pixel", size=(20, 20)))
    assert scale.clipped
    assert scale.limit < 10
    assert scale.ends[1].startswith("≥")


def test_scale_of_pixel_map_with_single_score_is_not_clipped():
    scores = np.zeros((20, 20))
    scores[3, 3] = 7
    scale = colours.scale_of(picture(scores, level="pixel", size=(20, 20)))
    assert (scale.limit, scale.clipped) == (7.0, False)


def test_default_colour_maps_have_uniform_lightness_steps():
    """Perceptually uniform: no step in OKLab lightness is much larger than the average one."""
    for amounts in (colours.lookup("inferno"), colours.mix(colours.POSITIVE, np.linspace(0, 1, 64))):
        lightness = oklab(amounts)[:, 0]
        steps = np.abs(np.diff(lightness))
        assert steps.max() < 3 * steps.mean()


def test_ends_of_diverging_colour_map_differ_for_colour_blind():
    """Protanopia and deuteranopia confuse red and green; blue and orange also differ in the blue-yellow axis."""
    ends = oklab(np.array([colours.POSITIVE, colours.NEGATIVE]) / 255)
    assert abs(ends[0, 2] - ends[1, 2]) > 0.2


@pytest.mark.parametrize(("sign", "signed"), [(1, True), (-1, True), (1, False)])
@pytest.mark.parametrize("vision", COLOUR_VISION)
def test_scores_are_visible_on_any_grey(sign, signed, vision):
    """Half of the largest score differs from the background by 18 (17.5 with a colour deficiency), a higher score by more."""
    for grey in GREYS:
        background = drawn_colour(grey, 0, signed)
        assert (background == background[0]).all()  # a score of 0 is transparent
        steps = [contrast(drawn_colour(grey, sign * u, signed), background, vision) for u in (0.1, 0.25, 0.5, 0.75, 1)]
        assert steps == sorted(steps)
        assert steps[2] >= (18 if vision == "all" else 17.5), (grey, steps)


def test_picture_is_visible_below_strongest_colours():
    """Light and dark parts of the picture differ below the highest scores."""
    e = picture(torch.ones(4, 6), diagnostics={"signed": True})
    light, dark = overlay(e)[-3, -3] / 255, overlay(e)[2, 2] / 255
    assert contrast(light, dark) > 15


def test_single_large_score_does_not_set_scale():
    scores = torch.ones(14, 14)
    scores[3, 3] = 50
    e = picture(scores, grid=(14, 14), size=(56, 56), diagnostics={"signed": True})
    assert colours.scale_of(e).limit == 1
    assert colours.scale_of(e).ends[1] == "≥1"


def test_largest_score_is_stated_if_scale_is_clipped():
    scores = torch.ones(14, 14)
    scores[3, 3] = -50
    e = picture(scores, grid=(14, 14), size=(56, 56), diagnostics={"signed": True})
    assert any(text.get_text().endswith("max 50") for text in panels([e]).texts)


@pytest.mark.parametrize("signed", [True, False])
def test_named_default_colour_map_equals_default(signed):
    e = picture(torch.rand(4, 6), diagnostics={"signed": signed})
    name = colours.DIVERGING if signed else colours.SEQUENTIAL
    assert np.array_equal(overlay(e), overlay(e, cmap=name))


@pytest.mark.parametrize("dark", [False, True])
def test_text_has_wcag_contrast_on_page_background(dark):
    """At least 4.5 to 1, as WCAG 2 requires."""

    def luminance(code):
        rgb = np.array([int(code[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        return float(linear(rgb) @ [0.2126, 0.7152, 0.0722])

    tones = {name: luminance(pair[dark]) for name, pair in colours.TONES.items()}
    for text in ("ink", "soft", "link", "accent", "warn", "error"):
        for background in ("paper", "sheet"):
            low, high = sorted((tones[text], tones[background]))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (text, background)


@pytest.mark.parametrize("sheet", ["claims.css", "web/page.css"])
def test_style_sheets_use_colours_of_claims(sheet):
    css = html.asset(sheet)
    for claim in colours.HUES.values():
        assert "{} {} {}".format(*claim.light) in css
        assert "{} {} {}".format(*claim.dark) in css


def test_unknown_colour_map_raises():
    with pytest.raises(InputError, match="unknown colour map 'nope'"):
        colours.paint(np.array([0.5]), signed=False, cmap="nope")

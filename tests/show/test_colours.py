import numpy as np
import pytest
import torch

from show.builders import picture
from whyformer.errors import InputError
from whyformer.show import colours, html, overlay, panels

GREYS = (0.05, 0.3, 0.6, 0.95)
SEEN_BY = {
    "all": np.eye(3),
    # Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB
    "protan": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    "deutan": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
    "tritan": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]),
}


def linear(srgb):
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def contrast(a, b, seen_by="all"):
    """The distance of two colours in OKLab × 100, as these people see them."""
    back = [np.clip(linear(np.asarray(c)) @ SEEN_BY[seen_by].T, 0, 1) for c in (a, b)]
    one, other = (colours._to_oklab(np.where(c <= 0.0031308, 12.92 * c, 1.055 * c ** (1 / 2.4) - 0.055)) for c in back)
    return 100 * float(np.linalg.norm(one - other))


def drawn(grey, score, signed, full=1.0):
    """The colour of a score on a picture of one grey, where another patch has the full score."""
    scores = torch.full((4, 6), float(score))
    scores[0, 0] = full
    grounds = torch.full((1, 32, 48, 3), round(255 * grey), dtype=torch.uint8)
    e = picture(scores, pictures=grounds, diagnostics={"signed": signed})
    return overlay(e)[-5, -5] / 255


def test_non_negative_scores_run_from_zero_to_their_maximum():
    scale = colours.scale(np.array([0.0, 1.0, 4.0]))
    assert (scale.limit, scale.signed, scale.note) == (4.0, False, None)
    assert scale.unit(np.array([0.0, 1.0, 4.0])).tolist() == [0.0, 0.25, 1.0]


def test_signed_scores_have_zero_in_the_middle():
    scale = colours.scale(np.array([-1.0, 0.0, 4.0]))
    assert scale.signed
    assert scale.unit(np.array([-1.0, 0.0, 4.0])).tolist() == [-0.25, 0.0, 1.0]
    middle = colours.paint(np.array(0.0), signed=True)
    assert np.allclose(middle, 1, atol=0.02)


def test_rounding_noise_below_zero_does_not_make_a_map_signed():
    assert not colours.scale(np.array([-1e-9, 1.0])).signed


@pytest.mark.parametrize("scores", [np.zeros(5), np.zeros((0,)), np.zeros((3, 4))])
def test_all_zero_is_nothing_with_a_note(scores):
    scale = colours.scale(scores)
    assert scale.note == "all scores are 0"
    assert not scale.unit(scores).any()


@pytest.mark.parametrize("value", [1.0, -3.0, 1e-320, 1e308])
def test_constant_maps_never_divide_by_zero(value):
    scores = np.full(4, value)
    with np.errstate(all="raise"):
        unit = colours.scale(scores).unit(scores)
    assert np.allclose(unit, np.sign(value))


def test_pixel_maps_stop_at_a_quantile_and_say_so():
    scores = np.zeros((20, 20))
    scores[0, :10] = np.arange(1, 11)
    scale = colours.scale_of(picture(scores, level="pixel", size=(20, 20)))
    assert scale.clipped
    assert scale.limit < 10
    assert scale.ends[1].startswith("≥")


def test_a_pixel_map_with_a_single_dot_is_drawn_in_full():
    scores = np.zeros((20, 20))
    scores[3, 3] = 7
    scale = colours.scale_of(picture(scores, level="pixel", size=(20, 20)))
    assert (scale.limit, scale.clipped) == (7.0, False)


def test_default_maps_change_lightness_evenly():
    """Perceptually uniform: no step in OKLab lightness is much larger than the average one."""
    for amounts in (colours.lookup("inferno"), colours.mix(colours.POSITIVE, np.linspace(0, 1, 64))):
        lightness = colours._to_oklab(amounts)[:, 0]
        steps = np.abs(np.diff(lightness))
        assert steps.max() < 3 * steps.mean()


def test_both_ends_of_the_diverging_map_differ_for_the_colour_blind():
    """Under protanopia and deuteranopia red and green fall together; blue and orange differ in the blue axis too."""
    ends = colours._to_oklab(np.array([colours.POSITIVE, colours.NEGATIVE]) / 255)
    assert abs(ends[0, 2] - ends[1, 2]) > 0.2


@pytest.mark.parametrize(("sign", "signed"), [(1, True), (-1, True), (1, False)])
@pytest.mark.parametrize("seen_by", SEEN_BY)
def test_a_map_is_seen_equally_well_on_every_picture(sign, signed, seen_by):
    """Half of the largest score differs from the ground by 18 (17.5 with a colour deficiency), a higher score by more."""
    for grey in GREYS:
        ground = drawn(grey, 0, signed)
        assert (ground == ground[0]).all()  # 0 leaves no veil
        steps = [contrast(drawn(grey, sign * u, signed), ground, seen_by) for u in (0.1, 0.25, 0.5, 0.75, 1)]
        assert steps == sorted(steps)
        assert steps[2] >= (18 if seen_by == "all" else 17.5), (grey, steps)


def test_what_is_below_the_strongest_colours_can_still_be_told_apart():
    """The outlines of a picture show through its highest scores."""
    e = picture(torch.ones(4, 6), diagnostics={"signed": True})
    light, dark = overlay(e)[-3, -3] / 255, overlay(e)[2, 2] / 255
    assert contrast(light, dark) > 15


def test_one_patch_among_hundreds_does_not_hide_all_others():
    scores = torch.ones(14, 14)
    scores[3, 3] = 50
    e = picture(scores, grid=(14, 14), size=(56, 56), diagnostics={"signed": True})
    assert colours.scale_of(e).limit == 1
    assert colours.scale_of(e).ends[1] == "≥1"


def test_the_largest_score_is_named_though_the_scale_ends_before_it():
    scores = torch.ones(14, 14)
    scores[3, 3] = -50
    e = picture(scores, grid=(14, 14), size=(56, 56), diagnostics={"signed": True})
    assert any(text.get_text().endswith("max 50") for text in panels([e]).texts)


@pytest.mark.parametrize("signed", [True, False])
def test_the_default_map_by_its_name_is_the_default(signed):
    e = picture(torch.rand(4, 6), diagnostics={"signed": signed})
    name = colours.DIVERGING if signed else colours.SEQUENTIAL
    assert np.array_equal(overlay(e), overlay(e, cmap=name))


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read_on_the_ground_of_pages(dark):
    """At least 4.5 to 1, as WCAG 2 has it."""

    def luminance(code):
        rgb = np.array([int(code[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        return float(linear(rgb) @ [0.2126, 0.7152, 0.0722])

    tones = {name: luminance(pair[dark]) for name, pair in colours.TONES.items()}
    for text in ("ink", "soft", "link", "accent", "warn", "error"):
        for ground in ("paper", "sheet"):
            low, high = sorted((tones[text], tones[ground]))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (text, ground)


@pytest.mark.parametrize("sheet", ["claims.css", "web/page.css"])
def test_pages_take_their_colours_from_the_table(sheet):
    found = html.asset(sheet)
    for claim in colours.HUES.values():
        assert "{} {} {}".format(*claim.light) in found
        assert "{} {} {}".format(*claim.dark) in found


def test_unknown_map_is_refused():
    with pytest.raises(InputError, match="unknown colour map 'nope'"):
        colours.paint(np.array([0.5]), signed=False, cmap="nope")

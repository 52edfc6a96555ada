import numpy as np
import pytest

from show.made import picture
from whyformer.errors import InputError
from whyformer.show import colours


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


def test_unknown_map_is_refused():
    with pytest.raises(InputError, match="unknown colour map 'nope'"):
        colours.paint(np.array([0.5]), signed=False, cmap="nope")

"""The strip shows what the perturbation metrics feed, and says what they measure."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import whyformer
from whyformer.errors import InputError
from whyformer.evaluation.strip import perturbation_strip
from whyformer.models.loading import load
from whyformer.show import encode, strip


@pytest.fixture(scope="module")
def digits():
    return load("bundled:digits")


@pytest.fixture(scope="module")
def scene():
    return Image.open(Path(__file__).parents[2] / "examples" / "pictures" / "digits_37.png").convert("RGB")


@pytest.fixture(scope="module")
def why(digits, scene):
    return whyformer.explain(digits.model, scene, processor=digits.processor, target="3")


@pytest.mark.parametrize("baseline", ["black", "zero", "mean", "blur"])
def test_it_agrees_with_the_metric_and_shows_what_is_fed(digits, scene, why, baseline):
    made = perturbation_strip(digits.model, scene, why, digits.processor, baseline=baseline)
    assert made.fractions == (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    assert made.pictures.shape == (2, 10, 112, 112, 3)
    wanted = whyformer.evaluate(digits.model, scene, why, "aopc", digits.processor, baseline=baseline).value
    assert made.probabilities[0, 0] - made.probabilities[0, 1:].mean() == pytest.approx(wanted, abs=1e-6)
    assert np.allclose(made.probabilities[:, 0], float(why.probabilities()[0, 3]), atol=1e-5)
    # the pictures go through the processor once more (they are of its size), and give the same probabilities
    for row in range(2):
        again = [whyformer.explain(digits.model, Image.fromarray(p), "raw_attention", 3, digits.processor) for p in made.pictures[row, [0, 3, 8]]]
        assert np.allclose([float(e.probabilities()[0, 3]) for e in again], made.probabilities[row, [0, 3, 8]], atol=0.02)
        assert [e.top(k=1)[0][1] for e in again] == [made.predicted[row][i] for i in (0, 3, 8)]


def test_what_goes_first(digits, scene, why):
    made = perturbation_strip(digits.model, scene, why, digits.processor, fractions=(0.25, 0.75))
    clean = made.pictures[0, 0]
    black = [(made.pictures[row, 1] == 0).all(-1) & (clean != 0).any(-1) for row in range(2)]
    scores = why.heatmap()[0].numpy()
    assert scores[black[0]].mean() > scores.mean() > scores[black[1]].mean()
    assert abs(black[0].mean() - 0.25) < 0.05
    assert not (black[0] & black[1]).any()
    kept = ~(made.pictures[0, 1] == 0).all(-1)
    assert (made.pictures[0, 1][kept] == clean[kept]).all()


def test_what_cannot_be_shown(digits, scene, why):
    text = whyformer.explain("bundled:sst2", "A charming film.")
    with pytest.raises(InputError, match="only pictures"):
        perturbation_strip("bundled:sst2", "A charming film.", text)
    with pytest.raises(InputError, match="baseline must be one of zero, black, mean, blur"):
        perturbation_strip(digits.model, scene, why, digits.processor, baseline="white")
    for fractions in ((), (0.5, 0.2), (0.0, 0.5), (0.5, 1.5)):
        with pytest.raises(InputError, match="fractions must increase"):
            perturbation_strip(digits.model, scene, why, digits.processor, fractions=fractions)


def test_it_is_drawn_with_each_probability(digits, scene, why):
    made = perturbation_strip(digits.model, scene, why, digits.processor)
    drawing = strip(made)
    assert sum(bool(axes.images) for axes in drawing.axes) == 20
    texts = [t.get_text() for t in drawing.texts]
    assert [t for t in texts if t.endswith("removed")] == [f"{n} % removed" for n in range(10, 100, 10)]
    assert [t for t in texts if t.endswith("%") and "." in t] == [f"{100 * p:.1f}%" for p in made.probabilities.ravel()]
    for kind in ("png", "svg", "pdf"):
        assert encode(drawing, kind)


def test_the_strip_of_auto_names_the_method_that_was_chosen(digits, scene):
    chosen = whyformer.explain(digits.model, scene, "auto", processor=digits.processor)
    made = perturbation_strip(digits.model, scene, chosen, digits.processor)
    assert made.method == chosen.diagnostics["auto"]["method"] != "auto"

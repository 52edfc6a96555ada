"""The perturbation strip shows the perturbed images of the metrics and their probabilities."""

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
def explanation(digits, scene):
    return whyformer.explain(digits.model, scene, processor=digits.processor, target="3")


@pytest.mark.parametrize("baseline", ["black", "zero", "mean", "blur"])
def test_strip_agrees_with_aopc_and_shows_the_model_inputs(digits, scene, explanation, baseline):
    strip_data = perturbation_strip(digits.model, scene, explanation, digits.processor, baseline=baseline)
    assert strip_data.fractions == (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    assert strip_data.pictures.shape == (2, 10, 112, 112, 3)
    expected = whyformer.evaluate(digits.model, scene, explanation, "aopc", digits.processor, baseline=baseline).value
    assert strip_data.probabilities[0, 0] - strip_data.probabilities[0, 1:].mean() == pytest.approx(expected, abs=1e-6)
    assert np.allclose(strip_data.probabilities[:, 0], float(explanation.probabilities()[0, 3]), atol=1e-5)
    # the images, which have the size of the processor, give the same probabilities when they are explained
    for row in range(2):
        repeated = [whyformer.explain(digits.model, Image.fromarray(p), "raw_attention", 3, digits.processor) for p in strip_data.pictures[row, [0, 3, 8]]]
        assert np.allclose([float(e.probabilities()[0, 3]) for e in repeated], strip_data.probabilities[row, [0, 3, 8]], atol=0.02)
        assert [e.top(k=1)[0][1] for e in repeated] == [strip_data.predicted[row][i] for i in (0, 3, 8)]


def test_rows_remove_highest_and_lowest_scores_first(digits, scene, explanation):
    strip_data = perturbation_strip(digits.model, scene, explanation, digits.processor, fractions=(0.25, 0.75))
    clean = strip_data.pictures[0, 0]
    black = [(strip_data.pictures[row, 1] == 0).all(-1) & (clean != 0).any(-1) for row in range(2)]
    scores = explanation.heatmap()[0].numpy()
    assert scores[black[0]].mean() > scores.mean() > scores[black[1]].mean()
    assert abs(black[0].mean() - 0.25) < 0.05
    assert not (black[0] & black[1]).any()
    unchanged = ~(strip_data.pictures[0, 1] == 0).all(-1)
    assert (strip_data.pictures[0, 1][unchanged] == clean[unchanged]).all()


def test_invalid_strip_arguments_raise(digits, scene, explanation):
    text = whyformer.explain("bundled:sst2", "A charming film.")
    with pytest.raises(InputError, match="only pictures"):
        perturbation_strip("bundled:sst2", "A charming film.", text)
    with pytest.raises(InputError, match="baseline must be one of zero, black, mean, blur"):
        perturbation_strip(digits.model, scene, explanation, digits.processor, baseline="white")
    for fractions in ((), (0.5, 0.2), (0.0, 0.5), (0.5, 1.5)):
        with pytest.raises(InputError, match="fractions must increase"):
            perturbation_strip(digits.model, scene, explanation, digits.processor, fractions=fractions)


def test_drawing_shows_each_probability(digits, scene, explanation):
    strip_data = perturbation_strip(digits.model, scene, explanation, digits.processor)
    drawing = strip(strip_data)
    assert sum(bool(axes.images) for axes in drawing.axes) == 20
    texts = [t.get_text() for t in drawing.texts]
    assert [t for t in texts if t.endswith("removed")] == [f"{n} % removed" for n in range(10, 100, 10)]
    assert [t for t in texts if t.endswith("%") and "." in t] == [f"{100 * p:.1f} %" for p in strip_data.probabilities.ravel()]
    for kind in ("png", "svg", "pdf"):
        assert encode(drawing, kind)


def test_strip_of_auto_names_the_chosen_method(digits, scene):
    chosen = whyformer.explain(digits.model, scene, "auto", processor=digits.processor)
    strip_data = perturbation_strip(digits.model, scene, chosen, digits.processor)
    assert strip_data.method == chosen.diagnostics["auto"]["method"] != "auto"

"""Display of results: in a terminal, in a notebook, on axes, as a page and as a table."""

from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import whyformer
from show.builders import picture, sentence
from whyformer import show
from whyformer.errors import InputError

matplotlib.use("agg")
PICTURE = Path(__file__).parents[2] / "examples" / "pictures" / "digits_37.png"
SENTENCE = "An utterly charming film, though it drags."


@pytest.fixture(scope="module")
def text():
    return whyformer.explain("bundled:sst2", SENTENCE, "integrated_gradients", steps=50)


def test_show_prints_to_the_terminal(text, capsys):
    text.show()
    output = capsys.readouterr().out
    assert "charming" in output and "positive" in output
    whyformer.compare("bundled:sst2", SENTENCE, ["gae", "vit_cx"]).show()
    output = capsys.readouterr().out
    assert "gae" in output and "refused: vit_cx" in output


def test_generation_is_printed_and_has_a_page(capsys):
    g = whyformer.explain_generation("bundled:reader", "what is on the left ?", method="gae", images=[PICTURE], max_new_tokens=2)
    g.show()
    assert "left" in capsys.readouterr().out
    assert g.to_html().startswith("<!doctype html>") and "left" in g.to_html()


def test_pages_contain_title_words_and_methods(text):
    assert text.to_html(title="A < B").count("A &lt; B") == 2
    both = whyformer.compare("bundled:sst2", SENTENCE, ["gae", "attnlrp"])
    assert all(name in both.to_html() for name in ("gae", "attnlrp"))
    assert both._repr_html_().count("charming") >= 2
    assert isinstance(both.figure(), Figure)


def test_to_pandas_has_a_row_per_token(text):
    table = text.to_pandas()
    assert list(table.columns) == ["sample", "method", "target", "position", "token", "special", "score"]
    assert len(table) == text.scores.numel()
    assert table.score.sum() == pytest.approx(float(text.scores.sum()), rel=1e-5)
    assert table[table.special].token.tolist() == ["[CLS]", "[SEP]"]


def test_to_pandas_has_a_row_per_patch_or_pixel():
    e = picture(torch.arange(24.0).reshape(4, 6))
    table = e.to_pandas()
    assert table.pivot(index="row", columns="column", values="score").to_numpy().tolist() == e.scores.reshape(4, 6).tolist()
    pixels = picture(torch.rand(8, 5), level="pixel", size=(8, 5))
    assert pixels.to_pandas().shape[0] == 40
    assert np.allclose(pixels.to_pandas().score, pixels.scores.flatten())


@pytest.mark.parametrize("e", [picture(torch.randn(4, 6)), sentence()], ids=["picture", "text"])
def test_plot_draws_on_given_axes(e):
    axes = Figure().subplots(1, 2)
    assert e.plot(axes[1]) is axes[1]
    assert axes[1].get_title().startswith("Why “")
    assert (axes[1].images or axes[1].patches) and not (axes[0].images or axes[0].patches)
    if e.level == "patch":
        assert np.array_equal(axes[1].images[0].get_array(), show.overlay(e))
    else:
        assert len(axes[1].patches) == min(10, len(e.words()))


def test_waterfall_begins_at_the_baseline_and_ends_at_the_logit(text):
    drawing = show.waterfall(text, 4)
    labels = [t.get_text() for t in drawing.axes[0].texts]
    ends = {line.split(" at ")[0]: float(line.split(" at ")[1]) for line in labels if " at " in line}
    logit = text.logit(int(text.target[0]))
    assert ends["ends"] == pytest.approx(logit, abs=1e-3)
    assert ends["begins"] == pytest.approx(logit - float(text.scores.sum()), abs=1e-3)
    steps = [float(line) for line in labels if line[:1] in "+-"]
    assert sum(steps) == pytest.approx(float(text.scores.sum()), rel=0.02)


def test_waterfall_requires_additive_scores():
    with pytest.raises(InputError, match="no sign"):
        show.waterfall(whyformer.explain("bundled:sst2", SENTENCE, "gae"))
    with pytest.raises(InputError, match="single output"):
        show.waterfall(whyformer.explain("bundled:sst2", SENTENCE, "attnlrp", target=whyformer.targets.Contrast(0, 1)))

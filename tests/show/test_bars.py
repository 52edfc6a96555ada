"""Bar charts of features by |score|, with signs and the sum of the others, and summaries of words over many texts."""

import pytest
import torch
from matplotlib.text import Text

from show.builders import picture, sentence
from whyformer import show
from whyformer.errors import InputError


def texts_of(figure):
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def rows_of(figure):
    """The names and the numbers beside the bars."""
    (axes,) = figure.axes
    return list(zip((t.get_text() for t in axes.get_yticklabels()), (t.get_text() for t in axes.texts), strict=True))


def test_bars_show_strongest_features_and_sum_of_others():
    drawn = show.bars(sentence("one two three four", [0, 0.5, -2.0, 1.0, 0.25, 0]), 2)
    assert rows_of(drawn) == [("two", "-2"), ("three", "1"), ("sum of 2 others", "0.75")]
    assert {"against", "for positive"} <= set(texts_of(drawn))
    against, favour, _ = drawn.axes[0].patches
    assert against.get_width() == -2 * favour.get_width() < 0
    assert against.get_facecolor() != favour.get_facecolor()


@pytest.mark.parametrize("scores", [[0, -123.4, 0.5, -0.25, 0], [0, 123.4, -0.5, 0.25, 0], [0, -1.0, -0.99, -0.5, 0]])
@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("kind", [show.bars, show.waterfall])
def test_values_do_not_overlap_names(kind, scores, long):
    values = torch.tensor([*scores[:2], *scores[1:]] if long else scores)
    drawn = kind(sentence(f"{'W' * 60} two three" if long else "one two three", values), 2)
    drawn.canvas.draw()
    boxes = [t.get_window_extent() for t in drawn.findobj(Text) if t.get_text() and t.get_visible()]
    for i, a in enumerate(boxes):
        assert a.x0 >= 0 and a.x1 <= drawn.bbox.x1
        assert not any(a.overlaps(b) for b in boxes[:i])


def test_unsigned_scores_have_unsigned_legend():
    texts = texts_of(show.bars(sentence("one two", [0, 0.5, 2.0, 0])))
    assert "mattered (no sign)" in texts
    assert "against" not in texts


def test_patches_and_pixels_have_positions():
    assert "patch in row 1, column 4" in texts_of(show.bars(picture(), 3))
    assert "pixel in row 0, column 1" in texts_of(show.bars(picture(torch.tensor([[0.0, 1.0], [0, 0]]), level="pixel", size=(2, 2)), 1))


def test_summary_has_mean_score_of_each_word():
    texts = [sentence("good film", [0, 2.0, 1.0, 0]), sentence("Good bad", [0, 4.0, -1.0, 0])]
    assert rows_of(show.summary(texts)) == [("good ×2", "3"), ("film ×1", "1"), ("bad ×1", "-1")]
    assert rows_of(show.summary(texts, least=2)) == [("good ×2", "3")]


@pytest.mark.parametrize("explanations", [[], [picture()], [sentence(target=0), sentence(target=1)], [sentence(), sentence(method="lrp")]])
def test_summary_of_incompatible_explanations_raises(explanations):
    with pytest.raises(InputError, match="summary"):
        show.summary(explanations)


def test_zero_bars_raise():
    with pytest.raises(InputError, match="at least 1"):
        show.bars(sentence(), 0)

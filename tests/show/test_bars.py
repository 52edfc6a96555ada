"""Bars: features by |score| with their signs, the sum of the others, and words for a class over many texts."""

import pytest
import torch
from matplotlib.patches import Rectangle

from show.builders import picture, sentence
from whyformer import show
from whyformer.errors import InputError


def texts_of(figure):
    return [t.get_text() for t in figure.texts]


def test_the_strongest_stand_first_with_their_signs_and_the_rest_as_a_sum():
    drawn = show.bars(sentence("one two three four", [0, 0.5, -2.0, 1.0, 0.25, 0]), 2)
    said = texts_of(drawn)
    assert said[1::2][:3] == ["two", "three", "sum of 2 others"]
    assert said[2::2][:3] == ["-2", "1", "0.75"]
    assert {"against", "for positive"} <= set(said)
    boxes = [b.get_x() for b in drawn.artists or drawn.get_children() if isinstance(b, Rectangle)]
    assert min(boxes[1:]) < max(boxes)


@pytest.mark.parametrize("scores", [[0, -123.4, 0.5, -0.25, 0], [0, 123.4, -0.5, 0.25, 0], [0, -1.0, -0.99, -0.5, 0]])
@pytest.mark.parametrize("long", [False, True])
def test_no_figure_meets_a_name(scores, long):
    given = torch.tensor([*scores[:2], *scores[1:]] if long else scores)
    drawn = show.bars(sentence(f"{'W' * 60} two three" if long else "one two three", given), 2)
    drawn.canvas.draw()
    boxes = [t.get_window_extent() for t in drawn.texts if t.get_text()]
    for i, a in enumerate(boxes):
        assert a.x0 >= 0 and a.x1 <= drawn.bbox.x1
        assert not any(a.overlaps(b) for b in boxes[:i])


def test_scores_without_a_sign_claim_none():
    said = texts_of(show.bars(sentence("one two", [0, 0.5, 2.0, 0])))
    assert "mattered (no sign)" in said
    assert "against" not in said


def test_patches_and_pixels_have_places():
    assert "patch in row 1, column 4" in texts_of(show.bars(picture(), 3))
    assert "pixel in row 0, column 1" in texts_of(show.bars(picture(torch.tensor([[0.0, 1.0], [0, 0]]), level="pixel", size=(2, 2)), 1))


def test_a_summary_is_the_mean_of_each_word_over_texts():
    texts = [sentence("good film", [0, 2.0, 1.0, 0]), sentence("Good bad", [0, 4.0, -1.0, 0])]
    said = texts_of(show.summary(texts))
    assert said[1::2][:3] == ["good ×2", "film ×1", "bad ×1"]
    assert said[2::2][:3] == ["3", "1", "-1"]
    assert texts_of(show.summary(texts, least=2))[1] == "good ×2"


@pytest.mark.parametrize("given", [[], [picture()], [sentence(target=0), sentence(target=1)], [sentence(), sentence(method="lrp")]])
def test_what_cannot_be_summarised_is_refused(given):
    with pytest.raises(InputError, match="summary"):
        show.summary(given)


def test_a_number_of_bars_is_needed():
    with pytest.raises(InputError, match="at least 1"):
        show.bars(sentence(), 0)

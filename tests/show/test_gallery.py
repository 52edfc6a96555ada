"""Galleries of maximised pictures: order and labels."""

from types import SimpleNamespace

import numpy as np
import pytest

from whyformer import show
from whyformer.errors import InputError


def found(unit, colour, shape=(6, 8)):
    return SimpleNamespace(shown=np.full((*shape, 3), colour, dtype=np.uint8), unit=unit, activation=12.3456)


def test_places_and_words():
    """Pictures are unchanged, row by row, each below its name and activation."""
    figure = show.gallery([found("class a", 10), found("class $b_1$", 90), found("b" * 80, 200)], columns=2)
    first, second, third = figure.axes
    assert [axes.images[0].get_array()[0, 0, 0] for axes in figure.axes] == [10, 90, 200]
    assert first.get_position().x0 == third.get_position().x0 < second.get_position().x0
    assert first.get_position().y0 == second.get_position().y0 > third.get_position().y1
    said = [text.get_text() for text in figure.texts]
    assert said[:2] == ["class a  12.3", "class $b_1$  12.3"]
    assert said[2].startswith("bbb")
    assert said[2].endswith("…  12.3")
    for text, axes in zip(figure.texts, figure.axes, strict=True):
        place = axes.get_position()
        assert text.get_position()[0] == pytest.approx((place.x0 + place.x1) / 2)
        assert 0 < text.get_position()[1] - place.y1 < 0.05
    assert show.encode(figure, "svg").startswith(b"<?xml")


def test_what_is_refused():
    with pytest.raises(InputError, match="no picture to show"):
        show.gallery([])
    for columns in (0, 1.5, True):
        with pytest.raises(InputError, match="columns must be a whole number of at least 1"):
            show.gallery([found("a", 1)], columns=columns)

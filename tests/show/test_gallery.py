"""Galleries of maximised pictures: order, labels and invalid arguments."""

from types import SimpleNamespace

import numpy as np
import pytest

from whyformer import show
from whyformer.errors import InputError


def maximized(unit, colour, shape=(6, 8)):
    return SimpleNamespace(pixels=np.full((*shape, 3), colour, dtype=np.uint8), unit=unit, activation=12.3456)


def test_gallery_has_unchanged_pictures_in_rows_with_labels():
    """Each picture is below its name and activation."""
    figure = show.gallery([maximized("class a", 10), maximized("class $b_1$", 90), maximized("b" * 80, 200)], columns=2)
    first, second, third = figure.axes
    assert [axes.images[0].get_array()[0, 0, 0] for axes in figure.axes] == [10, 90, 200]
    assert first.get_position().x0 == third.get_position().x0 < second.get_position().x0
    assert first.get_position().y0 == second.get_position().y0 > third.get_position().y1
    labels = [text.get_text() for text in figure.texts]
    assert labels[:2] == ["class a  12.3", "class $b_1$  12.3"]
    assert labels[2].startswith("bbb")
    assert labels[2].endswith("…  12.3")
    for text, axes in zip(figure.texts, figure.axes, strict=True):
        position = axes.get_position()
        assert text.get_position()[0] == pytest.approx((position.x0 + position.x1) / 2)
        assert 0 < text.get_position()[1] - position.y1 < 0.05
    assert show.encode(figure, "svg").startswith(b"<?xml")


def test_invalid_arguments_raise():
    with pytest.raises(InputError, match="no picture to show"):
        show.gallery([])
    for columns in (0, 1.5, True):
        with pytest.raises(InputError, match="columns must be an integer of at least 1"):
            show.gallery([maximized("a", 1)], columns=columns)

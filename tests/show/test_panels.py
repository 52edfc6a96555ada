from itertools import pairwise

import numpy as np
import pytest
import torch

from show.builders import ATTACK, picture, sentence
from whyformer.errors import InputError
from whyformer.show import encode, figure, matrix, panels


def many(count=6, **more):
    return [picture(torch.rand(4, 6), method="attention", settings={"block": i // 3, "head": i % 3}, **more) for i in range(count)]


def test_a_panel_for_each_map_under_what_tells_it_apart():
    drawing = panels(many(), columns=3)
    assert sum(bool(axes.images) for axes in drawing.axes) == 6
    titles = [t.get_text() for t in drawing.texts if "(no sign)" not in t.get_text()]
    assert len(drawing.texts) == 7  # what the colours say stands once
    assert [t.rpartition("  max ")[0] for t in titles] == ["block 0 head 0", "block 0 head 1", "block 0 head 2", "block 1 head 0", "block 1 head 1", "block 1 head 2"]
    first = drawing.axes[0].get_position()
    assert drawing.axes[3].get_position().x0 == pytest.approx(first.x0)
    assert drawing.axes[3].get_position().y1 < first.y0


def test_choices_within_aggregation_are_named_too():
    several = [picture(settings={"aggregation": {"layers": b, "heads": "mean"}}) for b in range(3)]
    assert [t.get_text().split("  ")[0] for t in panels(several).texts] == ["layer 0", "layer 1", "layer 2", "mattered (no sign)"]


@pytest.mark.parametrize(("count", "size"), [(1, (32, 48)), (7, (48, 32)), (144, (16, 16)), (5, (16, 160)), (4, (160, 16))])
def test_panels_of_any_number_and_shape_do_not_overlap(count, size):
    drawing = panels(many(count, size=size, pictures=torch.zeros(1, *size, 3, dtype=torch.uint8)))
    boxes = [axes.get_position() for axes in drawing.axes]
    assert len(boxes) == count
    for a, b in pairwise(boxes):
        assert a.x1 <= b.x0 + 1e-9 or a.y0 >= b.y1 - 1e-9
    assert max(box.x1 for box in boxes) <= 1 and min(box.y0 for box in boxes) >= 0
    assert drawing.get_figwidth() < 16


SIZES = {"wide": (16, 128), "twice as wide": (20, 48), "square": (64, 64), "tall": (128, 16)}


@pytest.mark.parametrize("shape", SIZES)
def test_wide_pictures_stand_below_each_other_and_no_text_meets_another(shape):
    size = SIZES[shape]
    signed = {"diagnostics": {"signed": True}, "size": size, "method": "lrp_ah_ln"}
    shown = [picture(torch.randn(4, 6), **signed), picture(torch.randn(4, 6), target=0, **signed), picture(method="gae", size=size)]
    drawing = figure(shown)
    drawing.canvas.draw()
    pictures = [axes.get_window_extent() for axes in drawing.axes if axes.images and axes.images[0].get_array().shape[1] > 4]
    assert len(pictures) == 4
    stacked = all(a.y0 >= b.y1 for a, b in pairwise(pictures))
    assert stacked == (size[1] > 2 * size[0])
    ticks = [t for axes in drawing.axes for t in axes.get_yticklabels() if axes.axison]
    boxes = [t.get_window_extent() for t in (*drawing.texts, *ticks) if t.get_text()]
    assert len(boxes) > 10
    for i, a in enumerate(boxes):
        assert a.x0 >= 0 and a.x1 <= drawing.bbox.x1
        assert not any(a.overlaps(b) for b in boxes[:i]), shape


def test_options_reach_the_panels_and_unknown_ones_are_refused():
    with pytest.raises(InputError, match="no option 'alpha'"):
        panels(many(), alpha=1)
    with pytest.raises(InputError, match="columns must be at least 1"):
        panels(many(), columns=0)
    with pytest.raises(InputError, match="no explanation"):
        panels([])
    plain, masked = (np.asarray(panels(many(1), **o).axes[0].images[0].get_array()) for o in ({}, {"keep": 0.2}))
    assert not np.array_equal(plain, masked)


def test_text_becomes_a_listing():
    drawing = panels([sentence(method="attention", settings={"block": b}) for b in range(3)])
    assert any("block=2" in t.get_text() for t in drawing.texts)


def test_a_matrix_has_its_tokens_on_both_sides():
    drawing = matrix(torch.rand(3, 3), ["[CLS]", "$x$", "这"], title="block 0")
    axes = drawing.axes[0]
    assert [t.get_text() for t in axes.get_yticklabels()][:2] == ["[CLS]", "$x$"]
    assert [t.get_text() for t in axes.get_xticklabels()][:2] == ["[CLS]", "$x$"]
    assert encode(drawing).startswith(b"\x89PNG")


def test_the_largest_entry_of_a_matrix_is_in_row_query_and_column_key():
    values = torch.zeros(4, 5)
    values[1, 3] = 7
    shown = np.asarray(matrix(values, list("abcd"), list("abcde")).axes[0].images[0].get_array())
    assert np.argwhere(shown.sum(-1) == shown.sum(-1).min()).tolist() == [[1, 3]]


@pytest.mark.parametrize("values", [torch.randn(197, 197), np.zeros((2, 2)), torch.rand(1, 1), torch.rand(512, 512, dtype=torch.bfloat16)])
def test_any_matrix_can_be_drawn(values):
    for kind in ("png", "svg", "pdf"):
        assert encode(matrix(values, title=ATTACK), kind)


@pytest.mark.parametrize(("values", "names", "message"), [
    (torch.rand(3), None, "a matrix"), (torch.rand(0, 3), None, "a matrix"), (torch.full((2, 2), float("nan")), None, "NaN"),
    (torch.rand(2, 2), ["a"], "1 names for 2 rows"),
])  # fmt: skip
def test_what_is_no_matrix(values, names, message):
    with pytest.raises(InputError, match=message):
        matrix(values, names)


def test_names_of_tokens_are_no_markup():
    source = encode(matrix(torch.rand(2, 2), [ATTACK, "</text><script>"]), "svg").decode()
    assert "<script" not in source

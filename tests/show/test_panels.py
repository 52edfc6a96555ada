from itertools import pairwise

import numpy as np
import pytest
import torch

from show.builders import ATTACK, picture, sentence
from whyformer.errors import InputError
from whyformer.show import encode, figure, matrix, panels


def many_maps(count=6, **kwargs):
    return [picture(torch.rand(4, 6), method="attention", settings={"block": i // 3, "head": i % 3}, **kwargs) for i in range(count)]


def test_each_map_has_a_panel_titled_by_differing_settings():
    drawing = panels(many_maps(), columns=3)
    assert sum(bool(axes.images) for axes in drawing.axes) == 6
    titles = [t.get_text() for t in drawing.texts if "(no sign)" not in t.get_text()]
    assert len(drawing.texts) == 7  # one legend for all panels
    assert [t.rpartition("  max ")[0] for t in titles] == ["block 0 head 0", "block 0 head 1", "block 0 head 2", "block 1 head 0", "block 1 head 1", "block 1 head 2"]
    first = drawing.axes[0].get_position()
    assert drawing.axes[3].get_position().x0 == pytest.approx(first.x0)
    assert drawing.axes[3].get_position().y1 < first.y0


def test_panels_of_several_targets_are_titled_by_target():
    titles = [t.get_text().split("  ")[0] for t in panels([picture(target=0), picture(target=1)]).texts]
    assert titles[:2] == ["cat", "dog"]


def test_differing_aggregation_is_in_title():
    several = [picture(settings={"aggregation": {"layers": b, "heads": "mean"}}) for b in range(3)]
    assert [t.get_text().split("  ")[0] for t in panels(several).texts] == ["layer 0", "layer 1", "layer 2", "mattered (no sign)"]


@pytest.mark.parametrize(("count", "size"), [(1, (32, 48)), (7, (48, 32)), (144, (16, 16)), (5, (16, 160)), (4, (160, 16))])
def test_panels_do_not_overlap(count, size):
    drawing = panels(many_maps(count, size=size, pictures=torch.zeros(1, *size, 3, dtype=torch.uint8)))
    boxes = [axes.get_position() for axes in drawing.axes]
    assert len(boxes) == count
    for a, b in pairwise(boxes):
        assert a.x1 <= b.x0 + 1e-9 or a.y0 >= b.y1 - 1e-9
    assert max(box.x1 for box in boxes) <= 1 and min(box.y0 for box in boxes) >= 0
    assert drawing.get_figwidth() < 16


SIZES = {"wide": (16, 128), "twice as wide": (20, 48), "square": (64, 64), "tall": (128, 16)}


@pytest.mark.parametrize("shape", SIZES)
def test_wide_pictures_are_stacked_and_texts_do_not_overlap(shape):
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


def test_options_are_used_by_panels_and_invalid_options_raise():
    with pytest.raises(InputError, match="no option 'alpha'"):
        panels(many_maps(), alpha=1)
    for columns in (0, -1, 1.5, True):
        with pytest.raises(InputError, match="columns must be an integer of at least 1"):
            panels(many_maps(), columns=columns)
    with pytest.raises(InputError, match="no explanation"):
        panels([])
    plain, masked = (np.asarray(panels(many_maps(1), **o).axes[0].images[0].get_array()) for o in ({}, {"keep": 0.2}))
    assert not np.array_equal(plain, masked)


def test_panels_of_texts_are_listed():
    drawing = panels([sentence(method="attention", settings={"block": b}) for b in range(3)])
    assert any("block=2" in t.get_text() for t in drawing.texts)


def test_matrix_has_tokens_on_both_axes():
    drawing = matrix(torch.rand(3, 3), ["[CLS]", "$x$", "这"], title="block 0")
    axes = drawing.axes[0]
    assert [t.get_text() for t in axes.get_yticklabels()][:2] == ["[CLS]", "$x$"]
    assert [t.get_text() for t in axes.get_xticklabels()][:2] == ["[CLS]", "$x$"]
    assert encode(drawing).startswith(b"\x89PNG")


def test_matrix_has_queries_as_rows_and_keys_as_columns():
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
    (torch.rand(2, 2), ["a"], "1 names for 2 rows"), ([["a"]], None, "of numbers"), ([[1], [1, 2]], None, "of numbers"),
])  # fmt: skip
def test_invalid_matrix_raises(values, names, message):
    with pytest.raises(InputError, match=message):
        matrix(values, names)


def test_token_names_are_escaped_in_svg():
    source = encode(matrix(torch.rand(2, 2), [ATTACK, "</text><script>"]), "svg").decode()
    assert "<script" not in source

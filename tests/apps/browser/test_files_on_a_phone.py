"""HTML files in a real browser, on a phone and in the dark: the matrix of an answer, two classes of a picture, a report."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from show.made import picture
from show.test_answers import made
from whyformer.apps.report import write_report
from whyformer.show import page as page_of
from whyformer.show.html import answer

pytestmark = pytest.mark.slow
LEGEND = "orange: for what was written, blue: against it; weak rows are paler"


def answered(words, scores=(1.0, -0.5)):
    """One step after so many words, the first of which have these scores."""
    pieces = ([" The", " sun", " is", " shining", " today"] * words)[: words + 1]
    matrix = torch.zeros(1, words + 1)
    matrix[0, : len(scores)] = torch.tensor(scores)
    return replace(
        made(), pieces=pieces, tokens=pieces, ids=[0] * (words + 1), start=words, matrix=matrix, logits=torch.zeros(1, 5), value=torch.zeros(1),
        target=torch.zeros(1), target_names=["x"], diagnostics=[],
    )  # fmt: skip


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_fits_a_phone_in_the_page_s_own_colours(visit, shoot, tmp_path, dark):
    file = tmp_path / "a.html"
    file.write_text(answer.page(answered(12)), encoding="utf-8")
    page = visit(file.as_uri(), 390, 844, dark)
    shoot(page, f"answer-matrix-{'dark' if dark else 'light'}")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    legend, matrix = page.get_by_text(LEGEND), page.locator("img.matrix").first
    placed = legend.bounding_box()
    assert placed["x"] >= 0
    assert placed["x"] + placed["width"] <= 390
    seen = np.asarray(Image.open(io.BytesIO(matrix.screenshot())).convert("RGB")).astype(int)
    ground = seen[:3, :3].mean()
    assert ground < 40 if dark else ground > 250
    hues = seen[..., 0] - seen[..., 2]
    strongest = seen.reshape(-1, 3)[hues.argmax()], seen.reshape(-1, 3)[hues.argmin()]
    assert hues.max() > 120  # orange stays orange,
    assert hues.min() < -50  # and blue blue
    assert all((one.mean() > ground + 60) if dark else (one.mean() < ground - 60) for one in strongest)


def test_a_wide_one_scrolls_in_its_own_box_below_its_legend(visit, tmp_path):
    file = tmp_path / "a.html"
    file.write_text(answer.page(answered(60)), encoding="utf-8")
    page = visit(file.as_uri(), 390, 844)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    natural = page.evaluate("parseFloat(getComputedStyle(document.querySelector('img.matrix')).getPropertyValue('--wide'))")
    drawn = page.locator("img.matrix").first.bounding_box()["width"]
    assert drawn == pytest.approx(0.7 * natural, abs=1)
    box = page.locator(".wide").first
    assert box.bounding_box()["width"] < drawn
    box.evaluate("one => one.scrollTo(1e6, 0)")
    assert page.get_by_text(LEGEND).bounding_box()["x"] >= 0


WARNED = {"warnings": [["relevance is not conserved, and this sentence is long enough to take several lines below a map"]]}


def two_classes():
    return [picture(torch.randn(4, 6), method=m, target=t, diagnostics=d) for m, d in (("lrp_ah_ln", {}), ("input_x_gradient", WARNED)) for t in (0, 1)]


def test_two_classes_of_a_picture_stand_side_by_side_on_a_phone(visit, tmp_path):
    file = tmp_path / "a.html"
    file.write_text(page_of(two_classes()), encoding="utf-8")
    page = visit(file.as_uri(), 390, 844, True)
    maps = page.locator(".grid img")
    assert maps.count() == 4
    for i in range(4):
        box = maps.nth(i).bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390


def test_maps_of_a_report_stand_in_one_line_whatever_is_written_below_them(visit, tmp_path):
    for i, e in enumerate(two_classes()):
        e.save(tmp_path / f"{i}.safetensors")
    page = visit(write_report(tmp_path, tmp_path / "r.html").path.as_uri())
    tops = [page.locator(".tiles img").nth(i).bounding_box()["y"] for i in range(4)]
    assert max(tops) - min(tops) < 1

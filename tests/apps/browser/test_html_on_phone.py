"""HTML files in a browser on a phone, light and dark: the matrix of an answer, two classes of a picture, a report."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from show.builders import picture
from show.test_answers import generation
from whyformer.apps.report import write_report
from whyformer.show import page as page_of
from whyformer.show.html import answer

pytestmark = pytest.mark.slow
LEGEND = "orange: for what was written, blue: against it; weak rows are paler"


def long_generation(words, scores=(1.0, -0.5)):
    """A generation of one step after ``words`` words, the first of which have the scores ``scores``."""
    pieces = ([" The", " sun", " is", " shining", " today"] * words)[: words + 1]
    matrix = torch.zeros(1, words + 1)
    matrix[0, : len(scores)] = torch.tensor(scores)
    return replace(
        generation(), pieces=pieces, tokens=pieces, ids=[0] * (words + 1), start=words, matrix=matrix, logits=torch.zeros(1, 5), value=torch.zeros(1),
        target=torch.zeros(1), target_names=["x"], diagnostics=[],
    )  # fmt: skip


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_matrix_fits_phone_in_colours_of_page(visit, shoot, tmp_path, dark):
    file = tmp_path / "a.html"
    file.write_text(answer.page(long_generation(12)), encoding="utf-8")
    page = visit(file.as_uri(), 390, 844, dark)
    shoot(page, f"answer-matrix-{'dark' if dark else 'light'}")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    legend, matrix = page.get_by_text(LEGEND), page.locator("img.matrix").first
    box = legend.bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390
    pixels = np.asarray(Image.open(io.BytesIO(matrix.screenshot())).convert("RGB")).astype(int)
    background = pixels[:3, :3].mean()
    assert background < 40 if dark else background > 250
    hues = pixels[..., 0] - pixels[..., 2]
    strongest = pixels.reshape(-1, 3)[hues.argmax()], pixels.reshape(-1, 3)[hues.argmin()]
    assert hues.max() > 120  # orange in both themes
    assert hues.min() < -50  # blue in both themes
    assert all((color.mean() > background + 60) if dark else (color.mean() < background - 60) for color in strongest)


def test_wide_matrix_scrolls_in_box_below_legend(visit, tmp_path):
    file = tmp_path / "a.html"
    file.write_text(answer.page(long_generation(60)), encoding="utf-8")
    page = visit(file.as_uri(), 390, 844)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    natural = page.evaluate("parseFloat(getComputedStyle(document.querySelector('img.matrix')).getPropertyValue('--wide'))")
    drawn = page.locator("img.matrix").first.bounding_box()["width"]
    assert drawn == pytest.approx(0.7 * natural, abs=1)
    box = page.locator(".wide").first
    assert box.bounding_box()["width"] < drawn
    box.evaluate("element => element.scrollTo(1e6, 0)")
    assert page.get_by_text(LEGEND).bounding_box()["x"] >= 0


WARNED = {"warnings": [["relevance is not conserved, and this sentence is long enough to take several lines below a map"]]}


def two_classes():
    return [picture(torch.randn(4, 6), method=m, target=t, diagnostics=d) for m, d in (("lrp_ah_ln", {}), ("input_x_gradient", WARNED)) for t in (0, 1)]


def test_maps_of_two_classes_fit_phone(visit, tmp_path):
    file = tmp_path / "a.html"
    file.write_text(page_of(two_classes()), encoding="utf-8")
    page = visit(file.as_uri(), 390, 844, True)
    maps = page.locator(".grid img")
    assert maps.count() == 4
    for i in range(4):
        box = maps.nth(i).bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390


def test_maps_of_report_are_aligned(visit, tmp_path):
    for i, e in enumerate(two_classes()):
        e.save(tmp_path / f"{i}.safetensors")
    page = visit(write_report(tmp_path, tmp_path / "r.html").path.as_uri())
    tops = [page.locator(".tiles img").nth(i).bounding_box()["y"] for i in range(4)]
    assert max(tops) - min(tops) < 1

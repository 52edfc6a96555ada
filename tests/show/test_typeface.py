"""The typeface is used in every figure and page, and has every character that they contain."""

import re

import matplotlib
import numpy as np
import pytest
import torch
from fontTools.ttLib import TTFont
from matplotlib.text import Text

import whyformer
from show.builders import picture, sentence
from whyformer import show
from whyformer.show import html, paper, typeface

PAGES = sorted(html._environment().list_templates(extensions=["html"]))


def test_faces_have_all_characters():
    characters = "äßéøŁ Ωμέγα Σσα Привет Ђ − × ÷ ± → ← ↑ ↓ ≥ ≤ ≈ ≠ … “ ” ‘ ’ – — · • ° ² ³ ⏎ ⇥ ⚠ ▲ ▼ □ √ ∞ %"
    for face in typeface.FACES.values():
        letters = TTFont(face.with_suffix(".ttf")).getBestCmap()
        assert [character for character in characters if ord(character) not in letters] == []
        assert face.with_suffix(".woff2").read_bytes()[:4] == b"wOF2"


FIGURES = {
    "grid": lambda: show.figure([picture(target=0), picture(target=1, method="rollout")]),
    "panels": lambda: show.panels([picture(target=0), picture(target=1, method="rollout")]),
    "listing": lambda: show.figure(sentence("good bad", [0, 2.0, -1.0, 0])),
    "matrix": lambda: show.matrix(torch.eye(3), ["a", "b", "c"], title="a title"),
    "numbered matrix": lambda: show.matrix(torch.eye(3)),
    "inside": lambda: whyformer.record("bundled:sst2", "A charming film.").inside("positive").figure(),
}


@pytest.mark.parametrize("name", FIGURES)
def test_all_text_of_figures_uses_typeface(name):
    figure = FIGURES[name]()
    show.encode(figure)  # tick labels are created during rendering
    text = [item for item in figure.findobj(Text) if item.get_text()]
    assert len(text) > 1
    assert [item.get_text() for item in text if item.get_fontfamily()[0] != "Inter"] == []


@pytest.mark.parametrize("kind", paper.FORMATS)
def test_text_in_any_script_is_encoded(kind):
    figure = show.matrix(np.eye(2), ["Привет → “x”", "جميل 很好 ∈"], title="Ωμέγα ≥ 3 × 2")
    assert len(show.encode(figure, kind)) > 1000


def test_matplotlib_settings_are_unchanged():
    before = dict(matplotlib.rcParams)
    typeface.families.cache_clear()
    show.encode(show.matrix(torch.eye(2), title="a title"))
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("name", PAGES)
def test_content_security_policy_allows_fonts(name):
    source = html._environment().loader.get_source(html._environment(), name)[0]
    for policy in re.findall(r'Content-Security-Policy" content="([^"]*)"', source):
        assert "font-src data:;" in policy
        assert 'asset("claims.css")' in source


def test_pages_embed_typeface_and_fragments_do_not():
    assert html.page(sentence()).count("@font-face") == len(typeface.FACES)
    assert "@font-face" not in html.fragment(sentence())
    assert "font-family:Inter,system-ui" in html.fragment(sentence())


NAMES = {"wide": "W" * 60, "words": "Greater Swiss Mountain dog of the northern valleys and of the plains below them", "Arabic": "كلب الجبل السويسري " * 4}
LONG = {
    "grid": lambda maps: show.figure(maps),
    "panels": lambda maps: show.panels(maps),
    "bars": lambda maps: show.bars(maps[0], 2),
    "waterfall": lambda maps: show.waterfall(maps[0], 2),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("drawing", LONG)
def test_long_names_are_cut_to_their_place_and_probabilities_are_not(drawing, name):
    labels = {0: NAMES[name], 1: NAMES[name][::-1], 2: "emu"}
    maps = [picture(target=i, labels=labels, diagnostics={"signed": True}, pictures=torch.zeros(1, 32, 48, 3, dtype=torch.uint8)) for i in (1, 0)]
    drawn = LONG[drawing](maps)
    drawn.set_dpi(100)  # hinting makes letters widest here
    drawn.canvas.draw()
    texts = [text for text in drawn.findobj(Text) if text.get_text() and text.get_visible()]
    boxes = [text.get_window_extent() for text in texts]
    for i, box in enumerate(boxes):
        assert box.x0 >= 0 and box.x1 <= drawn.bbox.x1, texts[i].get_text()
        assert not any(box.overlaps(other) for other in boxes[:i]), texts[i].get_text()
    if drawing != "panels":
        assert any("”? 90.9 %" in text.get_text().replace("\u2069", "") for text in texts)
        assert not any("□" in text.get_text() for text in texts)


def test_figures_are_saved_at_high_resolution_by_default():
    for name in ("grid", "inside"):
        assert FIGURES[name]().dpi == paper.DPI >= 200

"""The typeface: in every figure and page, and with every sign that these write."""

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


def test_its_faces_have_the_letters_and_the_signs_of_figures():
    signs = "äßéøŁ Ωμέγα Σσα Привет Ђ − × ÷ ± → ← ↑ ↓ ≥ ≤ ≈ ≠ … “ ” ‘ ’ – — · • ° ² ³ ⏎ ⇥ ⚠ ▲ ▼ □ √ ∞ %"
    for face in typeface.FACES.values():
        letters = TTFont(face.with_suffix(".ttf")).getBestCmap()
        assert [sign for sign in signs if ord(sign) not in letters] == []
        assert face.with_suffix(".woff2").read_bytes()[:4] == b"wOF2"


DRAWN = {
    "grid": lambda: show.figure([picture(target=0), picture(target=1, method="rollout")]),
    "panels": lambda: show.panels([picture(target=0), picture(target=1, method="rollout")]),
    "listing": lambda: show.figure(sentence("good bad", [0, 2.0, -1.0, 0])),
    "matrix": lambda: show.matrix(torch.eye(3), ["a", "b", "c"], title="a title"),
    "numbered matrix": lambda: show.matrix(torch.eye(3)),
    "inside": lambda: whyformer.record("bundled:sst2", "A charming film.").inside("positive").figure(),
}


@pytest.mark.parametrize("name", DRAWN)
def test_all_text_of_figures_is_in_it(name):
    figure = DRAWN[name]()
    show.encode(figure)  # ticks are made at last
    text = [one for one in figure.findobj(Text) if one.get_text()]
    assert len(text) > 1
    assert [one.get_text() for one in text if one.get_fontfamily()[0] != "Inter"] == []


@pytest.mark.parametrize("kind", paper.FORMATS)
def test_files_hold_letters_of_any_script(kind):
    figure = show.matrix(np.eye(2), ["Привет → “x”", "جميل 很好 ∈"], title="Ωμέγα ≥ 3 × 2")
    assert len(show.encode(figure, kind)) > 1000


def test_the_settings_of_matplotlib_stay_as_they_are():
    before = dict(matplotlib.rcParams)
    typeface.families.cache_clear()
    show.encode(show.matrix(torch.eye(2), title="a title"))
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("name", PAGES)
def test_pages_with_a_policy_let_their_typeface_in(name):
    source = html._environment().loader.get_source(html._environment(), name)[0]
    for policy in re.findall(r'Content-Security-Policy" content="([^"]*)"', source):
        assert "font-src data:;" in policy
        assert 'asset("claims.css")' in source


def test_a_page_holds_its_faces_and_a_card_does_not():
    assert html.page(sentence()).count("@font-face") == len(typeface.FACES)
    assert "@font-face" not in html.fragment(sentence())
    assert "font-family:Inter,system-ui" in html.fragment(sentence())

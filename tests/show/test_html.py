import base64
import io
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from PIL import Image

from show.builders import ATTACK, picture, sentence
from whyformer.show import html

VOID = {"meta", "img", "br"}


class CheckedPage(HTMLParser):
    """Collects tags, attributes and text; fails on tags that do not match."""

    def __init__(self, source):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.words, self.open = [], [], [], []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def hostile_explanations():
    labels = {0: ATTACK, 1: "positive"}
    method = f"m{ATTACK}"
    yield sentence(ATTACK, target=0, labels=labels, method=method)
    tokens = [["[CLS]", ATTACK, "</span><script>1</script>"]]
    yield sentence("x", [0, 1.0, -1.0], target=0, labels=labels, tokens=tokens, offsets=None, texts=None)
    yield sentence(ATTACK, [0, 1.0, 0.5], tokens=tokens, offsets=[[(0, 0), (0, 9), (9, 20)]], texts=[ATTACK])
    yield sentence(f"{ATTACK} " * 40, target=0, labels=labels, method=method)
    yield picture(target=0, labels={**labels, 2: "'\" onerror=alert(1) x='"}, method=method)


@pytest.mark.parametrize("e", list(hostile_explanations()))
def test_input_is_escaped_in_html(e):
    for source in (html.fragment(e), html.page(e, f"{ATTACK}.png")):
        page = CheckedPage(source)
        assert "script" not in page.tags
        assert not [name for name, _ in page.attributes if name.startswith("on")]
        assert "\x1b" not in source
        assert "\u202e" not in source
        assert "&amp;amp;" in source or e.texts == ["x"] or e.level == "patch"
    assert any('alert("x")' in text for text in page.words)


@pytest.mark.parametrize("e", [picture(), sentence(), picture(torch.zeros(4, 6)), sentence(method="rollout"), sentence("long " * 300)])
def test_html_loads_nothing(e):
    for source in (html.fragment(e), html.page(e)):
        for name, value in CheckedPage(source).attributes:
            if name in ("src", "href"):
                assert value.startswith(("data:image/png;base64,", "#"))
        assert "http" not in re.sub(r"http-equiv", "", source)
        assert "@import" not in source
        assert set(re.findall(r"url\((.{22})", source)) <= {"data:font/woff2;base64"}


def test_fragment_has_only_inline_styles():
    assert "<style" not in html.fragment(sentence())


def test_words_have_signed_colours_and_tooltips():
    source = html.fragment(sentence("good bad", [0, 2.0, -1.0, 0]))
    spans = re.findall(r'<span title="([^"]*)" style="background:#(\w{6})[^"]*">(\w+)</span>', source)
    assert [(tip, word) for tip, _, word in spans] == [("2 · good", "good"), ("-1 · bad", "bad")]
    warm, cold = (tuple(bytes.fromhex(colour)) for _, colour, _ in spans)
    assert warm[0] > warm[2]
    assert cold[2] > cold[0]


def test_legend_names_its_ends_in_words_and_its_limits_on_hover():
    card = html.fragment(sentence("good bad", [0, 2.0, -1.0, 0]))
    limits, words = re.search(r'title="(-2 to 2)">(.*)</', card).groups()
    assert re.sub("<[^>]*>", " ", words).split() == ["against", "for", "positive"] and card.count(limits) == 1


def test_tooltip_of_merged_word_lists_tokens():
    source = html.fragment(sentence("charming", [0, 0.5, 2.0, 0]))
    assert 'title="2.5 · char (0.5) + ##ming (2)"' in source


def test_text_direction_is_automatic():
    assert '<p dir="auto"' in html.fragment(sentence("فيلم رائع"))


def test_zero_scores_are_reported():
    assert "all scores are 0" in html.fragment(picture(torch.zeros(4, 6)))
    assert "all scores are 0" in html.fragment(sentence("a b", [0, 0, 0, 0]))


def test_overlay_is_png_with_aspect_ratio_of_picture():
    data = re.search(r"data:image/png;base64,([^\"]+)", html.fragment(picture(size=(32, 48))))[1]
    drawn = Image.open(io.BytesIO(base64.b64decode(data)))
    assert drawn.width / drawn.height == 1.5


def test_page_is_table_of_methods_and_classes():
    several = [picture(method=m, target=t) for m in ("gae", "lrp") for t in (0, 1)]
    several.append(picture(method="rollout", diagnostics={"class_specific": False}))
    page = CheckedPage(html.page(several, "cats"))
    assert page.tags.count("img") == 1 + 2 * 2 + 1  # a class-agnostic map is drawn once
    assert [x for x in ("gae", "lrp", "rollout", "any class") if x in page.words] == ["gae", "lrp", "rollout", "any class"]


def test_page_of_sentence_has_a_line_per_method_and_class():
    several = [sentence(method=m, target=t) for m in ("gae", "lrp", "saliency") for t in (0, 1)]
    page = CheckedPage(html.page(several, "film"))
    assert page.tags.count("h2") == 2
    assert page.tags.count("p") == 1 + 6


def test_rows_of_same_method_are_labelled_with_differing_settings():
    several = [sentence(method="gae", settings={"start_layer": n, "other": 1}) for n in (0, 2)]
    source = html.page(several)
    assert "gae (start_layer=0)" in source
    assert "gae (start_layer=2)" in source


def test_batch_has_a_card_for_each_sample():
    e = picture()
    two = replace(e, **{n: torch.cat([getattr(e, n)] * 2) for n in ("scores", "logits", "target")}, target_names=["dog", "dog"])
    two = two.with_features(pictures=torch.cat([e.pictures] * 2))
    assert html.fragment(two).count("<img") == 2
    assert two._repr_html_() == html.fragment(two)


def test_long_text_has_mini_map_with_links_to_words():
    words = [f"w{i}" for i in range(400)]
    scores = [0.0] * 402
    scores[1 + 250], scores[1 + 10] = 3.0, -1.0
    source = html.page([sentence(" ".join(words), scores, method=m) for m in ("gae", "lrp")])
    links = re.findall(r'<a href="#([^"]+)" aria-label="([^"]+)" title="[^"]+" class="\w+" style="flex:1;--u:([\d.]+)">', source)
    assert len(links) == 2 * 100
    page = CheckedPage(source)
    names = [value for name, value in page.attributes if name == "id"]
    assert len(names) == len(set(names))
    assert {target for target, _, _ in links} <= set(names)
    nonzero = [label for _, label, strength in links if float(strength)]
    assert [label.split(",")[0] for label in nonzero] == ["words 9 to 12", "words 249 to 252"] * 2
    assert re.search(r'id="t0-0-0-248" title="[^"]*"[^>]*>w248<', source)


def test_card_has_mini_map_without_links():
    source = html.fragment(sentence("word " * 300))
    assert 'aria-hidden="true"' in source
    assert "<a" not in source
    assert "href" not in html.fragment(sentence()) and "position:sticky" not in html.fragment(sentence())


def test_chinese_text_is_marked_word_by_word():
    source = html.fragment(sentence("这部电影很好", [0, 1, 0], tokens=[["[CLS]", "这部", "电影"]], offsets=[[(0, 0), (0, 2), (2, 4)]]))
    assert '">这部</span>' in source and '">电影</span>很好' in source
    assert 'dir="auto"' in source


def test_warnings_of_run_are_on_cards_and_pages():
    for e in (sentence(diagnostics={"warnings": [["<odd> thing"]]}), picture(diagnostics={"warnings": [["<odd> thing"]]})):
        for source in (html.fragment(e), html.page(e)):
            assert "⚠ <odd> thing" in CheckedPage(source).words


def test_patches_without_grid_have_page():
    page = CheckedPage(html.page(picture(grid=None)))
    assert any("without a grid" in text for text in page.words)
    assert page.tags.count("img") == 1


def test_template_values_are_escaped_and_undefined_names_raise():
    from jinja2 import UndefinedError

    source = html.render("page.html", sections=[], title=ATTACK, look=None)
    assert "<script" not in source and "\x1b" not in source and "\\x1b[31m" in source
    with pytest.raises(UndefinedError, match="title"):
        html.render("page.html", sections=[], titel="x", look=None)


def test_python_files_contain_no_html():
    """Markup is only in templates."""
    from pathlib import Path

    import whyformer

    root = Path(whyformer.__file__).parent
    files_with_markup = [p.relative_to(root) for p in sorted(root.rglob("*.py")) if re.search(r"</?(div|span|p|td|tr|li|ul|b|svg|section|figure|img|label|h\d|script)\b", p.read_text())]
    assert files_with_markup == []


def test_every_template_compiles():
    from whyformer.show.html import _environment

    names = [name for name in _environment().list_templates() if name.endswith(".html")]
    assert len(names) > 12
    for name in names:
        _environment().get_template(name)


TRUST = {
    "followed": 1, "fractions": [0.0, 0.5, 1.0], "curve": [0.9, 0.3, 0.1], "lowest": [0.9, 0.5, 0.1], "mean": [0.9, 0.6, 0.1],
    "highest": [0.9, 0.7, 0.1], "verdict": f"Better than each random map {ATTACK}.", "warnings": [f"rollout: {ATTACK}"],
}  # fmt: skip


@pytest.mark.parametrize("make", [picture, sentence])
def test_trust_is_shown_below_map_in_every_view(make):
    e = make(diagnostics={"trust": [TRUST], "warnings": [["only in the diagnostics"]]})
    for source in (html.fragment(e), html.page(e)):
        page = CheckedPage(source)
        assert page.tags.count("polyline") == 2
        assert ("points", "34.0,21.6 173.0,103.2 312.0,130.4") in page.attributes
        assert "Better than each random map <" in " ".join(page.words)
        assert "rollout: <script>" in " ".join(page.words)
        assert "script" not in page.tags
        assert "\x1b" not in source
    assert f"measured for {e.label(1)}: Better than each random map" in str(e)
    assert "Better than" not in html.page(make())


def test_unmeasurable_map_has_no_chart():
    e = picture(diagnostics={"trust": [{**TRUST, "curve": [None] * 3}]})
    assert "polyline" not in CheckedPage(html.fragment(e)).tags
    assert "Better than" in html.fragment(e)

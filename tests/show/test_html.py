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


class Checked(HTMLParser):
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


def attacked():
    labels = {0: ATTACK, 1: "positive"}
    method = f"m{ATTACK}"
    yield sentence(ATTACK, target=0, labels=labels, method=method)
    tokens = [["[CLS]", ATTACK, "</span><script>1</script>"]]
    yield sentence("x", [0, 1.0, -1.0], target=0, labels=labels, tokens=tokens, offsets=None, texts=None)
    yield sentence(ATTACK, [0, 1.0, 0.5], tokens=tokens, offsets=[[(0, 0), (0, 9), (9, 20)]], texts=[ATTACK])
    yield sentence(f"{ATTACK} " * 40, target=0, labels=labels, method=method)
    yield picture(target=0, labels={**labels, 2: "'\" onerror=alert(1) x='"}, method=method)


@pytest.mark.parametrize("e", list(attacked()))
def test_nothing_of_the_input_becomes_markup(e):
    for source in (html.fragment(e), html.page(e, f"{ATTACK}.png")):
        found = Checked(source)
        assert "script" not in found.tags
        assert not [name for name, _ in found.attributes if name.startswith("on")]
        assert "\x1b" not in source
        assert "\u202e" not in source
        assert "&amp;amp;" in source or e.texts == ["x"] or e.level == "patch"
    assert any('alert("x")' in text for text in found.words)


@pytest.mark.parametrize("e", [picture(), sentence(), picture(torch.zeros(4, 6)), sentence(method="rollout"), sentence("long " * 300)])
def test_nothing_is_fetched(e):
    for source in (html.fragment(e), html.page(e)):
        for name, value in Checked(source).attributes:
            if name in ("src", "href"):
                assert value.startswith(("data:image/png;base64,", "#"))
        assert "http" not in re.sub(r"http-equiv", "", source)
        assert "@import" not in source
        assert set(re.findall(r"url\((.{22})", source)) <= {"data:font/woff2;base64"}


def test_a_fragment_has_inline_styles_only():
    assert "<style" not in html.fragment(sentence())


def test_words_have_signed_colours_and_their_values_on_hover():
    source = html.fragment(sentence("good bad", [0, 2.0, -1.0, 0]))
    spans = re.findall(r'<span title="([^"]*)" style="background:#(\w{6})[^"]*">(\w+)</span>', source)
    assert [(tip, word) for tip, _, word in spans] == [("2 · good", "good"), ("-1 · bad", "bad")]
    warm, cold = (tuple(bytes.fromhex(colour)) for _, colour, _ in spans)
    assert warm[0] > warm[2]
    assert cold[2] > cold[0]


def test_the_tooltip_of_a_merged_word_lists_its_tokens():
    source = html.fragment(sentence("charming", [0, 0.5, 2.0, 0]))
    assert 'title="2.5 · char (0.5) + ##ming (2)"' in source


def test_text_runs_in_its_own_direction():
    assert '<p dir="auto"' in html.fragment(sentence("فيلم رائع"))


def test_all_zero_scores_are_said_to_be_zero():
    assert "all scores are 0" in html.fragment(picture(torch.zeros(4, 6)))
    assert "all scores are 0" in html.fragment(sentence("a b", [0, 0, 0, 0]))


def test_the_overlay_is_a_png_with_the_aspect_ratio_of_the_picture():
    data = re.search(r"data:image/png;base64,([^\"]+)", html.fragment(picture(size=(32, 48))))[1]
    drawn = Image.open(io.BytesIO(base64.b64decode(data)))
    assert drawn.width / drawn.height == 1.5


def test_a_page_is_a_table_of_methods_and_classes():
    several = [picture(method=m, target=t) for m in ("gae", "lrp") for t in (0, 1)]
    several.append(picture(method="rollout", diagnostics={"class_specific": False}))
    found = Checked(html.page(several, "cats"))
    assert found.tags.count("img") == 1 + 2 * 2 + 1  # a map of no class is drawn once
    assert [x for x in ("gae", "lrp", "rollout", "any class") if x in found.words] == ["gae", "lrp", "rollout", "any class"]


def test_a_page_of_a_sentence_has_one_line_a_method_under_each_class():
    several = [sentence(method=m, target=t) for m in ("gae", "lrp", "saliency") for t in (0, 1)]
    found = Checked(html.page(several, "film"))
    assert found.tags.count("h2") == 2
    assert found.tags.count("p") == 1 + 6


def test_settings_tell_rows_of_one_method_apart():
    several = [sentence(method="gae", settings={"start_layer": n, "other": 1}) for n in (0, 2)]
    source = html.page(several)
    assert "gae (start_layer=0)" in source
    assert "gae (start_layer=2)" in source


def test_a_batch_gets_a_card_for_each_sample():
    e = picture()
    two = replace(e, **{n: torch.cat([getattr(e, n)] * 2) for n in ("scores", "logits", "target")}, target_names=["dog", "dog"])
    two = two.with_features(pictures=torch.cat([e.pictures] * 2))
    assert html.fragment(two).count("<img") == 2
    assert two._repr_html_() == html.fragment(two)


def test_a_long_text_has_a_mini_map_that_leads_to_its_words():
    words = [f"w{i}" for i in range(400)]
    scores = [0.0] * 402
    scores[1 + 250], scores[1 + 10] = 3.0, -1.0
    source = html.page([sentence(" ".join(words), scores, method=m) for m in ("gae", "lrp")])
    links = re.findall(r'<a href="#([^"]+)" aria-label="([^"]+)" title="[^"]+" class="\w+" style="flex:1;--u:([\d.]+)">', source)
    assert len(links) == 2 * 100
    found = Checked(source)
    names = [value for name, value in found.attributes if name == "id"]
    assert len(names) == len(set(names))
    assert {target for target, _, _ in links} <= set(names)
    hot = [said for _, said, strength in links if float(strength)]
    assert [said.split(",")[0] for said in hot] == ["words 9 to 12", "words 249 to 252"] * 2
    assert re.search(r'id="t0-0-0-248" title="[^"]*"[^>]*>w248<', source)


def test_a_card_has_a_mini_map_without_links():
    source = html.fragment(sentence("word " * 300))
    assert 'aria-hidden="true"' in source
    assert "<a" not in source
    assert "href" not in html.fragment(sentence()) and "position:sticky" not in html.fragment(sentence())


def test_chinese_and_arabic_are_shown_in_their_own_direction_and_marked_word_by_word():
    source = html.fragment(sentence("这部电影很好", [0, 1, 0], tokens=[["[CLS]", "这部", "电影"]], offsets=[[(0, 0), (0, 2), (2, 4)]]))
    assert '">这部</span>' in source and '">电影</span>很好' in source
    assert 'dir="auto"' in source


def test_what_a_run_warns_of_is_on_cards_and_pages():
    for e in (sentence(diagnostics={"warnings": [["<odd> thing"]]}), picture(diagnostics={"warnings": [["<odd> thing"]]})):
        for source in (html.fragment(e), html.page(e)):
            assert "⚠ <odd> thing" in Checked(source).words


def test_patches_without_a_grid_still_have_a_page():
    found = Checked(html.page(picture(grid=None)))
    assert any("without a grid" in said for said in found.words)
    assert found.tags.count("img") == 1


def test_all_that_is_put_into_a_template_is_escaped_and_a_misspelt_name_is_an_error():
    from jinja2 import UndefinedError

    made = html.render("page.html", sections=[], title=ATTACK, look=None)
    assert "<script" not in made and "\x1b" not in made and "\\x1b[31m" in made
    with pytest.raises(UndefinedError, match="title"):
        html.render("page.html", sections=[], titel="x", look=None)


def test_html_is_made_in_one_place():
    """Templates alone hold markup; other code fills them."""
    from pathlib import Path

    import whyformer

    root = Path(whyformer.__file__).parent
    found = [p.relative_to(root) for p in sorted(root.rglob("*.py")) if re.search(r"</?(div|span|p|td|tr|li|ul|b|svg|section|figure|img|label|h\d|script)\b", p.read_text())]
    assert found == []


def test_every_template_can_be_read():
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
def test_what_was_measured_of_a_map_stands_under_it_everywhere(make):
    e = make(diagnostics={"trust": [TRUST], "warnings": [["only in the diagnostics"]]})
    for source in (html.fragment(e), html.page(e)):
        found = Checked(source)
        assert found.tags.count("polyline") == 2
        assert ("points", "34.0,21.6 173.0,103.2 312.0,130.4") in found.attributes
        assert "Better than each random map <" in " ".join(found.words)
        assert "rollout: <script>" in " ".join(found.words)
        assert "script" not in found.tags
        assert "\x1b" not in source
    assert f"measured for {e.label(1)}: Better than each random map" in str(e)
    assert "Better than" not in html.page(make())


def test_a_map_that_could_not_be_measured_has_no_chart():
    e = picture(diagnostics={"trust": [{**TRUST, "curve": [None] * 3}]})
    assert "polyline" not in Checked(html.fragment(e)).tags
    assert "Better than" in html.fragment(e)

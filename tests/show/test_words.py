import pytest
import torch

import whyformer
from show.builders import picture, sentence
from whyformer.errors import InputError
from whyformer.show import words as w
from whyformer.show.colours import scale_of


def merged(text, pieces, scores=None):
    """Words of a text whose tokens are given as (begin, end)."""
    tokens = [[text[a:b] for a, b in pieces]]
    e = sentence(text, scores or [float(i + 1) for i in range(len(pieces))], tokens=tokens, offsets=[pieces])
    return w.words(e)


def test_word_pieces_become_words_with_the_sum_of_their_scores():
    found, rest = merged("unforgivable film.", [(0, 2), (2, 9), (9, 12), (13, 17), (17, 18)], [1.0, -4.5, 2.0, 0.5, 0.1])
    assert [(x.text, x.score) for x in found] == [("unforgivable", -1.5), ("film", 0.5), (".", pytest.approx(0.1))]
    assert found[0].parts == (("un", 1.0), ("forgiva", -4.5), ("ble", 2.0))
    assert rest == ""


def test_an_emoji_has_what_its_bytes_add_up_to():
    """Each byte of one sign for it, the others against it: the word is against."""
    pieces = [(0, 4), (5, 6), (5, 6), (5, 6), (5, 6)]
    found, _ = merged("good 😀", pieces, [0.5, 0.67, -0.6, -0.5, -0.27])
    assert [x.score for x in found] == pytest.approx([0.5, -0.7])
    assert [x.hue for x in found] == ["for", "against"] and found[1].unit == -1
    assert scale_of(sentence("good 😀", [0.5, 0.67, -0.6, -0.5, -0.27], tokens=[list("gabcd")], offsets=[pieces])).limit == pytest.approx(0.7)


@pytest.mark.parametrize("method", ["lrp_ah_ln", "rollout", "saliency", "occlusion"])
def test_the_words_of_a_text_add_up_to_its_scores_of_any_method(method):
    e = whyformer.explain("bundled:sst2", "Unforgivably overlong 😀 yet charmingly acted.", method)
    found, _ = w.words(e)
    assert any(len(x.parts) > 1 for x in found)
    assert [(x.text, x.score) for x in found] == e.words()
    aside = w.special_tokens(e)
    assert sum(x.score for x in found) + (aside.score if aside else 0) == pytest.approx(float(e.scores.sum()), rel=1e-4, abs=1e-6)
    assert max(abs(x.unit) for x in found) == pytest.approx(1)


def test_the_sentence_can_be_put_together_again():
    text = "  Well,\tit's   fine —\nreally?  "
    e = sentence(text)
    found, rest = w.words(e)
    assert "".join(x.gap + x.text for x in found) + rest == text


def test_chinese_tokens_stay_by_themselves():
    found, _ = merged("这部电影", [(0, 1), (1, 2), (2, 3), (3, 4)])
    assert len(found) == 4


def test_tokens_that_share_one_character_are_one_word():
    """A byte-level tokenizer cuts an emoji into bytes, all with the offsets of the whole character."""
    found, _ = merged("a 😀", [(0, 1), (2, 3), (2, 3), (2, 3)])
    assert [x.text for x in found] == ["a", "😀"]


def test_a_combining_mark_is_never_split_off():
    found, _ = merged("नमस्ते", [(0, 3), (3, 6)])
    assert len(found) == 1


def test_the_space_that_byte_level_tokenizers_count_in_is_no_part_of_the_word():
    found, _ = merged("a film", [(0, 1), (1, 6)])
    assert [(x.gap, x.text) for x in found] == [("", "a"), (" ", "film")]


def test_what_the_model_did_not_read_is_kept_apart():
    e = sentence("good film", [0, 1.0, 0], tokens=[["[CLS]", "good", "[SEP]"]], offsets=[[(0, 0), (0, 4), (0, 0)]])
    assert w.words(e)[1] == " film"


def test_without_offsets_tokens_are_shown_and_padding_is_not():
    e = sentence("a", [0, 1.0, 0, 0], tokens=[["[CLS]", "a", "[PAD]", "[PAD]"]], offsets=None, texts=None)
    assert [x.text for x in w.words(e)[0]] == ["[CLS]", "a"]


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[31m", "\\x1b[31m"),
        ("a\u202eb", "a\\u202eb"),
        ("\ud800", "\\ud800"),
        ("\u200b", "\\u200b"),
        ("\u2028", "\\u2028"),
        ("é🎬", "é🎬"),
        ("👩‍👩‍👧", "👩‍👩‍👧"),
        ("", ""),
    ],
)
def test_visible(raw, shown):
    assert w.visible(raw) == shown


@pytest.mark.parametrize(("text", "expected"), [("שלום", True), ("  «مرحبا»", True), ("hello", False), ("123", False), ("", False)])
def test_right_to_left(text, expected):
    assert w.right_to_left(text) is expected


def test_headings():
    assert w.heading(picture()) == "Why “dog”? 90.9 %"
    assert w.heading(picture(diagnostics={"class_specific": False})) == "any class"
    assert w.heading(picture(target_names=["dog rather than cat"])) == "Why “dog rather than cat”?"
    unnamed = picture(target_names=["1"])
    assert w.heading(type(unnamed)(**{**vars(unnamed), "labels": None})) == "Why “class 1”? 90.9 %"
    assert w.heading(picture(target_names=["custom target"], labels={-1: "x", 1: "dog"})) == "Why “custom target”?"


@pytest.mark.parametrize("limit", [12, 20, 30, 60])
def test_a_long_name_is_cut_and_its_figure_never(limit):
    said = w.heading(picture(labels={0: "cat", 1: "Greater Swiss Mountain dog", 2: "emu"}), limit=limit)
    assert said.startswith("Why “Gre")
    assert said.endswith("”? 90.9 %")
    assert len(said) <= max(limit, len("Why “Gre…”? 90.9 %"))


def test_bfloat16_scores_can_be_read():
    assert w.array(torch.tensor([0.5], dtype=torch.bfloat16)).tolist() == [0.5]


def test_tokens_that_do_not_fit_their_scores_are_refused():
    for change in ({"tokens": [["too", "few"]]}, {"offsets": [[(0, 1)]]}, {"tokens": [["a"]], "offsets": None}):
        with pytest.raises(InputError, match="do not fit together"):
            w.words(sentence("good film", **change))


def test_a_word_knows_its_place_in_the_sequence_and_on_the_scale():
    found, _ = merged("unforgivable film", [(0, 2), (2, 12), (13, 17)], [1.0, -4.0, 2.0])
    assert [x.places for x in found] == [(0, 1), (2,)]
    assert [x.unit for x in found] == pytest.approx([-1.0, 2 / 3])
    assert (found[0].value, found[0].sum, found[1].sum) == ("-3", "un (1) + forgivable (-4)", "")

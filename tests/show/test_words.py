import random
import unicodedata
from itertools import pairwise

import pytest
import torch

import whyformer
from show.builders import picture, sentence
from whyformer.errors import InputError
from whyformer.explanation import units
from whyformer.show import words as w
from whyformer.show.colours import scale_of


def merged_words(text, pieces, scores=None):
    """Words of a text whose tokens have the offsets ``pieces``, as pairs (begin, end)."""
    tokens = [[text[a:b] for a, b in pieces]]
    e = sentence(text, scores or [float(i + 1) for i in range(len(pieces))], tokens=tokens, offsets=[pieces])
    return w.words(e)


def test_word_pieces_are_merged_to_words_with_sum_of_scores():
    result, rest = merged_words("unforgivable film.", [(0, 2), (2, 9), (9, 12), (13, 17), (17, 18)], [1.0, -4.5, 2.0, 0.5, 0.1])
    assert [(x.text, x.score) for x in result] == [("unforgivable", -1.5), ("film", 0.5), (".", pytest.approx(0.1))]
    assert result[0].parts == (("un", 1.0), ("forgiva", -4.5), ("ble", 2.0))
    assert rest == ""


def test_tokens_without_text_belong_to_the_character_that_they_begin():
    pieces = ["", "北", "", "京", " ", "", "🎉", " ok", ""]
    words = [(0, 2), (2, 5), (5, 7), (7, 8), (8, 9)]  # the character of the last is unfinished
    assert units.words_of(pieces, ()) == units.words_of(pieces, {2}) == words
    assert [places for _, _, places in units.word_groups(*units.joined(pieces))] == [[0, 1], [2, 3], [5, 6], [7], [8]]
    assert units.sentences_of(["a", "。", "", "北"], ()) == [(0, 2), (2, 4)]


def test_emoji_has_sum_of_scores_of_its_bytes():
    """One byte has a positive score and the others negative ones; the sum is negative."""
    pieces = [(0, 4), (5, 6), (5, 6), (5, 6), (5, 6)]
    result, _ = merged_words("good 😀", pieces, [0.5, 0.67, -0.6, -0.5, -0.27])
    assert [x.score for x in result] == pytest.approx([0.5, -0.7])
    assert [x.hue for x in result] == ["for", "against"] and result[1].unit == -1
    assert scale_of(sentence("good 😀", [0.5, 0.67, -0.6, -0.5, -0.27], tokens=[list("gabcd")], offsets=[pieces])).limit == pytest.approx(0.7)


@pytest.mark.parametrize("method", ["lrp_ah_ln", "rollout", "saliency", "occlusion"])
def test_words_add_up_to_scores_for_any_method(method):
    e = whyformer.explain("bundled:sst2", "Unforgivably overlong 😀 yet charmingly acted.", method)
    result, _ = w.words(e)
    assert any(len(x.parts) > 1 for x in result)
    assert [(x.text, x.score) for x in result] == e.words()
    specials = w.special_tokens(e)
    assert sum(x.score for x in result) + (specials.score if specials else 0) == pytest.approx(float(e.scores.sum()), rel=1e-4, abs=1e-6)
    assert max(abs(x.unit) for x in result) == pytest.approx(1)


def test_words_reconstruct_text():
    text = "  Well,\tit's   fine —\nreally?  "
    e = sentence(text)
    result, rest = w.words(e)
    assert "".join(x.gap + x.text for x in result) + rest == text


def test_chinese_tokens_are_not_merged():
    result, _ = merged_words("这部电影", [(0, 1), (1, 2), (2, 3), (3, 4)])
    assert len(result) == 4


def test_tokens_of_same_character_are_merged():
    """Byte-level tokenizers split an emoji into bytes, all with the offsets of the whole character."""
    result, _ = merged_words("a 😀", [(0, 1), (2, 3), (2, 3), (2, 3)])
    assert [x.text for x in result] == ["a", "😀"]


def test_combining_mark_is_not_split_off():
    result, _ = merged_words("नमस्ते", [(0, 3), (3, 6)])
    assert len(result) == 1


WORDS = {
    "Devanagari": "नमस्ते दुनिया क्षत्रिय हिन्दी",
    "Bengali": "বাংলা ভাষা",
    "Tamil": "தமிழ் மொழி",
    "Arabic with diacritics": "مُحَمَّدٌ الْعَرَبِيَّةُ",
    "Persian with zero-width non-joiners": "می\u200cخواهم کتاب\u200cها",
    "Hebrew with points": "שָׁלוֹם עוֹלָם",
    "Vietnamese, decomposed": unicodedata.normalize("NFD", "tiếng Việt"),
    "soft hyphens": "Donau\u00addampf\u00adschiff fahrt",
    "emoji with skin tones": "👍🏽 👩🏿‍🚀",
    "joined emoji": "👨‍👩‍👧‍👦 ❤️‍🔥",
    "keycaps and flags": "1️⃣ 🏴󠁧󠁢󠁥󠁮󠁧󠁿 🇩🇪",
    "Korean": "한국어 문장",
}


@pytest.mark.parametrize("text", WORDS.values(), ids=WORDS)
def test_words_between_spaces_are_not_split(text):
    """Whichever characters begin a token, the words are those between spaces."""
    draws = random.Random(0)
    for share in (1, 0.7, 0.4):
        starts = [i for i, c in enumerate(text) if c != " " and (i == 0 or text[i - 1] == " " or draws.random() < share)]
        pieces = [(a, a + len(text[a:b].rstrip(" "))) for a, b in pairwise([*starts, len(text)])]
        assert [x.text for x in merged_words(text, pieces)[0]] == text.split(" ")
        ranges = units.words_of([text[a:b] for a, b in pairwise([*starts, len(text)])], ())
        assert ["".join(text[pieces[i][0] : pieces[i][1]] for i in range(*r)) for r in ranges] == text.split(" ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("กำน้ำเธอ", ["กำ", "น้ำ", "เธ", "อ"]), ("ນໍ້າ", ["ນໍ້າ"]), ("ក្ក", ["ក្ក"]), ("ဗုဒ္ဓ", ["ဗု", "ဒ္ဓ"]),
        ("🇩🇪🇫🇷🇮", ["🇩🇪", "🇫🇷", "🇮"]), ("a🇩🇪", ["a", "🇩🇪"]), ("👍🏽👍", ["👍🏽", "👍"]), ("ok👍🏽", ["ok", "👍🏽"]), ("👍🏽ok", ["👍🏽", "ok"]),
        ("a\u200bb", ["a", "\u200b", "b"]), ("é!", ["é", "!"]), ("が行", ["が", "行"]), ("x́-y", ["x́", "-", "y"]),
    ],
)  # fmt: skip
def test_characters_of_several_code_points_are_not_split(text, expected):
    assert [x.text for x in merged_words(text, [(i, i + 1) for i in range(len(text))])[0]] == expected


def test_leading_space_of_byte_level_token_is_not_part_of_word():
    result, _ = merged_words("a film", [(0, 1), (1, 6)])
    assert [(x.gap, x.text) for x in result] == [("", "a"), (" ", "film")]


def test_truncated_text_is_returned_separately():
    e = sentence("good film", [0, 1.0, 0], tokens=[["[CLS]", "good", "[SEP]"]], offsets=[[(0, 0), (0, 4), (0, 0)]])
    assert w.words(e)[1] == " film"


def test_tokens_without_padding_are_shown_if_offsets_are_missing():
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
def test_visible_escapes_control_characters(raw, shown):
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
def test_heading_shortens_long_name_but_not_probability(limit):
    heading = w.heading(picture(labels={0: "cat", 1: "Greater Swiss Mountain dog", 2: "emu"}), limit=limit)
    assert heading.startswith("Why “Gre")
    assert heading.endswith("”? 90.9 %")
    assert len(heading) <= max(limit, len("Why “Gre…”? 90.9 %"))


def test_right_to_left_name_is_isolated_from_number():
    """Without the isolate, the number would be displayed inside the name."""
    before, _, after = w.heading(picture(labels={0: "cat", 1: "كلب", 2: "emu"})).partition("\u2068كلب\u2069")
    assert (before, after) == ("Why “", "”? 90.9 %")


def test_bfloat16_scores_are_converted():
    assert w.array(torch.tensor([0.5], dtype=torch.bfloat16)).tolist() == [0.5]


def test_tokens_and_scores_of_different_length_raise():
    for change in ({"tokens": [["too", "few"]]}, {"offsets": [[(0, 1)]]}, {"tokens": [["a"]], "offsets": None}):
        with pytest.raises(InputError, match="do not fit together"):
            w.words(sentence("good film", **change))


def test_word_has_positions_unit_score_and_texts():
    result, _ = merged_words("unforgivable film", [(0, 2), (2, 12), (13, 17)], [1.0, -4.0, 2.0])
    assert [x.places for x in result] == [(0, 1), (2,)]
    assert [x.unit for x in result] == pytest.approx([-1.0, 2 / 3])
    assert (result[0].value, result[0].sum, result[1].sum) == ("-3", "un (1) + forgivable (-4)", "")


@pytest.mark.parametrize("agnostic", [False, True])
def test_remarks_of_several_maps_name_each_class_once(agnostic):
    figures = {"followed": 1, "curve": [0.9, 0.1], "verdict": "Better than each random map.", "warnings": []}
    maps = [picture(method=m, diagnostics={"trust": [figures], "class_specific": not agnostic}) for m in ("gae", "rollout")]
    (single,) = w.remarks(maps[:1])
    assert single == "measured for dog: Better than each random map."
    for line in w.remarks(maps):
        assert line.endswith(": Better than each random map.")
        assert line.count("dog") == 1
        assert ("measured for" in line) is agnostic  # the map is the same for every class, and one is measured

"""Special tokens have scores; drawings of words state their share."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from matplotlib import pyplot
from rich.console import Console
from transformers import BertConfig, BertForSequenceClassification

import whyformer
from show.builders import sentence
from whyformer import show
from whyformer.explanation.joining import joined
from whyformer.explanation.result import Explanation
from whyformer.models.loading import load
from whyformer.show import colours, html, terminal, words

TEXTS = ["A gripping , beautiful film .", "Dull ."]


@pytest.fixture(scope="module")
def model() -> Any:
    """A BERT without biases in float64, so that gradient x input of all tokens adds up."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(load("bundled:sst2").processor), num_labels=3, initializer_range=0.3, **sizes)
    return BertForSequenceClassification(config).double().eval()


def shown(e: Explanation, color: str | None) -> str:
    stream = io.StringIO()
    Console(file=stream, width=100, color_system=color, force_terminal=color is not None, highlight=False).print(terminal.render(e))
    return re.sub(r"\x1b\[[\d;]*m", "", stream.getvalue())


@pytest.mark.parametrize("method", ["input_x_gradient", "attnlrp", "lrp", "rollout", "transformer_attribution", "decompx", "value_zeroing", "attcat"])
@pytest.mark.parametrize("texts", [TEXTS[:1], TEXTS], ids=["one", "two"])
def test_a_text_has_the_scores_of_its_ids(model: Any, method: str, texts: list[str]) -> None:
    tokenizer = load("bundled:sst2").processor
    from_text = whyformer.explain(model, texts, method, 1, tokenizer)
    from_ids = whyformer.explain(model, dict(tokenizer(texts, return_tensors="pt", padding=True)), method, 1)
    assert torch.equal(from_text.scores, from_ids.scores)
    assert from_ids.special is None
    assert bool((from_text.scores[:, 0] != 0).all())


@pytest.mark.parametrize("text", TEXTS)
def test_scores_of_a_text_add_up(model: Any, text: str) -> None:
    """Scores add up to the sum that the method guarantees, and so do words with special tokens."""
    e = whyformer.explain(model, text, "integrated_gradients", 1, load("bundled:sst2").processor)
    assert float(e.scores.sum()) == pytest.approx(e.diagnostics["completeness"]["sum"][0], abs=1e-12)
    aside = words.special_tokens(e)
    assert aside is not None
    assert sum(word.score for word in words.words(e)[0]) + aside.score == pytest.approx(float(e.scores.sum()), abs=1e-12)


def test_what_they_hold_is_their_share_of_all_scores() -> None:
    e = sentence("good bad", [0.3, 2.0, -1.0, -0.7], special=[[0, 3]])
    aside = words.special_tokens(e)
    assert aside is not None
    assert aside.text == "special tokens 25 %"
    assert aside.score == pytest.approx(-0.4)
    assert aside.parts == (("[CLS]", pytest.approx(0.3)), ("[SEP]", pytest.approx(-0.7)))
    assert words.special_tokens(sentence("good bad", [0, 2.0, -1.0, 0], special=[[0, 3]])) is None
    small = words.special_tokens(sentence("good bad", [0, 2.0, -1.0, 0.001], special=[[0, 3]]))
    assert small is not None
    assert small.text == "special tokens < 1 %"


def test_they_are_no_words_and_set_no_scale() -> None:
    """Neither where the words of the text are known, nor where only tokens are."""
    e = sentence("good bad", [90.0, 2.0, -1.0, 50.0], special=[[0, 3]])
    bare = replace(e, features=replace(e.features, offsets=None, texts=None))
    for one in (e, bare):
        assert [(word.text, word.unit) for word in words.words(one)[0]] == [("good", 1.0), ("bad", -0.5)]
        assert colours.scale_of(one).limit == 2.0


def test_a_line_break_belongs_to_no_word_and_is_counted() -> None:
    e = sentence("good bad", [0.0, 2.0, -1.0, 1.0], special=[[0]])  # the last token has no characters, and is not special
    aside = words.special_tokens(e)
    assert aside is not None
    assert aside.text == "tokens outside of words 25 %"


@pytest.mark.parametrize(("method", "settings", "share"), [
    ("transformer_attribution", {}, False), ("transformer_attribution", {"normalize_rows": True}, True),
    ("transformer_attribution", {"block": -1}, True), ("gae", {}, False), ("gae", {"aggregation": {"layers": "mean"}}, True),
    ("rollout", {}, True), ("rollout", {"normalize_rows": False}, False), ("raw_attention", {}, True),
])  # fmt: skip
def test_no_share_is_given_of_the_1_that_a_product_starts_with(method: str, settings: dict[str, Any], share: bool) -> None:
    """It is no relevance, and would make up nearly all of the sum."""
    e = whyformer.explain("bundled:sst2", TEXTS[0], method, **settings)
    aside = words.special_tokens(e)
    assert aside is not None
    assert ("%" in aside.text) == share
    if not share:
        assert float(e.scores[0, 0]) >= 1


def test_every_view_says_what_they_hold() -> None:
    e = whyformer.explain("bundled:sst2", TEXTS[0], "attnlrp")
    aside = words.special_tokens(e)
    assert aside is not None
    assert aside.text in str(e)
    assert aside.text in shown(e, "truecolor")
    assert aside.text in shown(e, None)
    assert aside.text in html.page([e])
    assert aside.text in e._repr_html_()
    figure = show.figure([e])
    try:
        assert aside.text in [text.get_text() for text in figure.texts]
    finally:
        pyplot.close(figure)


def test_places_are_kept(tmp_path: Any) -> None:
    """In files, in JSON, in one sample of a batch, and where samples are joined to a batch."""
    e = whyformer.explain("bundled:sst2", TEXTS, "attnlrp")
    assert e.special == [[0, 7], [0, 3]]
    assert e[1].special == [[0, 3]]
    assert Explanation.load(e.save(tmp_path / "e.safetensors")).special == e.special
    assert Explanation.from_dict(e.to_dict()).special == e.special
    old = {name: value for name, value in e.to_dict().items() if name != "special"}  # as an earlier version wrote it
    assert Explanation.from_dict(old).special is None
    alone = [whyformer.explain("bundled:sst2", text, "attnlrp") for text in TEXTS]
    assert joined(alone, "[PAD]").special == e.special
    assert joined(alone, "[PAD]", left=True).special == [[0, 7], [4, 7]]

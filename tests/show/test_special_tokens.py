"""Special tokens have scores, and drawings of words state their share."""

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


def print_to_terminal(e: Explanation, color: str | None) -> str:
    stream = io.StringIO()
    Console(file=stream, width=100, color_system=color, force_terminal=color is not None, highlight=False).print(terminal.render(e))
    return re.sub(r"\x1b\[[\d;]*m", "", stream.getvalue())


@pytest.mark.parametrize("method", ["input_x_gradient", "attnlrp", "lrp", "rollout", "transformer_attribution", "decompx", "value_zeroing", "attcat"])
@pytest.mark.parametrize("texts", [TEXTS[:1], TEXTS], ids=["one", "two"])
def test_text_has_scores_of_its_token_ids(model: Any, method: str, texts: list[str]) -> None:
    tokenizer = load("bundled:sst2").processor
    from_text = whyformer.explain(model, texts, method, 1, tokenizer)
    from_ids = whyformer.explain(model, dict(tokenizer(texts, return_tensors="pt", padding=True)), method, 1)
    assert torch.equal(from_text.scores, from_ids.scores)
    assert from_ids.special is None
    assert bool((from_text.scores[:, 0] != 0).all())


@pytest.mark.parametrize("text", TEXTS)
def test_scores_of_words_and_special_tokens_add_up(model: Any, text: str) -> None:
    """Scores add up to the sum that the method guarantees, and so do words with special tokens."""
    e = whyformer.explain(model, text, "integrated_gradients", 1, load("bundled:sst2").processor)
    assert float(e.scores.sum()) == pytest.approx(e.diagnostics["completeness"]["sum"][0], abs=1e-12)
    specials = words.special_tokens(e)
    assert specials is not None
    assert sum(word.score for word in words.words(e)[0]) + specials.score == pytest.approx(float(e.scores.sum()), abs=1e-12)


def test_special_tokens_state_their_share_of_all_scores() -> None:
    e = sentence("good bad", [0.3, 2.0, -1.0, -0.7], special=[[0, 3]])
    specials = words.special_tokens(e)
    assert specials is not None
    assert specials.text == "special tokens 25 %"
    assert specials.score == pytest.approx(-0.4)
    assert specials.parts == (("[CLS]", pytest.approx(0.3)), ("[SEP]", pytest.approx(-0.7)))
    assert words.special_tokens(sentence("good bad", [0, 2.0, -1.0, 0], special=[[0, 3]])) is None
    small = words.special_tokens(sentence("good bad", [0, 2.0, -1.0, 0.001], special=[[0, 3]]))
    assert small is not None
    assert small.text == "special tokens < 1 %"


def test_special_tokens_are_not_words_and_set_no_scale() -> None:
    """With words of a text, and with tokens only."""
    e = sentence("good bad", [90.0, 2.0, -1.0, 50.0], special=[[0, 3]])
    bare = replace(e, features=replace(e.features, offsets=None, texts=None))
    for explanation in (e, bare):
        assert [(word.text, word.unit) for word in words.words(explanation)[0]] == [("good", 1.0), ("bad", -0.5)]
        assert colours.scale_of(explanation).limit == 2.0


def test_token_outside_words_is_counted() -> None:
    e = sentence("good bad", [0.0, 2.0, -1.0, 1.0], special=[[0]])  # the last token has no characters, and is not special
    specials = words.special_tokens(e)
    assert specials is not None
    assert specials.text == "tokens outside of words 25 %"


@pytest.mark.parametrize(("method", "settings", "share"), [
    ("transformer_attribution", {}, False), ("transformer_attribution", {"normalize_rows": True}, True),
    ("transformer_attribution", {"block": -1}, True), ("gae", {}, False), ("gae", {"aggregation": {"layers": "mean"}}, True),
    ("rollout", {}, True), ("rollout", {"normalize_rows": False}, False), ("raw_attention", {}, True),
])  # fmt: skip
def test_share_is_omitted_if_scores_include_identity(method: str, settings: dict[str, Any], share: bool) -> None:
    """The identity at the start of a product is not relevance, and would dominate the sum."""
    e = whyformer.explain("bundled:sst2", TEXTS[0], method, **settings)
    specials = words.special_tokens(e)
    assert specials is not None
    assert ("%" in specials.text) == share
    if not share:
        assert float(e.scores[0, 0]) >= 1


def test_every_view_states_share_of_special_tokens() -> None:
    e = whyformer.explain("bundled:sst2", TEXTS[0], "attnlrp")
    specials = words.special_tokens(e)
    assert specials is not None
    assert specials.text in str(e)
    assert specials.text in print_to_terminal(e, "truecolor")
    assert specials.text in print_to_terminal(e, None)
    assert specials.text in html.page([e])
    assert specials.text in e._repr_html_()
    figure = show.figure([e])
    try:
        assert specials.text in [text.get_text() for text in figure.texts]
    finally:
        pyplot.close(figure)


def test_positions_of_special_tokens_are_preserved(tmp_path: Any) -> None:
    """In files, in JSON, in a sample of a batch, and in a batch joined from samples."""
    e = whyformer.explain("bundled:sst2", TEXTS, "attnlrp")
    assert e.special == [[0, 7], [0, 3]]
    assert e[1].special == [[0, 3]]
    assert Explanation.load(e.save(tmp_path / "e.safetensors")).special == e.special
    assert Explanation.from_dict(e.to_dict()).special == e.special
    older = {name: value for name, value in e.to_dict().items() if name != "special"}  # files of older versions
    assert Explanation.from_dict(older).special is None
    singles = [whyformer.explain("bundled:sst2", text, "attnlrp") for text in TEXTS]
    assert joined(singles, "[PAD]").special == e.special
    assert joined(singles, "[PAD]", pad_left=True).special == [[0, 7], [4, 7]]

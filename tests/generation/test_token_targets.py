"""Tokens by their text: one, several as a span, contrasts; and what of them is explained."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import whyformer
import zoo
from whyformer import targets
from whyformer.errors import InputError

PROMPT = "<s>Once upon a time, there was a little"


@cache
def loaded(shared: Path) -> tuple[Any, Any]:
    folder = shared / "weights" / "stories260k"
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval(), transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def story(shared: Path) -> tuple[Any, Any]:
    """A small language model that was trained, and its tokenizer."""
    return loaded(shared)


def one(story: tuple[Any, Any], target: Any) -> whyformer.Explanation:
    return whyformer.explain(story[0], PROMPT, "input_x_gradient", target, story[1])


def number(story: tuple[Any, Any], text: str) -> int:
    (found,) = story[1].encode(text, add_special_tokens=False)
    return int(found)


@pytest.mark.parametrize("said", [" was", "Token(-1, ' was')", targets.Token(-1, " was"), '" was"'])
def test_a_token_is_named_by_its_text(story: tuple[Any, Any], said: Any) -> None:
    was = number(story, "was")
    e, by_number = one(story, said), one(story, was)
    assert e.target.tolist() == [was]
    assert torch.equal(e.scores, by_number.scores)
    assert (e.target_names or [""])[0].startswith("' was'")


@pytest.mark.parametrize("kind", ["log_probability", "probability", "logit"])
def test_what_of_a_token_is_explained(story: tuple[Any, Any], kind: str) -> None:
    was = number(story, "was")
    of_row = {"log_probability": targets.LogProbability, "probability": targets.Probability, "logit": targets.Logit}[kind]
    e = one(story, targets.Token(-1, " was", of=kind))
    assert torch.equal(e.scores, one(story, of_row(was)).scores)
    assert e.diagnostics["target"] == [f"Token(position=-1, token={was}, of='{kind}')"]
    likeliest = one(story, targets.Token(-1, of=kind))
    assert torch.equal(likeliest.scores, one(story, of_row(int(e.logits.argmax()))).scores)
    with pytest.raises(InputError, match="of must be one of"):
        targets.Token(-1, 3, of="odds")


def test_a_contrast_of_tokens_by_their_text(story: tuple[Any, Any]) -> None:
    a, b = number(story, "was"), number(story, "there")
    e = one(story, targets.Contrast(" was", " there"))
    assert torch.equal(e.scores, one(story, targets.Contrast(a, b)).scores)
    assert e.target_names == ["' was' rather than ' there'"]
    again = one(story, e.diagnostics["target"])
    assert torch.equal(again.scores, e.scores)
    assert torch.equal(one(story, "Contrast(' was', ' there')").scores, e.scores)
    with pytest.raises(InputError, match=r"is \d+ tokens"):
        one(story, targets.Contrast(" was", " zebra"))


@pytest.mark.parametrize("said", [" girl named", targets.Token(-1, " girl named")])
def test_a_text_of_several_tokens_is_a_span_and_said(story: tuple[Any, Any], said: Any) -> None:
    model, tokenizer = story
    ids = tokenizer(PROMPT)["input_ids"]
    more = tokenizer.encode("girl named", add_special_tokens=False)
    e = one(story, said)
    fed = {"input_ids": torch.tensor([[*ids, *more]])}
    same = whyformer.explain(model, fed, "input_x_gradient", targets.Span(len(ids), len(ids) + len(more) - 1), tokenizer)
    assert torch.equal(e.scores, same.scores)
    rows = model(**fed).logits.detach()[0, len(ids) - 1 : -1].log_softmax(-1)
    assert float(e.logits) == pytest.approx(float(sum(rows[i, t] for i, t in enumerate(more))))
    assert "tokens" in e.diagnostics["input"][0][0]
    assert e.texts == [PROMPT + " girl named"]
    assert len((e.tokens or [[]])[0]) == e.scores.shape[1] == len(ids) + len(more)


def test_a_span_cannot_stand_behind_padding(story: tuple[Any, Any]) -> None:
    model, tokenizer = story
    ids, mask = torch.tensor([[1, 403, 407], [1, 403, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    with pytest.raises(InputError, match="padded on the right"):
        whyformer.explain(model, {"input_ids": ids, "attention_mask": mask}, "input_x_gradient", " girl named", tokenizer)
    left = {"input_ids": ids.flip(1), "attention_mask": mask.flip(1)}
    e = whyformer.explain(model, left, "input_x_gradient", " girl named", tokenizer)
    assert len(e) == 2


def test_spaces_before_tokens_are_visible(story: tuple[Any, Any]) -> None:
    e = one(story, None)
    assert any(name.startswith("' ") for _, name, _, _ in e.top(0, 10))


def test_a_prompt_as_text_and_where_a_merge_went(story: tuple[Any, Any]) -> None:
    model, tokenizer = story
    g = whyformer.explain_generation(model, PROMPT, method="input_x_gradient", processor=tokenizer, max_new_tokens=4)
    assert g.prompt.replace("<s> ", "<s>") == PROMPT
    given = whyformer.explain_generation(model, PROMPT, g.text, "input_x_gradient", tokenizer)
    assert (given.ids, given.notes) == (g.ids, [])
    assert torch.allclose(given.matrix, g.matrix)
    merged = whyformer.explain_generation(model, PROMPT[:-3], "tle girl", "input_x_gradient", tokenizer)
    assert "".join(merged.pieces).replace("<s> ", "<s>") == PROMPT[:-3] + "tle girl"
    assert "merges the end of the prompt" in merged.notes[0]
    assert "merges" in merged[0].diagnostics["input"][0][0]
    with pytest.raises(InputError, match="no chat template"):
        whyformer.explain_generation(model, [{"role": "user", "content": "Hi"}], processor=tokenizer)


def test_the_default_is_auto_of_the_log_probability(story: tuple[Any, Any]) -> None:
    model, tokenizer = story
    g = whyformer.explain_generation(model, PROMPT, processor=tokenizer, max_new_tokens=2)
    assert (g.method, g.explained) == ("auto", "log-probability")
    assert g[0].diagnostics["auto"]["name"] == "attnlrp (share=0.8)"
    token = g.ids[g.start]
    e = whyformer.explain(model, PROMPT, "attnlrp", targets.LogProbability(token), tokenizer, share=0.8)
    torch.testing.assert_close(g[0].scores, e.scores, atol=1e-10, rtol=1e-10)


def test_a_masked_model_takes_single_tokens_only() -> None:
    class Letters:
        vocab_size = zoo.VOCABULARY

        def convert_ids_to_tokens(self, ids: Any) -> Any:
            return [chr(97 + i) for i in ids]

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [4 for _ in text]

        def get_vocab(self) -> dict[str, int]:
            return {}

    model, inputs = zoo.gpt2()
    with pytest.raises(InputError):
        whyformer.explain(model, inputs, "input_x_gradient", targets.Token(-1, "ab"), Letters())


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (512, "token 512 is out of range: the vocabulary has 512 tokens, 0 to 511"),
        (targets.LogProbability(600), "token 600 is out of range"),
        (targets.Contrast(3, 600), "token 600 is out of range"),
        (targets.Token(-1, 600, of="log_probability"), "token 600 is out of range"),
        (targets.Token(99, 3), "position 99 is outside sample 0, which has .* tokens"),
        (targets.Span(3, 99), "position 99 is outside sample 0"),
        (targets.Span(4, 3), "the span ends at 3, before its start at 4"),
        (targets.Span(0, 3), "a span must start at 1 or later"),
    ],
)
def test_what_is_outside_is_told_in_words_of_texts(story: tuple[Any, Any], target: Any, said: str) -> None:
    model, tokenizer = story
    with pytest.raises(InputError, match=said):
        whyformer.explain(model, PROMPT, "attnlrp", target, tokenizer)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prompt": "   "}, "the prompt is empty"),
        ({"prompt": PROMPT * 200}, "the model takes at most 512: shorten them"),
        ({"continuation": " girl" * 600}, "the model takes at most 512: shorten them"),
        ({"continuation": ""}, "the continuation is empty"),
        ({"continuation": [3], "target": targets.Contrast(3, 600)}, "token 600 is out of range"),
    ],
)
def test_bad_texts_are_told_in_a_sentence(story: tuple[Any, Any], given: dict[str, Any], said: str) -> None:
    model, tokenizer = story
    with pytest.raises(InputError, match=said):
        whyformer.explain_generation(model, **{"prompt": PROMPT, **given}, processor=tokenizer)

"""Token targets by text: single tokens, spans, contrasts, and their log-probability, probability or logit."""

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
    """A small trained language model and its tokenizer."""
    return loaded(shared)


def explained(story: tuple[Any, Any], target: Any) -> whyformer.Explanation:
    return whyformer.explain(story[0], PROMPT, "input_x_gradient", target, story[1])


def token_id(story: tuple[Any, Any], text: str) -> int:
    (found,) = story[1].encode(text, add_special_tokens=False)
    return int(found)


@pytest.mark.parametrize("said", [" was", "Token(-1, ' was')", targets.Token(-1, " was"), '" was"'])
def test_token_target_by_text_equals_id(story: tuple[Any, Any], said: Any) -> None:
    was = token_id(story, "was")
    e, by_id = explained(story, said), explained(story, was)
    assert e.target.tolist() == [was]
    assert torch.equal(e.scores, by_id.scores)
    assert (e.target_names or [""])[0].startswith("' was'")


@pytest.mark.parametrize("kind", ["log_probability", "probability", "logit"])
def test_token_target_of_log_probability_probability_or_logit(story: tuple[Any, Any], kind: str) -> None:
    was = token_id(story, "was")
    of_row = {"log_probability": targets.LogProbability, "probability": targets.Probability, "logit": targets.Logit}[kind]
    e = explained(story, targets.Token(-1, " was", of=kind))
    assert torch.equal(e.scores, explained(story, of_row(was)).scores)
    assert e.diagnostics["target"] == [f"Token(position=-1, token={was}, of='{kind}')"]
    likeliest = explained(story, targets.Token(-1, of=kind))
    assert torch.equal(likeliest.scores, explained(story, of_row(int(e.logits.argmax()))).scores)
    with pytest.raises(InputError, match="of must be one of"):
        targets.Token(-1, 3, of="odds")


def test_contrast_of_tokens_by_text(story: tuple[Any, Any]) -> None:
    a, b = token_id(story, "was"), token_id(story, "there")
    e = explained(story, targets.Contrast(" was", " there"))
    assert torch.equal(e.scores, explained(story, targets.Contrast(a, b)).scores)
    assert e.target_names == ["' was' rather than ' there'"]
    repeated = explained(story, e.diagnostics["target"])
    assert torch.equal(repeated.scores, e.scores)
    assert torch.equal(explained(story, "Contrast(' was', ' there')").scores, e.scores)
    with pytest.raises(InputError, match=r"is \d+ tokens"):
        explained(story, targets.Contrast(" was", " zebra"))


@pytest.mark.parametrize("said", [" girl named", targets.Token(-1, " girl named")])
def test_text_of_several_tokens_is_a_span_with_a_note(story: tuple[Any, Any], said: Any) -> None:
    model, tokenizer = story
    ids = tokenizer(PROMPT)["input_ids"]
    more = tokenizer.encode("girl named", add_special_tokens=False)
    e = explained(story, said)
    inputs = {"input_ids": torch.tensor([[*ids, *more]])}
    expected = whyformer.explain(model, inputs, "input_x_gradient", targets.Span(len(ids), len(ids) + len(more) - 1), tokenizer)
    assert torch.equal(e.scores, expected.scores)
    rows = model(**inputs).logits.detach()[0, len(ids) - 1 : -1].log_softmax(-1)
    assert float(e.logits) == pytest.approx(float(sum(rows[i, t] for i, t in enumerate(more))))
    assert "tokens" in e.diagnostics["input"][0][0]
    assert e.texts == [PROMPT + " girl named"]
    assert len((e.tokens or [[]])[0]) == e.scores.shape[1] == len(ids) + len(more)


def test_span_behind_padding_raises(story: tuple[Any, Any]) -> None:
    model, tokenizer = story
    ids, mask = torch.tensor([[1, 403, 407], [1, 403, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    with pytest.raises(InputError, match="padded on the right"):
        whyformer.explain(model, {"input_ids": ids, "attention_mask": mask}, "input_x_gradient", " girl named", tokenizer)
    left = {"input_ids": ids.flip(1), "attention_mask": mask.flip(1)}
    e = whyformer.explain(model, left, "input_x_gradient", " girl named", tokenizer)
    assert len(e) == 2


def test_token_names_show_leading_spaces(story: tuple[Any, Any]) -> None:
    e = explained(story, None)
    assert any(name.startswith("' ") for _, name, _, _ in e.top(0, 10))


def test_prompt_as_text_and_merged_tokens(story: tuple[Any, Any]) -> None:
    model, tokenizer = story
    g = whyformer.explain_generation(model, PROMPT, method="input_x_gradient", processor=tokenizer, max_new_tokens=4)
    assert g.prompt.replace("<s> ", "<s>") == PROMPT
    continued = whyformer.explain_generation(model, PROMPT, g.text, "input_x_gradient", tokenizer)
    assert (continued.ids, continued.notes) == (g.ids, [])
    assert torch.allclose(continued.matrix, g.matrix)
    merged = whyformer.explain_generation(model, PROMPT[:-3], "tle girl", "input_x_gradient", tokenizer)
    assert "".join(merged.pieces).replace("<s> ", "<s>") == PROMPT[:-3] + "tle girl"
    assert "merges the end of the prompt" in merged.notes[0]
    assert "merges" in merged[0].diagnostics["input"][0][0]
    with pytest.raises(InputError, match="no chat template"):
        whyformer.explain_generation(model, [{"role": "user", "content": "Hi"}], processor=tokenizer)


def test_default_method_is_auto_on_log_probability(story: tuple[Any, Any]) -> None:
    model, tokenizer = story
    g = whyformer.explain_generation(model, PROMPT, processor=tokenizer, max_new_tokens=2)
    assert (g.method, g.explained) == ("auto", "log-probability")
    assert g[0].diagnostics["auto"]["name"] == "attnlrp (share=0.8)"
    token = g.ids[g.start]
    e = whyformer.explain(model, PROMPT, "attnlrp", targets.LogProbability(token), tokenizer, share=0.8)
    torch.testing.assert_close(g[0].scores, e.scores, atol=1e-10, rtol=1e-10)


def test_classifier_refuses_target_of_several_tokens() -> None:
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
    ("target", "message"),
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
def test_token_target_out_of_range_raises(story: tuple[Any, Any], target: Any, message: str) -> None:
    model, tokenizer = story
    with pytest.raises(InputError, match=message):
        whyformer.explain(model, PROMPT, "attnlrp", target, tokenizer)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompt": "   "}, "the prompt is empty"),
        ({"prompt": PROMPT * 200}, "takes at most 512 tokens. Shorten the prompt"),
        ({"continuation": " girl" * 600}, "takes at most 512 tokens, so shorten the answer"),
        ({"continuation": ""}, "the continuation is empty"),
        ({"continuation": [3], "target": targets.Contrast(3, 600)}, "token 600 is out of range"),
    ],
)
def test_invalid_prompt_or_continuation_raises(story: tuple[Any, Any], given: dict[str, Any], message: str) -> None:
    model, tokenizer = story
    with pytest.raises(InputError, match=message):
        whyformer.explain_generation(model, **{"prompt": PROMPT, **given}, processor=tokenizer)


@pytest.mark.parametrize("settings", [{"stop_strings": ["."]}, {"num_return_sequences": 2, "do_sample": True}, {"num_return_sequences": 3, "num_beams": 3}])
def test_generation_config_for_other_ways_to_generate(
    settings: dict[str, Any], story: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    language_model, tokenizer = story
    greedy: Any = whyformer.explain_generation(language_model, PROMPT, None, "input_x_gradient", tokenizer, max_new_tokens=12)
    for name, value in settings.items():
        monkeypatch.setattr(language_model.generation_config, name, value)
    g: Any = whyformer.explain_generation(language_model, PROMPT, None, "input_x_gradient", tokenizer, max_new_tokens=12)
    expected = greedy.text[: greedy.text.index(".") + 1] if "stop_strings" in settings else greedy.text
    assert g.text == expected
    if "stop_strings" in settings:  # which generate cannot find in ids
        with pytest.raises(InputError, match="processor"):
            whyformer.explain_generation(language_model, g.ids[: g.start], max_new_tokens=2)

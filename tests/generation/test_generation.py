"""explain_generation(): each step equals ``explain`` on the preceding tokens; kinds of prompts; errors."""

from __future__ import annotations

import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers

import whyformer
import zoo
from architectures import SETTINGS, Architecture
from whyformer import targets
from whyformer.errors import InputError, LoadError
from whyformer.explanation.generation import Generation
from whyformer.generation.steps import Steps
from whyformer.methods import METHODS

PROMPT = [2, 9, 5, 17, 30]
ANSWER = [8, 11, 4, 25]
SOURCE = [6, 7, 8, 9, 3]
SINGLE_PASS_METHODS = ("saliency", "input_x_gradient", "lrp_ah", "lrp_ah_ln", "lrp", "attnlrp", "cp_lrp", "gim", "libragrad", "auto")


@cache
def model(name: str) -> Any:
    """A tiny random model in float64."""
    shape = {
        "vocab_size": zoo.VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 40,
        "decoder_start_token_id": 3, "pad_token_id": 0, "eos_token_id": 1, "forced_eos_token_id": None,
    }  # fmt: skip
    if name in ("llama_lm", "gpt2_lm", "t5"):
        return getattr(zoo, name)()[0].double()
    kind, config = {"bart": ("BartForConditionalGeneration", "BartConfig"), "marian": ("MarianMTModel", "MarianConfig")}[name]
    torch.manual_seed(0)
    return zoo.randomise(getattr(transformers, kind)(getattr(transformers, config)(**shape)).eval()).double()


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-12))


@pytest.mark.part
@pytest.mark.parametrize("method", sorted(n for n, m in METHODS.items() if m.modality != "image"))
@pytest.mark.parametrize("name", ["llama_lm", "gpt2_lm"])
def test_step_equals_explain_on_preceding_tokens(name: str, method: str) -> None:
    language_model = model(name)
    try:
        g = whyformer.explain_generation(language_model, PROMPT, ANSWER[:2], method)
    except whyformer.WhyformerError as error:
        with pytest.raises(type(error)):
            whyformer.explain(language_model, torch.tensor([PROMPT]), method, targets.LogProbability(ANSWER[0]))
        return
    for t, token in enumerate(ANSWER[:2]):
        ids = torch.tensor([[*PROMPT, *ANSWER[:t]]])
        e = whyformer.explain(language_model, ids, method, targets.LogProbability(token))
        assert relative_error(g[t].scores, e.scores) < 1e-10
        assert torch.allclose(g[t].logits, e.logits, atol=1e-12)
        assert g[t].target_names == e.target_names
        assert not g.matrix[t, len(PROMPT) + t :].any()


@pytest.mark.part
@pytest.mark.parametrize("method", [*SINGLE_PASS_METHODS, "gae", "transformer_attribution"])
@pytest.mark.parametrize("name", ["t5", "bart", "marian"])
def test_step_of_encoder_decoder_equals_explain_on_source_and_preceding_tokens(name: str, method: str) -> None:
    language_model = model(name)
    g = whyformer.explain_generation(language_model, SOURCE, ANSWER, method)
    assert (g.source, g.start, g.generated) == (5, 6, slice(6, 10))
    assert g.ids == [*SOURCE, language_model.config.decoder_start_token_id, *ANSWER]
    for t, token in enumerate(ANSWER):
        inputs = {"input_ids": torch.tensor([SOURCE]), "decoder_input_ids": torch.tensor([g.ids[5 : 6 + t]])}
        e = whyformer.explain(language_model, inputs, method, targets.LogProbability(token))
        assert g[t].inputs == e.inputs == ("input_ids", "decoder_input_ids")
        row = torch.cat([e.scores[0], e.parts["decoder_input_ids"].scores[0]])
        for part in e.inputs:  # relative to both inputs: the source may have rounding errors only
            assert float((g[t].part(part).scores - e.part(part).scores).abs().max() / row.abs().max()) < 1e-10
        assert relative_error(g.matrix[t, : len(row)], row) < 1e-10


@pytest.mark.parametrize("method", SINGLE_PASS_METHODS)
def test_all_steps_share_one_forward_pass(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    language_model, lengths, alone = model("llama_lm"), [], Steps._single_step
    whyformer.explain_generation(language_model, PROMPT, ANSWER, method)  # fill the caches of the model
    monkeypatch.setattr(Steps, "_single_step", lambda *a: pytest.fail("a pass for each step"))
    hook = language_model.lm_head.register_forward_hook(lambda module, args, output: lengths.append(output.shape[1]))
    whyformer.explain_generation(language_model, PROMPT, ANSWER, method)
    hook.remove()
    # the pass computes logits of the explained rows only, and is compared with a plain pass of the prompt
    assert lengths[-2:] == [len(ANSWER), 1]
    assert len(lengths) <= 4
    assert alone is not None


@pytest.mark.parametrize("name", ["llama_lm", "t5"])
def test_span_equals_the_sum_of_its_steps_for_linear_methods(name: str) -> None:
    language_model = model(name)
    g = whyformer.explain_generation(language_model, PROMPT, ANSWER, "lrp_ah_ln")
    e = whyformer.explain_span(g, 1, -1, language_model)
    summed = g.matrix[1:].sum(0)
    span_scores = torch.cat([e.scores[0], *(p.scores[0] for p in e.parts.values())])
    assert relative_error(span_scores[: len(summed)], summed[: len(span_scores)]) < (1e-7 if name == "llama_lm" else 1e-10)  # its norms are computed in float32
    assert float(e.logits) == pytest.approx(float(g.value[1:].sum()), abs=1e-10)


@pytest.mark.parametrize(
    ("target", "value"),
    [
        (None, lambda row, token: row.log_softmax(-1)[token]),
        ("logit", lambda row, token: row[token]),
        ("probability", lambda row, token: row.softmax(-1)[token]),
        ("contrast", lambda row, token: row[token] - torch.cat([row[:token], row[token + 1 :]]).max()),
        (targets.Contrast(7, 9), lambda row, token: row[7] - row[9]),
        (lambda row: row[:, 5] ** 2, lambda row, token: row[5] ** 2),
    ],
)
def test_value_of_each_step_by_target(target: Any, value: Any) -> None:
    language_model = model("gpt2_lm")
    g = whyformer.explain_generation(language_model, PROMPT, ANSWER, "input_x_gradient", target=target)
    rows = language_model(torch.tensor([[*PROMPT, *ANSWER]])).logits[0, len(PROMPT) - 1 :].detach()
    for t, token in enumerate(ANSWER):
        assert float(g.value[t]) == pytest.approx(float(value(rows[t], token)), abs=1e-10)
        assert g[t].diagnostics["conservation"]["start"] == pytest.approx([float(g.value[t])], abs=1e-10)


def test_list_of_prompts_equals_single_prompts_without_padding() -> None:
    language_model = model("llama_lm")
    prompts = [PROMPT, PROMPT[:3], [4, 4, 8, 9, 1, 2]]
    several = whyformer.explain_generation(language_model, prompts, [ANSWER, ANSWER[:2], ANSWER], "lrp_ah_ln")
    assert isinstance(several, list)
    for g, prompt, answer in zip(several, prompts, [ANSWER, ANSWER[:2], ANSWER], strict=True):
        alone = whyformer.explain_generation(language_model, prompt, answer, "lrp_ah_ln")
        assert torch.equal(g.matrix, alone.matrix)
    for side in ("left", "right"):
        ids, mask = torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8, dtype=torch.long)
        for row, prompt in enumerate(prompts[:2]):
            columns = slice(8 - len(prompt), 8) if side == "left" else slice(0, len(prompt))
            ids[row, columns], mask[row, columns] = torch.tensor(prompt), 1
        padded = whyformer.explain_generation(language_model, {"input_ids": ids, "attention_mask": mask}, [ANSWER, ANSWER[:2]], "lrp_ah_ln")
        assert [torch.equal(a.matrix, b.matrix) for a, b in zip(padded, several[:2], strict=True)] == [True, True]


def test_generated_tokens_are_the_likeliest_and_model_is_unchanged() -> None:
    language_model = model("llama_lm")
    before = {n: p.requires_grad for n, p in language_model.named_parameters()}
    g = whyformer.explain_generation(language_model, torch.tensor(PROMPT), method="input_x_gradient", max_new_tokens=5)
    assert g.ids[: g.start] == PROMPT
    assert 1 <= len(g) <= 5
    for t in range(len(g)):
        assert g.candidates(t)[0][0] == g.ids[g.start + t]
        assert g.probability(t) == pytest.approx(g.candidates(t)[0][3])
    assert {n: p.requires_grad for n, p in language_model.named_parameters()} == before


def test_merged_units_preserve_the_sum(tmp_path: Path) -> None:
    g = whyformer.explain_generation(model("llama_lm"), PROMPT, ANSWER, "lrp_ah_ln")
    for unit in ("word", "sentence", "turn"):
        merged = g.by(unit)
        assert float(merged.matrix.sum()) == pytest.approx(float(g.matrix.sum()), abs=1e-12)
        assert float(merged.value.sum()) == pytest.approx(float(g.value.sum()), abs=1e-12)
        assert [merged[t].scores.shape[1] for t in range(len(merged))] == [merged.start + t for t in range(len(merged))]
    turns = g.by("turn")
    assert turns.matrix.shape == (1, 2)
    assert float(turns.matrix[0, 0]) == pytest.approx(float(g.matrix[:, :5].sum()))


def test_generation_is_saved_and_loaded(tmp_path: Path) -> None:
    g = whyformer.explain_generation(model("t5"), SOURCE, ANSWER, "lrp_ah_ln")
    restored = Generation.load(g.save(tmp_path / "answer.safetensors"))
    assert torch.equal(restored.matrix, g.matrix)
    assert (restored.tokens, restored.pieces, restored.ids, restored.settings, restored.turns) == (g.tokens, g.pieces, g.ids, g.settings, g.turns)
    assert str(restored[1]) == str(g[1])
    assert restored.by("word").pieces == g.by("word").pieces
    assert torch.equal(whyformer.explain_span(restored, 0, 1, model("t5")).scores, whyformer.explain_span(g, 0, 1, model("t5")).scores)
    with pytest.raises(InputError, match="before by"):
        whyformer.explain_span(restored.by("word"), 0, 1, model("t5"))
    with pytest.raises(LoadError, match="no such file"):
        Generation.load(tmp_path / "none")
    whyformer.explain(model("llama_lm"), torch.tensor([PROMPT]), "saliency").save(tmp_path / "other.safetensors")
    with pytest.raises(LoadError, match="generated text"):
        Generation.load(tmp_path / "other.safetensors")
    facts = g.to_dict()
    assert len(facts["candidates"][0]) in (20, 21)  # the generated token may not be among the likeliest
    assert facts["probabilities"][0] == pytest.approx(g.probability(0))


def test_target_among_likeliest_equals_log_probability_among() -> None:
    language_model = model("llama_lm")
    g: Any = whyformer.explain_generation(language_model, PROMPT, ANSWER, target="among_likeliest")
    assert g.explained == "log-probability among the 10 likeliest tokens"
    for t, token in enumerate(ANSWER):
        ids = torch.tensor([[*PROMPT, *ANSWER[:t]]])
        e = whyformer.explain(language_model, ids, target=targets.LogProbability(token, among=10))
        assert torch.allclose(g[t].scores, e.scores, atol=1e-12)
        assert not torch.allclose(e.scores, whyformer.explain(language_model, ids, target=targets.LogProbability(token)).scores, atol=1e-6)


@pytest.mark.parametrize("name", ["t5", "bart", "marian"])
def test_default_method_of_encoder_decoder_is_attnlrp(name: str) -> None:
    g: Any = whyformer.explain_generation(model(name), SOURCE, ANSWER)
    assert g[0].diagnostics["auto"]["name"] == "attnlrp"
    assert torch.equal(g.matrix, whyformer.explain_generation(model(name), SOURCE, ANSWER, "attnlrp").matrix)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompt": []}, "the list of prompts is empty"),
        ({"prompt": ""}, "tokenizer"),
        ({"prompt": 3.5}, "a prompt is a text"),
        ({"prompt": torch.zeros(1, 0, dtype=torch.long)}, "the prompt is empty"),
        ({"prompt": [3, 5000]}, "outside the model's vocabulary"),
        ({"prompt": [4] * 90}, "takes at most"),
        ({"continuation": []}, "continuation"),
        ({"continuation": [5000]}, "outside the model's vocabulary"),
        ({"continuation": "blue"}, "tokenizer"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"target": targets.Token(-1, 3)}, "each step explains the next token"),
        ({"target": targets.LogProbability(5000)}, "out of range"),
        ({"method": "nonsense"}, "no method"),
        ({"prompt": [[{"role": "user", "content": "Hi"}]]}, "tokenizer"),
        ({"prompt": {"input_ids": [PROMPT], "pixel_values": torch.ones(1, 3, 4, 4)}}, "has pixel_values too"),
        ({"prompt": [torch.ones(2, 3, dtype=torch.long)]}, "a tensor of 2 prompts"),
        ({"prompt": torch.ones(1, 3, dtype=torch.bool)}, "token ids are whole numbers"),
        ({"continuation": {"input_ids": [5]}}, "a continuation is a text or token ids"),
        ({"prompt": [PROMPT, PROMPT], "continuation": "ab"}, "a list of as many continuations"),
        ({"prompt": [PROMPT, PROMPT], "continuation": 7}, "a list of as many continuations"),
    ],
)
def test_invalid_arguments_raise(given: dict[str, Any], message: str) -> None:
    arguments = {"prompt": PROMPT, "continuation": None, "method": "lrp_ah_ln", "max_new_tokens": 4, **given}
    with pytest.raises(InputError, match=message):
        whyformer.explain_generation(model("llama_lm"), **arguments)


@pytest.mark.parametrize("continuation", [None, [3, 4, 5]])
@pytest.mark.parametrize("name", ["llama_lm", "bart"])
def test_prompt_that_is_too_long_names_the_tokens_that_fit(name: str, continuation: Any) -> None:
    explained = partial(whyformer.explain_generation, model(name), continuation=continuation, method="input_x_gradient", max_new_tokens=3)
    long = [4 + i % 7 for i in range(model(name).config.max_position_embeddings + 9)]
    with pytest.raises(InputError, match="truncate=") as error:
        explained(long, truncate=True)
    room = int(re.findall(r"last (\d+) tokens", str(error.value))[0])
    limit = model(name).config.max_position_embeddings
    assert room == (limit - 2 if name == "llama_lm" else limit)  # the model does not read the last token
    assert explained(long[-room:]).start >= room
    with pytest.raises(InputError, match="too long"):
        explained(long[-room - 1 :])


def test_model_that_is_no_language_model_raises() -> None:
    classifier, inputs = zoo.bert()
    with pytest.raises(InputError, match="cannot generate"):
        whyformer.explain_generation(classifier, inputs["input_ids"][:1], method="lrp_ah_ln")
    with pytest.raises(InputError, match="not a language model"):
        whyformer.explain_generation(classifier, inputs["input_ids"][:1], [4, 5], "lrp_ah_ln")


def test_bytes_of_an_unfinished_character_are_a_word() -> None:
    """The tokens are the three bytes of €, and the first step of the answer precedes the last one."""
    byte_level = tokenizers.Tokenizer(tokenizers.models.BPE(dict(zip("aĠâĤ¬", range(5), strict=True)), []))
    byte_level.pre_tokenizer, byte_level.decoder = tokenizers.pre_tokenizers.ByteLevel(), tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level)
    g: Any = whyformer.explain_generation(model("llama_lm"), [0, 2, 3], [4, 1, 2], "input_x_gradient", tokenizer)
    assert g.text == "€ \ufffd" and [word for word, _ in g[0].words()] == ["a", "\ufffd"]
    assert sum(score for _, score in g[0].words()) == pytest.approx(float(g.matrix[0].sum()))
    assert [word for word, _ in g[1].words()] == ["a", "€"]


def test_answer_longer_than_the_decoder_takes_raises() -> None:
    with pytest.raises(InputError, match="shorten the answer"):
        whyformer.explain_generation(model("bart"), SOURCE, max_new_tokens=41)


@pytest.mark.parametrize("continuation", [None, [7, 8]])
def test_model_of_sounds_names_what_it_takes(continuation: Any) -> None:
    size = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_mel_bins": 8}
    ids = {"vocab_size": 60, "decoder_start_token_id": 3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    whisper = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**size, **ids, max_source_positions=10)).eval()
    with pytest.raises(InputError, match="takes input_features"):
        whyformer.explain_generation(whisper, PROMPT, continuation)


def test_span_or_step_out_of_range_raises() -> None:
    g = whyformer.explain_generation(model("llama_lm"), PROMPT, ANSWER, "lrp_ah_ln")
    with pytest.raises(InputError, match="outside the text"):
        whyformer.explain_span(g, 0, 4, model("llama_lm"))
    with pytest.raises(InputError, match="before its start"):
        whyformer.explain_span(g, 2, 1, model("llama_lm"))
    with pytest.raises(InputError, match="merges into one of"):
        g.by("letter")
    with pytest.raises(IndexError):
        g[4]


@cache
def rotary(kind: str) -> Any:
    """Rotary frequencies that change beyond 6 tokens, so that the logits of a token depend on the number of later tokens."""
    if kind == "dynamic":
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 60}
        rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
        config = transformers.LlamaConfig(max_position_embeddings=6, rope_parameters=rope, pad_token_id=0, **sizes)
        return zoo.randomise(transformers.LlamaForCausalLM(config).eval()).double()
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0, 8.0, 3.0, 5.0], "original_max_position_embeddings": 6}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 1.0, **factors}
    config = transformers.Phi3Config(vocab_size=60, max_position_embeddings=64, original_max_position_embeddings=6, rope_parameters=rope, **size)
    return zoo.randomise(transformers.Phi3ForCausalLM(config).eval()).double()


@pytest.mark.parametrize(("kind", "target"), [("longrope", "log_probability"), ("longrope", "contrast"), ("dynamic", "log_probability")])
@pytest.mark.parametrize("method", ["input_x_gradient", "gae"])
def test_step_equals_explain_if_logits_depend_on_the_number_of_tokens(kind: str, method: str, target: str) -> None:
    model = rotary(kind)
    g: Any = whyformer.explain_generation(model, PROMPT, ANSWER, method, target=target)
    for t, token in enumerate(ANSWER):
        ids = torch.tensor([[*PROMPT, *ANSWER[:t]]])
        row = model(ids).logits[0, -1].detach()
        assert g.probability(t) == pytest.approx(float(row.softmax(-1)[token]), abs=1e-12)
        best = int(row.clone().index_fill_(0, torch.tensor([token]), float("-inf")).argmax())
        of = targets.Contrast(token, best) if target == "contrast" else targets.LogProbability(token)
        assert relative_error(g[t].scores, whyformer.explain(model, ids, method, of).scores) < 1e-10


def test_span_over_a_change_of_rotary_frequencies_raises() -> None:
    g: Any = whyformer.explain_generation(rotary("longrope"), PROMPT, ANSWER, "input_x_gradient")
    with pytest.raises(InputError, match=r"g.matrix\[0:4\].sum\(0\)"):
        whyformer.explain_span(g, 0, 3, rotary("longrope"))
    later = whyformer.explain_span(g, 2, 3, rotary("longrope"))  # beyond the change
    assert relative_error(later.scores[0], g.matrix[2:4].sum(0)[: later.scores.shape[1]]) < 1e-5


def test_scores_of_a_token_that_is_looked_up_twice_are_summed() -> None:
    """Gemma 3n looks up ids beyond its second table as 0."""
    model, _ = Architecture("causal language model", "gemma3n_text", "Gemma3nForCausalLM", SETTINGS.get("gemma3n_text", {})).build()
    answer = [5, model.config.vocab_size_per_layer_input, 6]
    g: Any = whyformer.explain_generation(model, PROMPT, answer, "input_x_gradient")
    e = whyformer.explain(model, torch.tensor([[*PROMPT, *answer[:2]]]), "input_x_gradient", targets.LogProbability(6))
    assert e.inputs == ("input_ids", "input_ids#2")
    assert relative_error(g[2].scores, e.scores + e.part("input_ids#2").scores) < 1e-4
    assert g[2].inputs == ("input_ids",)


@pytest.mark.parametrize("setting", [{"penalty_alpha": 0.6, "top_k": 4}, {"dola_layers": "low"}, {"token_healing": True}, {"cache_implementation": "quantized"}])
def test_answer_is_greedy_whatever_the_generation_config(setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    greedy: Any = whyformer.explain_generation(model("llama_lm"), PROMPT, method="input_x_gradient", max_new_tokens=3)
    for name, value in setting.items():
        monkeypatch.setattr(model("llama_lm").generation_config, name, value)
    g: Any = whyformer.explain_generation(model("llama_lm"), PROMPT, method="input_x_gradient", max_new_tokens=3)
    assert g.ids == greedy.ids
    assert not g.notes


def test_note_on_tokens_that_generate_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    greedy: Any = whyformer.explain_generation(model("llama_lm"), PROMPT, method="input_x_gradient", max_new_tokens=2)
    monkeypatch.setattr(model("llama_lm").generation_config, "suppress_tokens", greedy.ids[greedy.start : greedy.start + 1])
    g: Any = whyformer.explain_generation(model("llama_lm"), PROMPT, method="input_x_gradient", max_new_tokens=2)
    assert g.ids[g.start] != greedy.ids[greedy.start]
    assert g.candidates(0)[0][0] == greedy.ids[greedy.start]  # the probabilities are those of the logits
    assert "not the likeliest" in g.notes[0]
    given: Any = whyformer.explain_generation(model("llama_lm"), PROMPT, g.ids[g.start :], "input_x_gradient")
    assert not given.notes


def test_prompts_in_lists_of_different_lengths_and_arrays() -> None:
    explained = partial(whyformer.explain_generation, model("llama_lm"), method="input_x_gradient", max_new_tokens=1)
    several: Any = explained({"input_ids": [PROMPT, PROMPT[:2]], "attention_mask": [[1] * 5, [1, 1]], "token_type_ids": [[0] * 5, [0, 0]]})
    assert [g.ids[: g.start] for g in several] == [PROMPT, PROMPT[:2]]
    for prompt in (np.array(PROMPT), list(np.array(PROMPT))):
        g: Any = explained(prompt)
        assert g.ids == several[0].ids


@pytest.mark.parametrize("method", ["auto", "libragrad", "input_x_gradient"])
def test_steps_of_model_with_state_equal_explain(method: str) -> None:
    """RWKV returns a state that its blocks write in turn, unless it is told not to."""
    size = {"hidden_size": 16, "num_hidden_layers": 3, "attention_hidden_size": 16, "intermediate_size": 32, "context_length": 32}
    rwkv = zoo.randomise(transformers.RwkvForCausalLM(transformers.RwkvConfig(vocab_size=60, **size))).double()
    g = whyformer.explain_generation(rwkv, PROMPT, ANSWER, method)
    for t, token in enumerate(ANSWER):
        ids = torch.tensor([[*PROMPT, *ANSWER[:t]]])
        e = whyformer.explain(rwkv, {"input_ids": ids}, method, targets.LogProbability(token))
        assert torch.allclose(g.matrix[t, : ids.shape[1]], e.scores[0], rtol=1e-7, atol=1e-12)

"""Roles of the tokens of a conversation, and special tokens of its template, for several chat templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import whyformer
from generation.test_generation import model
from whyformer import Generation
from whyformer.errors import LoadError

QUESTION = [{"role": "user", "content": "Hi you"}]
CONVERSATION = [
    {"role": "system", "content": "Be short."}, {"role": "user", "content": "user"}, {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Ask?"},
]  # fmt: skip
MARKED = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
NO_SYSTEM = "{% for m in messages if m['role'] == 'system' %}{{ raise_exception('no system message') }}{% endfor %}" + MARKED
IN_FRONT = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] + '<|im_end|>' %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}<|im_start|>{{ (system if loop.first else '') + m['content'] }}<|im_end|>{% endfor %}"
)
"""The system message is part of the first user message; alone it renders as an empty text."""


@pytest.fixture(scope="module")
def tokenizer(shared: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(shared / "weights" / "smollm2_135m_instruct")


@pytest.fixture(scope="module")
def language_model(tokenizer: Any) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def explained(language_model: Any, tokenizer: Any, prompt: Any, answer: Any = " Good<|im_end|>") -> Generation:
    g = whyformer.explain_generation(language_model, prompt, tokenizer(answer).input_ids, "input_x_gradient", tokenizer)
    assert isinstance(g, Generation)
    return g


def texts(g: Generation) -> list[tuple[str, str]]:
    """(role, the text of the message without special tokens)."""
    hidden = set(g.special or ())
    return [(role, "".join(g.pieces[i] for i in range(a, b) if i not in hidden)) for role, a, b in g.turns]


@pytest.mark.parametrize("template", ["own", MARKED, NO_SYSTEM, IN_FRONT], ids=["own", "marked", "no system", "in front"])
@pytest.mark.parametrize("prompt", [QUESTION, CONVERSATION], ids=["question", "conversation"])
def test_turns_contain_the_messages_without_template_text(
    template: str, prompt: Any, language_model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (template, prompt) == (NO_SYSTEM, CONVERSATION):
        prompt = CONVERSATION[1:]
    if template != "own":
        monkeypatch.setattr(tokenizer, "chat_template", template)
    g = explained(language_model, tokenizer, prompt)
    default = [("system", "You are a helpful AI assistant named SmolLM, trained by Hugging Face")] if (template, prompt) == ("own", QUESTION) else []
    assert texts(g) == [*default, *((m["role"], m["content"]) for m in prompt), ("assistant", " Good")]
    assert g.text == " Good<|im_end|>"  # the text of the generation includes special tokens
    turns = g.by("turn")
    assert [turns.pieces[a] for _, a, _ in turns.turns] == [text for _, text in texts(g)]
    assert float(turns.matrix.sum()) == pytest.approx(float(g.matrix.sum()))


def test_special_tokens_of_a_prompt(language_model: Any, tokenizer: Any) -> None:
    g = explained(language_model, tokenizer, "<|im_start|>One two")
    assert (g.turns, g.special) == ([], [0, len(g.ids) - 1])
    assert g[1].special == [[0]]
    words = g.by("word")
    assert [words.pieces[i] for i in words.special or ()] == ["<|im_start|>", "<|im_end|>"]
    assert whyformer.explain_generation(model("llama_lm"), [5, 17], [9], "input_x_gradient").special is None  # no tokenizer


def test_special_tokens_are_saved_and_optional_in_files(language_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    g = explained(language_model, tokenizer, CONVERSATION)
    assert g.special
    assert Generation.load(g.save(tmp_path / "g.safetensors")).special == g.special
    assert Generation.from_dict(g.to_dict()).special == g.special
    without_special = {name: value for name, value in g.to_dict().items() if name != "special"}
    assert Generation.from_dict(without_special).special is None
    wrong = g.by("token")
    object.__setattr__(wrong, "special", [len(g.ids)])
    with pytest.raises(LoadError, match="special tokens"):
        Generation.load(wrong.save(tmp_path / "wrong.safetensors"))

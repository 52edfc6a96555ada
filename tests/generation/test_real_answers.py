"""Answers of trained language models, and the reference's own figures (they lie beside the checkout; without them this skips)."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

import whyformer
from weights import CACHE
from whyformer import targets


def test_answers_have_the_scores_of_the_reference(shared: Path) -> None:
    folder = shared / "golden" / "lxt_llama_tiny"
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**json.loads((folder / "config.json").read_text()))).double().eval()
    model.load_state_dict(load_file(folder / "state_dict.safetensors"), strict=False)  # rotary frequencies stay float32's
    wanted, targets, ids = (np.load(folder / f"{name}.npy") for name in ("attnlrp_efficient_f64exact", "targets", "input_ids"))
    for i, row in enumerate(ids):
        for k, token in enumerate(targets[i]):
            g = whyformer.explain_generation(model, row.tolist(), [int(token)], "attnlrp", target="logit")
            assert np.abs(g.matrix[0, :-1].numpy() - wanted[i, k]).max() < 1e-6 * np.abs(wanted).max()


@cache
def smollm2(shared: Path) -> tuple[Any, Any]:
    folder = CACHE / "smollm2_135m_instruct"
    if not (folder / "model.safetensors").is_file():
        make = shared / "weights" / "smollm2_135m_instruct" / "make_weights"
        made = subprocess.run([sys.executable, str(make), str(folder)], capture_output=True, text=True, check=False)
        if made.returncode:
            pytest.skip(f"the weights cannot be made here: {made.stderr.strip().splitlines()[-1:]}")
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval(), transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.slow
def test_a_conversation_is_answered_and_explained(shared: Path) -> None:
    model, tokenizer = smollm2(shared)
    g: Any = whyformer.explain_generation(model, [{"role": "user", "content": "Name three fruits."}], processor=tokenizer, max_new_tokens=16)
    assert g.text.startswith("1. Bananas\n2. Oranges\n3. Grapes")
    assert [role for role, _, _ in g.turns] == ["system", "user", "assistant"]
    words = g.by("word")
    ban = next(t for t in range(len(words)) if words.pieces[words.start + t].strip() == "Bananas")
    best = int(words.matrix[ban, : words.start].argmax())
    assert words.pieces[best].strip() in ("fruits", "three", "Name")
    # linear in the target
    span = whyformer.explain_span(g, 0, 3, model, tokenizer)
    summed = g.matrix[:4].sum(0)[: span.scores.shape[1]]
    torch.testing.assert_close(span.scores[0], summed, atol=2e-3 * float(summed.abs().max()), rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompt", "answer", "evidence"),
    [
        ("The kite is in the garage. The ball is in the hall. Question: Where is the ball? Answer: The ball is in the", " hall", " hall"),
    ],
)
def test_the_planted_word_is_on_top(shared: Path, prompt: str, answer: str, evidence: str) -> None:
    model, tokenizer = smollm2(shared)
    g: Any = whyformer.explain_generation(model, prompt, answer, processor=tokenizer)
    assert g.pieces[int(g.matrix[0].argmax())] == evidence


@pytest.mark.slow
def test_bfloat16_agrees_with_float32(shared: Path) -> None:
    model, tokenizer = smollm2(shared)
    prompt = "Ann's ball is red. Bob's kite is blue. Answer: Bob's kite is"
    half = transformers.AutoModelForCausalLM.from_pretrained(model.config._name_or_path, dtype=torch.bfloat16).eval()
    a, b = (whyformer.explain_generation(m, prompt, " blue", processor=tokenizer).matrix[0].double() for m in (model, half))
    assert int(a.argmax()) == int(b.argmax())
    assert float(torch.corrcoef(torch.stack([a, b]))[0, 1]) > 0.995  # the rounding of bfloat16 products differs between processors


@pytest.mark.slow
@pytest.mark.parametrize(("method", "settings"), [("cp_lrp", {}), ("input_x_gradient", {"composite": "libra"}), ("lrp_ah_ln", {"secant": True})])
def test_the_sum_is_the_target_on_gated_blocks(shared: Path, method: str, settings: dict[str, Any]) -> None:
    model, tokenizer = smollm2(shared)
    prompt = "Ann's ball is red. Bob's kite is blue. Answer: Bob's kite is"
    for target in (" blue", whyformer.targets.Contrast(" blue", " red")):
        e = whyformer.explain(model, prompt, method, target, tokenizer, **settings)
        blue, red = (e.logit(tokenizer(word).input_ids[0]) for word in (" blue", " red"))
        value = blue if target == " blue" else blue - red
        assert abs(float(e.scores.sum() - value)) < 1e-3 * abs(float(value))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompt", "city"),
    [
        ("The street was quiet. Sam lives in Rome. Iris lives in Rome. Frank lives in Cairo. Answer: Sam lives in", " Rome"),
        ("Nobody said a word. Victor lives in Lima. Ann lives in Lima. Everybody had slept well. Answer: Victor lives in", " Lima"),
    ],
)
def test_a_word_in_two_sentences_is_told_from_its_twin(shared: Path, prompt: str, city: str) -> None:
    model, tokenizer = smollm2(shared)
    token = targets.LogProbability(tokenizer(city).input_ids[0])
    plain: Any = whyformer.explain(model, prompt, target=token, processor=tokenizer)
    e = whyformer.evaluation.token_deletion(model, prompt, plain, 3, tokenizer)
    ids = tokenizer(prompt).input_ids
    asked, twin = (i for i, one in enumerate(ids) if one == tokenizer(city).input_ids[0])
    assert e.scores[0, asked] > e.scores[0, twin]
    told = e.diagnostics["token_deletion"][0]
    lost = dict(zip(told["tokens"], told["lost"], strict=True))
    assert lost[asked] > lost[twin]
    instead = dict(zip(told["tokens"], told["instead"], strict=True))
    assert instead[asked] == instead[twin] != tokenizer(city).input_ids[0]

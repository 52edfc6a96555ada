"""Answers of trained language models, and scores of the reference implementation (skipped without the shared data)."""

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


def test_attnlrp_equals_the_reference_implementation(shared: Path) -> None:
    folder = shared / "golden" / "lxt_llama_tiny"
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**json.loads((folder / "config.json").read_text()))).double().eval()
    model.load_state_dict(load_file(folder / "state_dict.safetensors"), strict=False)  # rotary frequencies stay float32's
    expected, targets, ids = (np.load(folder / f"{name}.npy") for name in ("attnlrp_efficient_f64exact", "targets", "input_ids"))
    for i, row in enumerate(ids):
        for k, token in enumerate(targets[i]):
            g = whyformer.explain_generation(model, row.tolist(), [int(token)], "attnlrp", target="logit")
            assert np.abs(g.matrix[0, :-1].numpy() - expected[i, k]).max() < 1e-6 * np.abs(expected).max()


@cache
def smollm2(shared: Path) -> tuple[Any, Any]:
    folder = CACHE / "smollm2_135m_instruct"
    if not (folder / "model.safetensors").is_file():
        make = shared / "weights" / "smollm2_135m_instruct" / "make_weights"
        completed = subprocess.run([sys.executable, str(make), str(folder)], capture_output=True, text=True, check=False)
        if completed.returncode:
            pytest.skip(f"the weights cannot be made here: {completed.stderr.strip().splitlines()[-1:]}")
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval(), transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.slow
def test_conversation_is_answered_and_explained(shared: Path) -> None:
    model, tokenizer = smollm2(shared)
    g: Any = whyformer.explain_generation(model, [{"role": "user", "content": "Name three fruits."}], processor=tokenizer, max_new_tokens=16)
    assert g.text.startswith("1. Bananas\n2. Oranges\n3. Grapes")
    assert [role for role, _, _ in g.turns] == ["system", "user", "assistant"]
    words = g.by("word")
    step = next(t for t in range(len(words)) if words.pieces[words.start + t].strip() == "Bananas")
    best = int(words.matrix[step, : words.start].argmax())
    assert words.pieces[best].strip() in ("fruits", "three", "Name")
    # the method is linear in the target
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
def test_evidence_word_has_the_largest_score(shared: Path, prompt: str, answer: str, evidence: str) -> None:
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
def test_scores_sum_to_the_target_on_gated_blocks(shared: Path, method: str, settings: dict[str, Any]) -> None:
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
def test_relevant_occurrence_of_a_repeated_word_scores_higher(shared: Path, prompt: str, city: str) -> None:
    model, tokenizer = smollm2(shared)
    token = targets.LogProbability(tokenizer(city).input_ids[0])
    plain: Any = whyformer.explain(model, prompt, target=token, processor=tokenizer)
    e = whyformer.evaluation.token_deletion(model, prompt, plain, 3, tokenizer)
    ids = tokenizer(prompt).input_ids
    relevant, irrelevant = (i for i, token_id in enumerate(ids) if token_id == tokenizer(city).input_ids[0])
    assert e.scores[0, relevant] > e.scores[0, irrelevant]
    figures = e.diagnostics["token_deletion"][0]
    lost = dict(zip(figures["tokens"], figures["lost"], strict=True))
    assert lost[relevant] > lost[irrelevant]
    replacements = dict(zip(figures["tokens"], figures["instead"], strict=True))
    assert replacements[relevant] == replacements[irrelevant] != tokenizer(city).input_ids[0]

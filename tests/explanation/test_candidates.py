"""Explanations over a vocabulary keep the likeliest and the explained tokens, with a normalizer for exact probabilities."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import whyformer
from whyformer import targets
from whyformer.errors import InputError
from whyformer.explanation.candidates import likeliest
from whyformer.explanation.generation import Generation
from whyformer.explanation.result import Explanation
from whyformer.report import write_report
from whyformer.show import html

VOCABULARY = 5000
PROMPT, ANSWER = [2, 9, 4005, 17, 30], [8, 4100, 4, 25]
SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


@cache
def model(name: str, size: int = VOCABULARY) -> Any:
    torch.manual_seed(0)
    if name == "llama":
        network: Any = LlamaForCausalLM(LlamaConfig(vocab_size=size, num_key_value_heads=2, **SMALL))
    elif name == "gpt2":
        network = GPT2LMHeadModel(GPT2Config(vocab_size=size, n_embd=32, n_layer=2, n_head=2, n_positions=64))
    else:
        shape = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2}
        network = T5ForConditionalGeneration(T5Config(vocab_size=size, decoder_start_token_id=0, pad_token_id=0, **shape))
    for weight in network.parameters():
        weight.data.mul_(3 if weight.dim() > 1 else 1)
    return network.eval().double()


def last_row(name: str, ids: list[int]) -> Tensor:
    with torch.no_grad():
        row: Tensor = model(name)(torch.tensor([ids])).logits[:, -1]
    return row


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("target", [None, 4999, targets.Token(-1, 77, "log_probability"), targets.Contrast(3, 4001), lambda z: z[:, 5] - z[:, 6]])
def test_kept_logits_and_probabilities_are_exact(name: str, target: Any, tmp_path: Path) -> None:
    e, row = whyformer.explain(model(name), torch.tensor([PROMPT]), "input_x_gradient", target), last_row(name, PROMPT)
    loaded = Explanation.load(e.save(tmp_path / "e.safetensors"))
    for variant in (e, e[0], loaded, Explanation.from_dict(json.loads(json.dumps(e.to_dict())))):
        best = row.softmax(-1).topk(5)
        assert [i for i, *_ in variant.top()] == best.indices[0].tolist()
        assert [share for *_, share in variant.top()] == pytest.approx(best.values[0].tolist(), rel=1e-6)
        assert variant.classes is not None and variant.normalizer is not None and variant.logits.shape == variant.classes.shape
        assert torch.allclose(variant.logits.double(), row.gather(1, variant.classes), rtol=1e-6)
        assert torch.allclose(variant.logits.double() - variant.normalizer[:, None], row.log_softmax(-1).gather(1, variant.classes), atol=1e-5)
        index = int(variant.target[0])
        if index >= 0:
            assert variant.probability(index) == pytest.approx(float(row.softmax(-1)[0, index]), rel=1e-5)
            assert variant.logit(index) == pytest.approx(float(row[0, index]), rel=1e-5)
        assert str(variant) == str(e)
    if isinstance(target, targets.Contrast):
        assert e.logit(4001) == pytest.approx(float(row[0, 4001]))


def test_all_of_few_classes_are_kept() -> None:
    logits = torch.randn(3, 1000)
    assert likeliest(logits, [torch.zeros(3, dtype=torch.long)]).keys() == {"logits"}
    wide = torch.randn(3, 1001)
    result = likeliest(wide, [torch.tensor([0, 5, -1]), torch.tensor([0, 7, 9])])
    assert result["classes"].shape == (3, 22)
    for i, explained in enumerate(([0], [5, 7], [9])):
        row = result["classes"][i].tolist()
        assert len(set(row)) == 22 and set(explained) <= set(row) and set(wide[i].topk(20).indices.tolist()) <= set(row)
        assert torch.equal(result["logits"][i], wide[i, row]) and result["logits"][i].diff().max() <= 0
    assert likeliest(wide, [torch.zeros(3, dtype=torch.long)] * 2, 1000)["classes"].shape == (3, 1001)


def test_batch_equals_single_samples() -> None:
    ids = torch.tensor([PROMPT, PROMPT[::-1]])
    whole = whyformer.explain(model("llama"), ids, "rollout", [7, 9])
    for i, single in enumerate(whole):
        alone = whyformer.explain(model("llama"), ids[i : i + 1], "rollout", [7, 9][i])
        assert single.classes is not None and alone.classes is not None and torch.equal(single.classes, alone.classes)
        assert torch.allclose(single.logits, alone.logits)


def test_class_agnostic_methods_have_probabilities_of_each_target() -> None:
    ids, row = torch.tensor([PROMPT]), last_row("llama", PROMPT).softmax(-1)
    least = int(row.argmin())
    comparison = whyformer.compare(model("llama"), ids, ["rollout", "attnlrp"], targets=[None, least])
    for e in comparison.explanations:
        index = int(e.target[0])
        assert e.probability(index) == pytest.approx(float(row[0, index]), rel=1e-5)


def test_multi_label_classifier_has_independent_probabilities() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.block, self.head = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), nn.Linear(16, 3000)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.block(x)[:, 0]).sigmoid()

    tagger, x = Tagger().eval(), torch.randn(2, 4, 16)
    e = whyformer.explain(tagger, x, "input_x_gradient", [2999, 1])
    probabilities = tagger(x).detach()
    assert [e.probability(int(t), i) for i, t in enumerate(e.target)] == pytest.approx([float(probabilities[0, 2999]), float(probabilities[1, 1])], rel=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
@pytest.mark.parametrize(("method", "target"), [("attnlrp", None), ("input_x_gradient", targets.Contrast(5, 6)), ("occlusion", "contrast"), ("rollout", "logit")])
def test_generation_keeps_tokens_and_candidates(name: str, method: str, target: Any, tmp_path: Path) -> None:
    g: Any = whyformer.explain_generation(model(name), PROMPT, ANSWER, method, target=target, **({"baseline": 0} if method == "occlusion" else {}))
    loaded = Generation.load(g.save(tmp_path / "g.safetensors"))
    for variant in (g, loaded, Generation.from_dict(json.loads(json.dumps(g.to_dict())))):
        for t, token in enumerate(ANSWER):
            if name == "t5":
                row = model(name)(input_ids=torch.tensor([g.ids[: g.source]]), decoder_input_ids=torch.tensor([[0, *ANSWER[:t]]])).logits[:, -1].detach()
            else:
                row = last_row(name, [*PROMPT, *ANSWER[:t]])
            best = row.softmax(-1).topk(5)
            assert [i for i, *_ in variant.candidates(t)] == best.indices[0].tolist()
            assert [p for *_, p in variant.candidates(t)] == pytest.approx(best.values[0].tolist(), rel=1e-5)
            assert variant.probability(t) == pytest.approx(float(row.softmax(-1)[0, token]), rel=1e-5)
            if target is None:
                assert float(variant.value[t]) == pytest.approx(float(row.log_softmax(-1)[0, token]), rel=1e-5)
            if isinstance(target, targets.Contrast):
                assert float(variant.value[t]) == pytest.approx(float(row[0, 5] - row[0, 6]), rel=1e-4)
        assert str(variant) == str(g) and str(variant.by("word")) == str(g.by("word"))
        assert variant.by("word")[0].numeric
    assert g.logits.shape[1] < 30


def test_file_sizes_do_not_grow_with_the_vocabulary(tmp_path: Path) -> None:
    sizes = {}
    for size in (2000, 32000):
        e = whyformer.explain(model("llama", size), torch.tensor([[2, 9, 17]]), "attnlrp")
        g: Any = whyformer.explain_generation(model("llama", size), [2, 9, 17], [8, 11], "attnlrp")
        paths = [e.save(tmp_path / "e.safetensors"), g.save(tmp_path / "g.safetensors")]
        sizes[size] = [len(json.dumps(e.to_dict())), len(json.dumps(g.to_dict())), *(path.stat().st_size for path in paths)]
    assert all(large < 1.1 * small for small, large in zip(sizes[2000], sizes[32000], strict=True))
    assert max(sizes[32000]) < 20_000


def test_pages_and_reports_show_kept_probabilities(tmp_path: Path) -> None:
    e = whyformer.explain(model("llama"), torch.tensor([PROMPT]), "attnlrp", 4999)
    g: Any = whyformer.explain_generation(model("llama"), PROMPT, ANSWER, "attnlrp")
    e.save(tmp_path / "e.safetensors")
    g.save(tmp_path / "g.safetensors")
    write_report([tmp_path], tmp_path / "report.html")
    best, share = e.top()[0][0], e.top()[0][3]
    assert share is not None
    for shown in (html.page(e), (tmp_path / "report.html").read_text()):
        assert f"{best}" in shown and f"{100 * share:.1f}" in shown
    assert f"{100 * g.probability(1):.1f} %" in html.page(g)


@pytest.mark.parametrize("wrong", [{"classes": None}, {"normalizer": [0.0]}, {"classes": [[1, 2]]}, {"normalizer": ["x"]}, {"normalizer": None}])
def test_inconsistent_classes_or_normalizer_raise(wrong: dict[str, Any]) -> None:
    facts = json.loads(json.dumps(whyformer.explain(model("llama"), torch.tensor([PROMPT]), "attnlrp").to_dict()))
    facts = {k: v for k, v in {**facts, **wrong}.items() if v is not None}
    with pytest.raises(InputError):
        Explanation.from_dict(facts)

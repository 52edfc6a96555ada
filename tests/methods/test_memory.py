"""Nothing of a run stays behind: no graph, no activations, whatever the method and however it ended."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import whyformer
from whyformer.errors import WhyformerError
from whyformer.methods import METHODS
from whyformer.methods.task import Task
from zoo import build, modality

TA = "transformer_attribution"
SMALL = {"samples": 2, "steps": 2, "masks": 4, "batch_size": 4}
PAIRS = [
    (m, n) for m in sorted(METHODS) for n in ("hf_vit", "bert", "gpt2") if METHODS[m].modality in ("both", modality(n))
]


@pytest.mark.parametrize(("method", "name"), PAIRS)
def test_the_graph_is_gone_after_an_explanation(method: str, name: str, runs: list[weakref.ref[Any]]) -> None:
    model, inputs = build(name, torch.float32)
    settings = {k: v for k, v in SMALL.items() if k in METHODS[method].settings}
    result = whyformer.explain(model, inputs, method, target=1, **settings)
    assert result.scores is not None
    gc.collect()  # finds circles among Python objects, not those that lead through autograd's nodes
    assert [r() for r in runs if r() is not None] == []


@pytest.mark.parametrize("method", ["transformer_attribution", "gae", "rollout", "integrated_gradients"])
def test_the_graph_is_gone_after_an_error(method: str, runs: list[weakref.ref[Any]]) -> None:
    model, inputs = build("hf_vit", torch.float32)

    def target(logits: torch.Tensor) -> torch.Tensor:
        return logits  # not one number a sample: noticed when the forward pass is over

    if METHODS[method].class_specific:
        with pytest.raises(WhyformerError):
            whyformer.explain(model, inputs, method, target=target)
    else:
        whyformer.explain(model, inputs, method, target=1)
    gc.collect()
    assert runs
    assert [r() for r in runs if r() is not None] == []


@pytest.mark.parametrize("name", ["hf_vit", "bert", "timm_vit", "llama", "encoder_sequence_first"])
def test_gradient_and_relevance_of_one_block_meet_before_the_next(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that one block's maps are there at a time."""
    seen: list[tuple[int, bool]] = []
    whole = Task.both_passes

    def watched(task: Task, composite: Any, first: int, observe: Any, again: Any) -> Any:
        def note(relevance: bool, index: int, *flows: Any) -> None:
            seen.append((index, relevance))
            observe(relevance, index, *flows)

        return whole(task, composite, first, note, again)

    monkeypatch.setattr(Task, "both_passes", watched)
    whyformer.explain(*build(name), TA, 1)
    assert seen == [(block, relevance) for block in (2, 1, 0) for relevance in (False, True)]


@pytest.mark.parametrize("name", ["hf_vit", "bert", "llama", "t5"])
def test_a_few_heads_at_a_time_give_the_same_map(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build(name)
    if name == "t5":
        inputs = {**inputs, "decoder_input_ids": inputs["input_ids"][:, :3]}
    target = 1 if name != "t5" else whyformer.targets.Token(-1, 5)
    whole = [whyformer.explain(model, inputs, TA, target, weighting=w) for w in ("gradient", "attention")]
    monkeypatch.setattr("whyformer.rules.relevance.attention._AT_ONCE", 1)
    parts = [whyformer.explain(model, inputs, TA, target, weighting=w) for w in ("gradient", "attention")]
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a.scores, b.scores, rtol=1e-10, atol=1e-14)


class Dense(nn.Module):
    """What enters its last block is read behind that block too: not a chain."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 24)
        layer = {"d_model": 24, "nhead": 3, "dim_feedforward": 48, "dropout": 0.0, "batch_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(**layer) for _ in range(3))
        self.head = nn.Linear(24, 5)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids)
        for block in self.blocks:
            before, x = x, block(x)
        return self.head((x + before)[:, 0])


def test_what_is_no_chain_of_blocks_goes_all_the_way_twice() -> None:
    torch.manual_seed(0)
    model, ids = Dense().double().eval(), {"input_ids": torch.randint(4, 50, (2, 7))}
    found = whyformer.explain(model, ids, TA, 1)
    assert found.scores.abs().max() > 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("whyformer.engine.run.Recording.sweep", lambda *_: False)
        assert torch.equal(whyformer.explain(model, ids, TA, 1).scores, found.scores)

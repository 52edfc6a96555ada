"""Nothing of a run stays behind: no graph, no activations, whatever the method and however it ended."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import whyformer
from whyformer.errors import WhyformerError
from whyformer.methods import METHODS, task
from zoo import build, modality

SMALL = {"samples": 2, "steps": 2, "masks": 4, "batch_size": 4}
PAIRS = [
    (m, n) for m in sorted(METHODS) for n in ("hf_vit", "bert", "gpt2") if METHODS[m].modality in ("both", modality(n))
]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[weakref.ref[Any]]]:
    """What every node of a recorded graph refers to: it is alive as long as one of them is."""
    seen: list[weakref.ref[Any]] = []
    original = task.record

    def record(*args: Any, **kwargs: Any) -> Any:
        recording = original(*args, **kwargs)
        seen.append(weakref.ref(recording.run))
        return recording

    monkeypatch.setattr(task, "record", record)
    yield seen
    gc.collect()


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

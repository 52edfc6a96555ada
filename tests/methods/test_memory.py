"""Graphs and activations are freed after each run, also after an exception."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import whyformer
from whyformer.errors import InputError
from whyformer.methods import METHODS
from whyformer.methods.task import Task
from zoo import build, modality

TA = "transformer_attribution"
SMALL = {"samples": 2, "steps": 2, "masks": 4, "batch_size": 4}
PAIRS = [
    (m, n) for m in sorted(METHODS) for n in ("hf_vit", "bert", "gpt2") if METHODS[m].modality in ("both", modality(n))
]


@pytest.fixture(scope="module", autouse=True)
def only_new_objects() -> None:
    """Exempt the objects of other tests from garbage collection, which would take a second for each test."""
    gc.collect()
    gc.freeze()


@pytest.mark.part
@pytest.mark.parametrize(("method", "name"), PAIRS)
def test_graph_is_freed_after_explanation(method: str, name: str, runs: list[weakref.ref[Any]]) -> None:
    model, inputs = build(name, torch.float32)
    settings = {k: v for k, v in SMALL.items() if k in METHODS[method].settings}
    result = whyformer.explain(model, inputs, method, target=1, **settings)
    assert result.scores is not None
    gc.collect()  # collects cycles of Python objects, not cycles through autograd nodes
    assert [r() for r in runs if r() is not None] == []


AGNOSTIC, SPECIFIC = ["rollout"], ["transformer_attribution", "gae", "integrated_gradients"]


@pytest.mark.parametrize(("method", "place"), [*((m, "target") for m in SPECIFIC), *((m, "layout") for m in [*SPECIFIC, *AGNOSTIC])])
def test_graph_is_freed_after_exception(method: str, place: str, runs: list[weakref.ref[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The target raises after the forward pass, the layout of the scores after the backward walk."""
    model, inputs = build("hf_vit", torch.float32)

    def stop(*_: Any) -> Any:
        raise InputError("stopped here")

    if place == "layout":
        monkeypatch.setattr(Task, "lay_out", stop)
    with pytest.raises(InputError, match="stopped here"):
        whyformer.explain(model, inputs, method, target=stop if place == "target" else 1)
    gc.collect()
    assert runs
    assert [r() for r in runs if r() is not None] == []


@pytest.mark.parametrize("name", ["hf_vit", "bert", "timm_vit", "llama", "encoder_sequence_first"])
def test_maps_of_one_block_are_in_memory_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradient and relevance of a block are combined and freed before the next block."""
    order: list[int] = []
    previous: list[weakref.ref[torch.Tensor]] = []
    walk = Task.walk

    def watched(task: Task, map_pass: Any, rules: Any, on_map: Any, blocks: Any, **options: Any) -> Any:
        def record_block(block: int, *flows: torch.Tensor) -> None:
            order.append(block)
            assert [alive() for alive in previous if alive() is not None] == []
            previous[:] = [weakref.ref(f if f._base is None else f._base) for f in flows]
            on_map(block, *flows)

        return walk(task, map_pass, rules, record_block, blocks, **options)

    monkeypatch.setattr(Task, "walk", watched)
    whyformer.explain(*build(name), TA, 1)
    assert order == [2, 1, 0]
    assert len(previous) == 3  # the map, its relevance and its gradient

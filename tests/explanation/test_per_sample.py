"""Per-sample diagnostics are split and joined with samples, and diagnostics of the batch are shared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import whyformer
from whyformer.explanation.per_sample import PER_SAMPLE, of_batch, of_sample
from whyformer.models.loading import load

TEXTS = ["A gripping , beautiful film .", "Dull ."]


def leaves(count: int) -> st.SearchStrategy[Any]:
    return st.lists(st.floats(-1, 1), min_size=count, max_size=count)


@given(st.data(), st.integers(1, 4))
def test_joined_samples_equal_the_batch(data: st.DataObject, count: int) -> None:
    """Also if a diagnostic of the batch is a list with one entry per sample."""
    per_sample = data.draw(st.dictionaries(st.sampled_from(sorted(PER_SAMPLE)), leaves(count) | st.dictionaries(st.text(max_size=3), leaves(count), max_size=2)))
    shared = data.draw(st.dictionaries(st.sampled_from(["unscored", "auto", "forwards"]), leaves(count) | leaves(2) | st.text()))
    batch = {**shared, **per_sample}
    samples = [of_sample(batch, i) for i in range(count)]
    for i, sample in enumerate(samples):
        assert {name: sample[name] for name in shared} == shared
        for name, value in per_sample.items():
            if isinstance(value, list):
                assert sample[name] == value[i : i + 1]
    assert of_batch(samples) == batch


def test_diagnostics_of_some_samples_stay_with_these() -> None:
    batch = of_batch([{"completeness": {"error": [0.5]}}, {"warnings": [["all scores are 0"]]}, {"completeness": {"error": [0.1]}}])
    assert of_sample(batch, 0) == {"completeness": {"error": [0.5]}, "warnings": [[]]}
    assert of_sample(batch, 1)["warnings"] == [["all scores are 0"]]
    assert not of_sample(batch, 1)["completeness"]
    assert of_sample(batch, 2)["completeness"] == {"error": [0.1]}


class WithUnscoredInputs(torch.nn.Module):
    """A model with two further inputs without scores, whose number equals the number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = torch.nn.Embedding(20, 8), torch.nn.Linear(8, 3)

    def forward(self, input_ids: Any, boxes: Any, noise: Any) -> Any:
        return self.head(self.words(input_ids).mean(1) + boxes + noise)


@pytest.mark.parametrize("method", ["saliency", "input_x_gradient", "occlusion"])
def test_names_of_unscored_inputs_are_shared_by_the_batch(method: str) -> None:
    torch.manual_seed(0)
    inputs = {"input_ids": torch.randint(0, 20, (2, 5)), "boxes": torch.randn(2, 8), "noise": torch.randn(2, 8)}
    e = whyformer.explain(WithUnscoredInputs().eval(), inputs, method, 1, **({"baseline": 3} if method == "occlusion" else {}))
    for sample in e:
        assert sample.diagnostics.get("unscored") == e.diagnostics.get("unscored")


@pytest.mark.parametrize("method", ["integrated_gradients", "lrp", "decompx", "input_x_gradient", "auto"])
def test_diagnostics_of_a_sample_equal_those_of_it_alone(method: str) -> None:
    loaded = load("bundled:sst2")
    e = whyformer.explain(loaded.model, TEXTS, method, 1, loaded.processor)
    for i, text in enumerate(TEXTS):
        alone = whyformer.explain(loaded.model, text, method, 1, loaded.processor)
        sample = e[i]
        assert sample.diagnostics.keys() == alone.diagnostics.keys()
        assert sample.warnings == alone.warnings
        for name in ("completeness", "conservation"):
            for fact, value in alone.diagnostics.get(name, {}).items():
                if isinstance(value, list):
                    assert sample.diagnostics[name][fact] == pytest.approx(value, rel=1e-3, abs=1e-4)

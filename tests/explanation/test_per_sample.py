"""Facts of each sample belong to it, and facts of the batch to all, whatever lengths their lists have."""

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
def test_samples_that_are_cut_out_and_joined_are_the_batch(data: st.DataObject, count: int) -> None:
    """Also where facts of the whole batch are lists of as many entries as there are samples."""
    own = data.draw(st.dictionaries(st.sampled_from(sorted(PER_SAMPLE)), leaves(count) | st.dictionaries(st.text(max_size=3), leaves(count), max_size=2)))
    whole = data.draw(st.dictionaries(st.sampled_from(["unscored", "auto", "forwards"]), leaves(count) | leaves(2) | st.text()))
    batch = {**whole, **own}
    each = [of_sample(batch, i) for i in range(count)]
    for i, one in enumerate(each):
        assert {name: one[name] for name in whole} == whole
        for name, value in own.items():
            if isinstance(value, list):
                assert one[name] == value[i : i + 1]
    assert of_batch(each) == batch


def test_a_fact_that_some_samples_lack_stays_with_those_that_have_it() -> None:
    batch = of_batch([{"completeness": {"error": [0.5]}}, {"warnings": [["all scores are 0"]]}, {"completeness": {"error": [0.1]}}])
    assert of_sample(batch, 0) == {"completeness": {"error": [0.5]}, "warnings": [[]]}
    assert of_sample(batch, 1)["warnings"] == [["all scores are 0"]]
    assert not of_sample(batch, 1)["completeness"]
    assert of_sample(batch, 2)["completeness"] == {"error": [0.1]}


class Beside(torch.nn.Module):
    """Reads two further inputs, which no method gives scores here: as many as there are samples."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = torch.nn.Embedding(20, 8), torch.nn.Linear(8, 3)

    def forward(self, input_ids: Any, boxes: Any, noise: Any) -> Any:
        return self.head(self.words(input_ids).mean(1) + boxes + noise)


@pytest.mark.parametrize("method", ["saliency", "input_x_gradient", "occlusion"])
def test_names_of_inputs_without_scores_are_of_the_batch(method: str) -> None:
    torch.manual_seed(0)
    inputs = {"input_ids": torch.randint(0, 20, (2, 5)), "boxes": torch.randn(2, 8), "noise": torch.randn(2, 8)}
    e = whyformer.explain(Beside().eval(), inputs, method, 1, **({"fill_id": 3} if method == "occlusion" else {}))
    for one in e:
        assert one.diagnostics.get("unscored") == e.diagnostics.get("unscored")


@pytest.mark.parametrize("method", ["integrated_gradients", "lrp", "decompx", "input_x_gradient", "auto"])
def test_what_was_measured_of_a_text_is_what_is_measured_of_it_alone(method: str) -> None:
    loaded = load("bundled:sst2")
    e = whyformer.explain(loaded.model, TEXTS, method, 1, loaded.processor)
    for i, text in enumerate(TEXTS):
        alone = whyformer.explain(loaded.model, text, method, 1, loaded.processor)
        own = e[i]
        assert own.diagnostics.keys() == alone.diagnostics.keys()
        assert own.warnings == alone.warnings
        for name in ("completeness", "conservation"):
            for fact, value in alone.diagnostics.get(name, {}).items():
                if isinstance(value, list):
                    assert own.diagnostics[name][fact] == pytest.approx(value, rel=1e-3, abs=1e-4)

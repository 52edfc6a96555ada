"""compare() over methods × targets: equal to single explanations, with shared preparation and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import whyformer
from whyformer import comparing, explaining
from whyformer.errors import InputError, MethodNotApplicable
from whyformer.explaining import open_model
from whyformer.methods import METHODS
from whyformer.prepared import Prepared
from zoo import build

compare = whyformer.compare


@pytest.mark.parametrize("name", ["hf_vit", "bert"])
def test_comparison_equals_single_explanations_in_order(name: str) -> None:
    model, inputs = build(name)
    methods: list[Any] = ["gae", ("rollout", {"start_layer": 1}), {"method": "input_x_gradient"}, "raw_attention"]
    targets: list[Any] = [None, 3, [0, 4], whyformer.targets.Contrast(1, 2)]
    comparison = compare(model, inputs, methods, targets)
    assert comparison.refusals == []
    singles = [
        whyformer.explain(model, inputs, method, target, **settings)
        for method, settings in [("gae", {}), ("rollout", {"start_layer": 1}), ("input_x_gradient", {}), ("raw_attention", {})]
        for target in targets
    ]
    for actual, expected in zip(comparison.explanations, singles, strict=True):
        assert torch.allclose(actual.scores, expected.scores, rtol=1e-12, atol=1e-14)  # they share passes
        assert (actual.method, actual.settings, actual.target_names, actual.model) == (expected.method, expected.settings, expected.target_names, expected.model)
        assert torch.equal(actual.target, expected.target)
        assert actual.diagnostics.keys() == expected.diagnostics.keys()
        for name, figures in expected.diagnostics.get("conservation", {}).items():
            assert actual.diagnostics["conservation"][name] == pytest.approx(figures)


def test_class_agnostic_method_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build("hf_vit")
    calls = []
    explain = Prepared.explain
    monkeypatch.setattr(Prepared, "explain", lambda self, method, target, **more: calls.append((method, target)) or explain(self, method, target, **more))
    prepared = []
    prepare = explaining.prepare_normalized
    monkeypatch.setattr(explaining, "prepare_normalized", lambda *a, **k: prepared.append(1) or prepare(*a, **k))
    compare(model, inputs, ["raw_attention", "gae"], [0, 1])
    assert calls == [("raw_attention", 0), ("gae", 0), ("gae", 1)]
    assert len(prepared) == 1


def test_parts_of_class_agnostic_maps_have_the_target() -> None:
    model, inputs = build("t5")
    inputs = {**inputs, "decoder_input_ids": torch.tensor([[0, 5, 6], [0, 7, 8]])}
    for target, e in zip([3, 5], compare(model, inputs, ["raw_attention"], [3, 5]).explanations, strict=True):
        assert len(e.inputs) == 2
        assert [e.part(name).target.unique().tolist() for name in e.inputs] == [[target]] * 2


def test_method_that_does_not_apply_is_a_refusal() -> None:
    model, inputs = build("hf_swin")
    comparison = compare(model, inputs, ["gae", "input_x_gradient"], [0, 1])
    assert [e.method for e in comparison.explanations] == ["input_x_gradient"] * 2
    assert [(r.method, type(r.error)) for r in comparison.refusals] == [("gae", MethodNotApplicable)]
    assert comparison.refusals[0].settings == METHODS["gae"].settings
    with pytest.raises(MethodNotApplicable, match="gae"):
        compare(model, inputs, ["gae", "rollout"])


def test_default_methods_are_all_of_the_modality() -> None:
    model, inputs = build("bert")
    comparison = compare(model, inputs)
    tried = {e.method for e in comparison.explanations} | {r.method for r in comparison.refusals}
    assert tried == {name for name, m in METHODS.items() if m.modality in ("both", "text")}


def test_likeliest_explains_the_top_classes() -> None:
    model, inputs = build("hf_vit")
    comparison = compare(model, inputs, ["gae"], likeliest=3).explanations
    order = comparison[0].logits.argsort(dim=-1, descending=True)
    assert [e.target.tolist() for e in comparison] == order[:, :3].T.tolist()
    assert compare(model, inputs, ["gae"]).explanations[0].target.tolist() == order[:, 0].tolist()
    with pytest.raises(InputError, match="likeliest"):
        compare(model, inputs, ["gae"], likeliest=0)


def test_cached_explanations_are_reused() -> None:
    model, inputs = build("hf_vit")
    ready = open_model(model).prepare(inputs)
    cache: dict[str, Any] = {}

    def once(key: Any, make: Any) -> Any:
        name, settings, target = key
        assert settings == METHODS[name].settings
        # a class-agnostic explanation is reused for every class
        cache_key = name if not METHODS[name].class_specific else f"{name} {target}"
        return cache[cache_key] if cache_key in cache else cache.setdefault(cache_key, make())

    methods = [comparing.read_method(m) for m in ("raw_attention", "gae")]
    first = list(comparing.explain_each(ready, methods, [2], once=once))
    second = list(comparing.explain_each(ready, methods, [2, 4], once=once))
    assert torch.equal(second[0].scores, first[0].scores)
    assert [e.target.tolist() for e in second] == [[2, 2], [4, 4]] * 2
    assert sorted(cache) == ["gae 2", "gae 4", "raw_attention"]


@pytest.mark.parametrize("methods", ["gae", ("rollout", {"start_layer": 1}), {"method": "rollout", "start_layer": 1}])
@pytest.mark.parametrize("targets", [None, "Contrast(1, 2)", "3"])
def test_a_single_method_or_target_is_a_list_of_one(methods: Any, targets: Any) -> None:
    model, inputs = build("hf_vit")
    (alone,) = compare(model, inputs, methods, targets).explanations
    (listed,) = compare(model, inputs, [methods], None if targets is None else [targets]).explanations
    assert torch.equal(alone.scores, listed.scores) and alone.settings == listed.settings
    assert alone.target_names == listed.target_names
    several = compare(model, inputs, (methods, "raw_attention"), targets).explanations
    assert [e.method for e in several] == [alone.method, "raw_attention"]


@pytest.mark.parametrize(("methods", "targets", "match"), [
    ("rolout", None, "Did you mean 'rollout'"), (("rollout", {"start": 1}), None, "no setting 'start'"), ("gae", "Contrast(1, 9)", "out of range"),
    (["rolout"], None, "Did you mean 'rollout'"), ([("rollout", {"start": 1})], None, "no setting 'start'"), ([3], None, "a method is a name"),
    ([{"start_layer": 0}], None, "a method is a name"), ([], None, "no methods"), (["gae"], [], "no targets"), (["gae"], [0, 9], "class 9 is out of range"),
])  # fmt: skip
def test_invalid_arguments_raise_before_any_explanation(methods: Any, targets: Any, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prepared, "explain", lambda *a, **k: pytest.fail("worked"))
    with pytest.raises(InputError, match=match):
        compare(*build("hf_vit"), methods, targets)

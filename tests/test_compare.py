"""Methods × targets of one input, with refusals: the same as single explanations, prepared once."""

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
def test_each_is_what_explain_gives_in_the_order_asked_for(name: str) -> None:
    model, inputs = build(name)
    methods: list[Any] = ["gae", ("rollout", {"start_layer": 1}), {"method": "input_x_gradient"}, "raw_attention"]
    targets: list[Any] = [None, 3, [0, 4], whyformer.targets.Contrast(1, 2)]
    found = compare(model, inputs, methods, targets)
    assert found.refusals == []
    singles = [
        whyformer.explain(model, inputs, method, target, **settings)
        for method, settings in [("gae", {}), ("rollout", {"start_layer": 1}), ("input_x_gradient", {}), ("raw_attention", {})]
        for target in targets
    ]
    for got, wanted in zip(found.explanations, singles, strict=True):
        assert torch.allclose(got.scores, wanted.scores, rtol=1e-12, atol=1e-14)  # they share passes
        assert (got.method, got.settings, got.target_names, got.model) == (wanted.method, wanted.settings, wanted.target_names, wanted.model)
        assert torch.equal(got.target, wanted.target)
        assert got.diagnostics.keys() == wanted.diagnostics.keys()
        for name, figures in wanted.diagnostics.get("conservation", {}).items():
            assert got.diagnostics["conservation"][name] == pytest.approx(figures)


def test_what_is_the_same_for_all_classes_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build("hf_vit")
    made = []
    explain = Prepared.explain
    monkeypatch.setattr(Prepared, "explain", lambda self, method, target, **more: made.append((method, target)) or explain(self, method, target, **more))
    prepared = []
    prepare = explaining.prepare
    monkeypatch.setattr(explaining, "prepare", lambda *a, **k: prepared.append(1) or prepare(*a, **k))
    compare(model, inputs, ["raw_attention", "gae"], [0, 1])
    assert made == [("raw_attention", 0), ("gae", 0), ("gae", 1)]
    assert len(prepared) == 1


def test_a_method_that_does_not_apply_is_told_and_the_others_go_on() -> None:
    model, inputs = build("hf_swin")
    found = compare(model, inputs, ["gae", "input_x_gradient"], [0, 1])
    assert [e.method for e in found.explanations] == ["input_x_gradient"] * 2
    assert [(r.method, type(r.error)) for r in found.refusals] == [("gae", MethodNotApplicable)]
    assert found.refusals[0].settings == METHODS["gae"].settings
    with pytest.raises(MethodNotApplicable, match="gae"):
        compare(model, inputs, ["gae", "rollout"])


def test_without_methods_all_that_take_such_an_input() -> None:
    model, inputs = build("bert")
    found = compare(model, inputs)
    tried = {e.method for e in found.explanations} | {r.method for r in found.refusals}
    assert tried == {name for name, m in METHODS.items() if m.modality in ("both", "text")}


def test_the_likeliest_classes() -> None:
    model, inputs = build("hf_vit")
    found = compare(model, inputs, ["gae"], likeliest=3).explanations
    order = found[0].logits.argsort(dim=-1, descending=True)
    assert [e.target.tolist() for e in found] == order[:, :3].T.tolist()
    assert compare(model, inputs, ["gae"]).explanations[0].target.tolist() == order[:, 0].tolist()
    with pytest.raises(InputError, match="likeliest"):
        compare(model, inputs, ["gae"], likeliest=0)


def test_remembered_ones_are_not_made_again() -> None:
    model, inputs = build("hf_vit")
    ready = open_model(model).prepare(inputs)
    kept: dict[str, Any] = {}

    def once(key: Any, make: Any) -> Any:
        name, settings, target = key
        assert settings == METHODS[name].settings
        # of a method that is the same for all classes that of any class will do
        place = name if not METHODS[name].class_specific else f"{name} {target}"
        return kept[place] if place in kept else kept.setdefault(place, make())

    methods = [comparing.read_method(m) for m in ("raw_attention", "gae")]
    first = list(comparing.each(ready, methods, [2], once=once))
    again = list(comparing.each(ready, methods, [2, 4], once=once))
    assert torch.equal(again[0].scores, first[0].scores)
    assert [e.target.tolist() for e in again] == [[2, 2], [4, 4]] * 2
    assert sorted(kept) == ["gae 2", "gae 4", "raw_attention"]


@pytest.mark.parametrize(("methods", "targets", "match"), [
    (["rolout"], None, "Did you mean 'rollout'"), ([("rollout", {"start": 1})], None, "no setting 'start'"), ([3], None, "a method is a name"),
    ([{"start_layer": 0}], None, "a method is a name"), ([], None, "no methods"), (["gae"], [], "no targets"), (["gae"], [0, 9], "class 9 is out of range"),
])  # fmt: skip
def test_a_slip_of_the_pen_is_an_error_before_any_work(methods: Any, targets: Any, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prepared, "explain", lambda *a, **k: pytest.fail("worked"))
    with pytest.raises(InputError, match=match):
        compare(*build("hf_vit"), methods, targets)

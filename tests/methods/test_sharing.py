"""Methods that share recorded passes give the same results as separate runs."""

import gc
import weakref
from itertools import combinations

import pytest
import torch

from snapshot import assert_unchanged, snapshot
from whyformer.comparing import Refusal, compare, explain_each, read_method
from whyformer.errors import InputError, MethodNotApplicable
from whyformer.explaining import open_model
from whyformer.methods import METHODS
from whyformer.methods import sharing as sharing_module
from whyformer.methods.sharing import SharedPasses
from whyformer.rules.registered import custom_rules
from zoo import bert, build, hf_swin, hf_vit, prepared

NINE = [
    "raw_attention", "rollout", "gradcam_attention", "partial_lrp", "lrp", "transformer_attribution", "gae", "lrp_ah_ln", "input_x_gradient",
]  # fmt: skip
TARGETS = [None, [1, 3]]
MODELS = {
    "vit sdpa": lambda: hf_vit("sdpa"), "vit eager": lambda: hf_vit("eager"), "bert sdpa": lambda: bert("sdpa"), "bert eager": lambda: bert("eager"),
}  # fmt: skip


def to_double(builder):
    model, inputs = builder()
    inputs64 = (
        {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
        if isinstance(inputs, dict)
        else inputs.double()
    )
    return model.double(), inputs64


def assert_same(result, separate):
    """Compare scores, logits and diagnostics with a separate run, to 1e-12 in float64."""
    assert (result.scores - separate.scores).abs().max() <= 1e-12 * separate.scores.abs().max()
    assert (result.logits - separate.logits).abs().max() <= 1e-12 * separate.logits.abs().max()
    assert torch.equal(result.target, separate.target)
    assert result.diagnostics.keys() == separate.diagnostics.keys()
    actual_figures, expected_figures = result.diagnostics.get("conservation", {}), separate.diagnostics.get("conservation", {})
    assert actual_figures.keys() == expected_figures.keys()
    for name, figures in expected_figures.items():
        for actual, expected in zip(
            *([f[k] for k in sorted(f)] if isinstance(f, dict) else [f] for f in (actual_figures[name], figures)), strict=True
        ):
            assert actual == pytest.approx(expected, rel=1e-7, abs=1e-9), (result.method, name)


def explain_shared(ready, shared, method, target, **settings):
    return shared.run(lambda shared: ready.explain(method, target, shared=shared, **settings))


def explain_all_shared(ready, methods, target):
    """Run each method with shared passes; no failure may be hidden by a fallback to a separate run."""
    shared = SharedPasses()
    results = [explain_shared(ready, shared, m, target) for m in methods]
    assert shared.failed == []
    shared.release()
    return results, shared


@pytest.mark.parametrize("name", MODELS)
def test_pairs_of_methods_share_passes(name):
    model, inputs = to_double(MODELS[name])
    before, ready = snapshot(model), open_model(model).prepare(inputs)
    separate = {(m, t): ready.explain(m, TARGETS[t]) for m in NINE for t in (0, 1)}
    for number, pair in enumerate(combinations(NINE, 2)):
        pair = pair[:: 1 if number % 2 else -1]
        results, _ = explain_all_shared(ready, pair, TARGETS[number % 2])
        for e in results:
            assert_same(e, separate[e.method, number % 2])
    assert_unchanged(model, before)


@pytest.mark.parametrize(
    "name",
    [
        "hf_deit_teacher",
        "timm_vit_mean",
        "torchvision_vit",
        "electra",
        "distilbert",
        "modernbert_mean",
        "gpt2",
        "encoder_sequence_first",
    ],
)
def test_nine_methods_share_passes_on_other_models(name):
    """Fused and decomposed norms, mean and CLS readout, token-first models, causal masks; both orders of methods."""
    ready = prepared(*build(name))
    for target, methods in zip(TARGETS, (NINE, NINE[::-1]), strict=True):
        results, shared = explain_all_shared(ready, methods, target)
        assert shared.uses >= 9  # some methods request more than one pass
        for e in results:
            assert_same(e, ready.explain(e.method, target))


def test_shared_passes_with_different_settings():
    """Later start layers, single blocks and other rules, which request different graphs."""
    ready = prepared(*to_double(MODELS["bert sdpa"]))
    requests = [
        ("gae", {"start_layer": 1}), ("gae", {"start_layer": -1}), ("gradcam_attention", {"block": 0}), ("transformer_attribution", {"start_layer": 2}),
        ("transformer_attribution", {"weighting": "attention"}), ("partial_lrp", {"block": 1, "rule": "gamma"}), ("lrp", {"rule": "shared", "alpha": 2.0}),
        ("lrp", {"rule": "epsilon"}), ("saliency", {}), ("rollout", {"gradient_weighted": True}), ("attention_flow", {}),
    ]  # fmt: skip
    shared = SharedPasses()
    for method, settings in requests:
        assert_same(explain_shared(ready, shared, method, 2, **settings), ready.explain(method, 2, **settings))
    assert shared.failed == []
    assert shared.uses == len(requests)


LRPS = ["lrp_ah", "lrp_ln", "lrp_ah_ln"]


@pytest.mark.parametrize("name", [*MODELS, "gpt2", "timm_vit_mean", "encoder_sequence_first"])
def test_multipliers_share_passes_with_relevance_and_map_methods(name):
    """The LRP variants of Ali et al. on fused and decomposed attention, before and after methods that share another pass."""
    ready = prepared(*(to_double(MODELS[name]) if name in MODELS else build(name)))
    methods = ["transformer_attribution", *LRPS, "gae", "lrp_ah", "input_x_gradient"]
    results, shared = explain_all_shared(ready, methods, 1)
    for e in results:
        assert_same(e, ready.explain(e.method, 1))
    assert shared.uses >= len(methods)


def test_decomposed_norm_gets_separate_pass_for_its_derivative():
    """The operations of Llama's norm round to float32, unlike the equivalent norm unit."""
    ready, shared = prepared(*build("llama")), SharedPasses()
    explain_shared(ready, shared, "lrp", 1)
    for method, views in (("lrp_ah", 2), ("lrp_ln", 3), ("lrp_ah_ln", 4)):
        assert_same(explain_shared(ready, shared, method, 1), ready.explain(method, 1))
        assert shared.uses == views


def test_multiplier_composites_and_custom_rules_share_passes():
    ready = prepared(*to_double(MODELS["vit sdpa"]))
    shared = SharedPasses()
    for settings in ({"composite": c} for c in ("libra", "attnlrp", "cp_lrp", "gim")):
        result = explain_shared(ready, shared, "input_x_gradient", 1, **settings)
        assert torch.equal(result.scores, ready.explain("input_x_gradient", 1, **settings).scores)
    assert shared.uses == 4
    shared = SharedPasses()
    with custom_rules({"gelu": "identity"}):
        explain_shared(ready, shared, "lrp", 1)
        result, views = explain_shared(ready, shared, "lrp_ln", 1), shared.uses
        assert torch.equal(result.scores, ready.explain("lrp_ln", 1).scores)
    assert views == 2


def test_nine_methods_need_one_forward_pass():
    """Counts forward passes instead of measuring time."""
    model, inputs = to_double(MODELS["vit sdpa"])
    ready, forwards = open_model(model).prepare(inputs), []
    model.register_forward_pre_hook(lambda *_: forwards.append(1))
    ready.explain("gae")  # caches what is measured once per model
    forwards.clear()
    results = list(explain_each(ready, [read_method(m) for m in NINE], [1]))
    assert [e.method for e in results] == NINE
    assert len(forwards) == 1


def test_targets_keep_their_order_and_refusal_is_reported_once():
    model, inputs = to_double(MODELS["bert sdpa"])
    ready, methods = (
        open_model(model).prepare(inputs),
        [("gae", {}), ("vit_cx", {}), ("rollout", {}), ("transformer_attribution", {})],
    )
    requests = [(METHODS[m], s) for m, s in methods]
    results = list(explain_each(ready, requests, [0, 2, 4]))
    summary = [(result.method, isinstance(result, Refusal) or result.target.tolist()) for result in results]
    assert summary == [
        *[("gae", [c, c]) for c in (0, 2, 4)], ("vit_cx", True), *[("rollout", [c, c]) for c in (0, 2, 4)],
        *[("transformer_attribution", [c, c]) for c in (0, 2, 4)],
    ]  # fmt: skip
    for result in results:
        if not isinstance(result, Refusal):
            assert_same(result, ready.explain(result.method, result.target[0].item()))


@pytest.mark.parametrize("case", ["several streams", "half precision"])
def test_shared_results_with_several_streams_and_half_precision(case):
    """Methods on several streams share one pass; relevance of half-precision models needs a float32 pass."""
    model, inputs = build("t5") if case == "several streams" else hf_vit()
    if case == "several streams":
        ready = open_model(model).prepare({**inputs, "decoder_input_ids": torch.tensor([[0, 5, 6], [0, 7, 8]])})
    else:
        ready = open_model(model.bfloat16()).prepare(inputs.bfloat16())
    shared = SharedPasses()
    for method in ("transformer_attribution", "gae", "lrp", "input_x_gradient"):
        assert torch.equal(explain_shared(ready, shared, method, 1).scores, ready.explain(method, 1).scores)
    # attention in half precision is read from the model's own pass
    assert shared.uses == (4 if case == "several streams" else 5)


def test_windowed_model_shares_passes_and_refuses_map_methods():
    ready, shared = prepared(*to_double(hf_swin)), SharedPasses()
    for method in ("lrp", "input_x_gradient"):
        assert_same(explain_shared(ready, shared, method, 1), ready.explain(method, 1))
    assert shared.failed == []
    with pytest.raises(MethodNotApplicable, match="windows"):
        explain_shared(ready, shared, "gae", 1)


def test_model_changed_between_methods_is_recorded_again():
    model, inputs = to_double(MODELS["bert sdpa"])
    ready, shared = open_model(model).prepare(inputs), SharedPasses()
    explain_shared(ready, shared, "gae", 1)
    with torch.no_grad():
        model.classifier.weight.mul_(-3)
        model.bert.encoder.layer[0].output.dense.weight.add_(0.1)
    assert_same(
        explain_shared(ready, shared, "transformer_attribution", 1), ready.explain("transformer_attribution", 1)
    )


def test_errors_of_shared_methods_equal_those_of_separate_runs():
    """A refused method or an invalid target does not affect other methods that share passes."""
    model, inputs = to_double(MODELS["bert sdpa"])
    with pytest.raises(InputError, match="99"):
        compare(model, inputs, ["gae", "rollout"], [99])
    comparison = compare(model, inputs, ["gae", ("gae", {"aggregation": {"heads": 7}}), "transformer_attribution"], [1])
    assert "head 7" in str(comparison.refusals[0].error)
    assert [e.method for e in comparison.explanations] == ["gae", "transformer_attribution"]
    assert_same(comparison.explanations[1], open_model(model).prepare(inputs).explain("transformer_attribution", 1))


def test_shared_passes_are_freed_when_iteration_stops(monkeypatch):
    instances = []
    monkeypatch.setattr(sharing_module, "SharedPasses", lambda *a, **k: instances.append(SharedPasses(*a, **k)) or instances[-1])
    model, inputs = to_double(MODELS["vit sdpa"])
    stream = explain_each(open_model(model).prepare(inputs), [read_method(m) for m in NINE], [1])
    next(stream)
    recorded = weakref.ref(instances[0]._passes[False][2])
    assert recorded() is not None
    stream.close()  # the remaining results are not requested
    gc.collect()
    assert recorded() is None

"""Methods that share one pass give exactly what each gives alone."""

import gc
import weakref
from itertools import combinations

import pytest
import torch

from snapshot import assert_unchanged, snapshot
from whyformer.comparing import Refusal, compare, each, read_method
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


def doubled(builder):
    model, inputs = builder()
    wide = (
        {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
        if isinstance(inputs, dict)
        else inputs.double()
    )
    return model.double(), wide


def assert_same(found, alone):
    """To 1e-12 in float64, with all that was measured on the way."""
    assert (found.scores - alone.scores).abs().max() <= 1e-12 * alone.scores.abs().max()
    assert (found.logits - alone.logits).abs().max() <= 1e-12 * alone.logits.abs().max()
    assert torch.equal(found.target, alone.target)
    assert found.diagnostics.keys() == alone.diagnostics.keys()
    mine, wanted = found.diagnostics.get("conservation", {}), alone.diagnostics.get("conservation", {})
    assert mine.keys() == wanted.keys()
    for name, figures in wanted.items():
        for one, other in zip(
            *([f[k] for k in sorted(f)] if isinstance(f, dict) else [f] for f in (mine[name], figures)), strict=True
        ):
            assert one == pytest.approx(other, rel=1e-7, abs=1e-9), (found.method, name)


def sharing(ready, shared, method, target, **settings):
    return shared.around(lambda shared: ready.explain(method, target, shared=shared, **settings))


def one_by_one(ready, methods, target):
    """Each method, sharing; what fails in sharing must not be hidden by the second try."""
    shared = SharedPasses()
    found = [sharing(ready, shared, m, target) for m in methods]
    assert shared.failed == []
    shared.release()
    return found, shared


@pytest.mark.parametrize("name", MODELS)
def test_every_pair_of_the_nine(name):
    model, inputs = doubled(MODELS[name])
    before, ready = snapshot(model), open_model(model).prepare(inputs)
    alone = {(m, t): ready.explain(m, TARGETS[t]) for m in NINE for t in (0, 1)}
    for number, pair in enumerate(combinations(NINE, 2)):
        pair = pair[:: 1 if number % 2 else -1]
        found, _ = one_by_one(ready, pair, TARGETS[number % 2])
        for e in found:
            assert_same(e, alone[e.method, number % 2])
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
def test_all_nine_in_other_models(name):
    """Fused and written norms, mean and CLS read out, tokens first, causal masks; in both orders, all from one pass."""
    ready = prepared(*build(name))
    for target, methods in zip(TARGETS, (NINE, NINE[::-1]), strict=True):
        found, shared = one_by_one(ready, methods, target)
        assert shared.views >= 9  # some ask for more than one pass
        for e in found:
            assert_same(e, ready.explain(e.method, target))


def test_settings_that_begin_elsewhere():
    """Upper halves, one block, other rules: which graph a method asks for is its own affair."""
    ready = prepared(*doubled(MODELS["bert sdpa"]))
    asked = [
        ("gae", {"start_layer": 1}), ("gae", {"start_layer": -1}), ("gradcam_attention", {"block": 0}), ("transformer_attribution", {"start_layer": 2}),
        ("transformer_attribution", {"weighting": "attention"}), ("partial_lrp", {"block": 1, "rule": "gamma"}), ("lrp", {"rule": "shared", "alpha": 2.0}),
        ("lrp", {"rule": "epsilon"}), ("saliency", {}), ("rollout", {"gradient_weighted": True}), ("attention_flow", {}),
    ]  # fmt: skip
    shared = SharedPasses()
    for method, settings in asked:
        assert_same(sharing(ready, shared, method, 2, **settings), ready.explain(method, 2, **settings))
    assert shared.failed == []
    assert shared.views == len(asked)


LRPS = ["lrp_ah", "lrp_ln", "lrp_ah_ln"]


@pytest.mark.parametrize("name", [*MODELS, "gpt2", "timm_vit_mean", "encoder_sequence_first"])
def test_multipliers_beside_relevance_and_maps(name):
    """The LRPs of Ali et al. on fused and written attention, before and after methods that share another pass."""
    ready = prepared(*(doubled(MODELS[name]) if name in MODELS else build(name)))
    methods = ["transformer_attribution", *LRPS, "gae", "lrp_ah", "input_x_gradient"]
    found, shared = one_by_one(ready, methods, 1)
    for e in found:
        assert_same(e, ready.explain(e.method, 1))
    assert shared.views >= len(methods)


def test_a_norm_written_by_hand_is_itself_where_its_derivative_is_wanted():
    """Its own operations differ from the norm that it stands for by the rounding to float32 in them."""
    ready, shared = prepared(*build("llama")), SharedPasses()
    sharing(ready, shared, "lrp", 1)
    for method, views in (("lrp_ah", 2), ("lrp_ln", 3), ("lrp_ah_ln", 4)):
        assert_same(sharing(ready, shared, method, 1), ready.explain(method, 1))
        assert shared.views == views


def test_all_composites_of_multipliers_share_a_pass_with_rules_that_a_user_declares_too():
    ready = prepared(*doubled(MODELS["vit sdpa"]))
    shared = SharedPasses()
    for settings in ({"composite": c} for c in ("libra", "attnlrp", "cp_lrp", "gim")):
        found = sharing(ready, shared, "input_x_gradient", 1, **settings)
        assert torch.equal(found.scores, ready.explain("input_x_gradient", 1, **settings).scores)
    assert shared.views == 4
    shared = SharedPasses()
    with custom_rules({"gelu": "identity"}):
        sharing(ready, shared, "lrp", 1)
        found, views = sharing(ready, shared, "lrp_ln", 1), shared.views
        assert torch.equal(found.scores, ready.explain("lrp_ln", 1).scores)
    assert views == 2


def test_one_forward_pass_does_for_nine():
    """The cost is counted, not timed."""
    model, inputs = doubled(MODELS["vit sdpa"])
    ready, forwards = open_model(model).prepare(inputs), []
    model.register_forward_pre_hook(lambda *_: forwards.append(1))
    ready.explain("gae")  # what is measured once for a model is known from here on
    forwards.clear()
    found = list(each(ready, [read_method(m) for m in NINE], [1]))
    assert [e.method for e in found] == NINE
    assert len(forwards) == 1


def test_several_targets_keep_their_order_and_a_refusal_is_told_once():
    model, inputs = doubled(MODELS["bert sdpa"])
    ready, methods = (
        open_model(model).prepare(inputs),
        [("gae", {}), ("vit_cx", {}), ("rollout", {}), ("transformer_attribution", {})],
    )
    asked = [(METHODS[m], s) for m, s in methods]
    found = list(each(ready, asked, [0, 2, 4]))
    told = [(one.method, isinstance(one, Refusal) or one.target.tolist()) for one in found]
    assert told == [
        *[("gae", [c, c]) for c in (0, 2, 4)], ("vit_cx", True), *[("rollout", [c, c]) for c in (0, 2, 4)],
        *[("transformer_attribution", [c, c]) for c in (0, 2, 4)],
    ]  # fmt: skip
    for one in found:
        if not isinstance(one, Refusal):
            assert_same(one, ready.explain(one.method, one.target[0].item()))


@pytest.mark.parametrize("of", ["several streams", "half precision"])
def test_what_one_graph_may_not_serve_is_made_apart(of):
    """All methods over several streams share one pass, and relevance of half precision flows in a pass of float32."""
    model, inputs = build("t5") if of == "several streams" else hf_vit()
    if of == "several streams":
        ready = open_model(model).prepare({**inputs, "decoder_input_ids": torch.tensor([[0, 5, 6], [0, 7, 8]])})
    else:
        ready = open_model(model.bfloat16()).prepare(inputs.bfloat16())
    shared = SharedPasses()
    for method in ("transformer_attribution", "gae", "lrp", "input_x_gradient"):
        assert torch.equal(sharing(ready, shared, method, 1).scores, ready.explain(method, 1).scores)
    # what attends in half precision is read off the model's own pass
    assert shared.views == (4 if of == "several streams" else 5)


def test_windows_have_a_pass_too_and_what_refuses_them_does():
    ready, shared = prepared(*doubled(hf_swin)), SharedPasses()
    for method in ("lrp", "input_x_gradient"):
        assert_same(sharing(ready, shared, method, 1), ready.explain(method, 1))
    assert shared.failed == []
    with pytest.raises(MethodNotApplicable, match="windows"):
        sharing(ready, shared, "gae", 1)


def test_a_model_that_was_changed_between_two_methods_is_recorded_again():
    model, inputs = doubled(MODELS["bert sdpa"])
    ready, shared = open_model(model).prepare(inputs), SharedPasses()
    sharing(ready, shared, "gae", 1)
    with torch.no_grad():
        model.classifier.weight.mul_(-3)
        model.bert.encoder.layer[0].output.dense.weight.add_(0.1)
    assert_same(
        sharing(ready, shared, "transformer_attribution", 1), ready.explain("transformer_attribution", 1)
    )


def test_what_fails_is_told_as_it_is_alone():
    """A refusal, and a slip in the target, among methods that share; the others are not touched."""
    model, inputs = doubled(MODELS["bert sdpa"])
    with pytest.raises(InputError, match="99"):
        compare(model, inputs, ["gae", "rollout"], [99])
    found = compare(model, inputs, ["gae", ("gae", {"aggregation": {"heads": 7}}), "transformer_attribution"], [1])
    assert "head 7" in str(found.refusals[0].error)
    assert [e.method for e in found.explanations] == ["gae", "transformer_attribution"]
    assert_same(found.explanations[1], open_model(model).prepare(inputs).explain("transformer_attribution", 1))


def test_nothing_is_kept_when_all_is_done(monkeypatch):
    made = []
    monkeypatch.setattr(sharing_module, "SharedPasses", lambda *a, **k: made.append(SharedPasses(*a, **k)) or made[-1])
    model, inputs = doubled(MODELS["vit sdpa"])
    stream = each(open_model(model).prepare(inputs), [read_method(m) for m in NINE], [1])
    next(stream)
    whole = weakref.ref(made[0]._passed[False][2])
    assert whole() is not None
    stream.close()  # nobody wants the rest
    gc.collect()
    assert whole() is None

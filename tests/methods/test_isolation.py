"""Runs are isolated from user hooks; a model that changes during a run is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whyformer
from whyformer.errors import ModelError
from zoo import build, call, randomise

METHODS = [
    "rollout", "raw_attention", "gae", "transformer_attribution", "value_zeroing", "norm_attention", "gradcam", "lrp",
    "lrp_ah_ln", "input_x_gradient", "gradcam_attention", "attention_flow",
]  # fmt: skip
MODULES = {
    "bert": {"block": "bert.encoder.layer.1", "inside a block": "bert.encoder.layer.1.attention.self", "before": "bert.embeddings", "behind": "classifier"},
    "timm_vit": {"block": "blocks.1", "inside a block": "blocks.1.attn", "before": "patch_embed", "behind": "norm"},
}  # fmt: skip


def call_in_hook(model: nn.Module, path: str, action: Callable[[], Any], before: bool) -> list[Any]:
    """Call ``action`` in a forward hook, but not in forward passes of the action itself."""
    results: list[Any] = []
    busy = False

    def hook(*_: Any) -> None:
        nonlocal busy
        if not busy:
            busy = True
            try:
                results.append(action())
            finally:
                busy = False

    module = model.get_submodule(path)
    module.register_forward_pre_hook(hook) if before else module.register_forward_hook(hook)
    return results


def scores(model: nn.Module, inputs: Any, method: str) -> Tensor:
    return whyformer.explain(model, inputs, method=method, target=1).scores


@pytest.mark.part(times=2)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(("name", "position"), [(n, p) for n, modules in MODULES.items() for p in modules])
def test_forward_in_user_hook_does_not_change_scores(name: str, position: str, before: bool, method: str) -> None:
    model, inputs = build(name)
    expected = scores(model, inputs, method)
    results = call_in_hook(model, MODULES[name][position], lambda: call(model, inputs).detach(), before)
    assert torch.equal(scores(model, inputs, method), expected)
    assert results


@pytest.mark.parametrize("method", ["rollout", "gae", "transformer_attribution", "value_zeroing"])
def test_forward_of_part_or_other_model_in_user_hook_does_not_change_scores(method: str) -> None:
    model, inputs = build("bert")
    other_model, pixels = build("timm_vit")
    expected = scores(model, inputs, method)
    for action in (lambda: other_model(pixels), lambda: model.bert(**inputs), lambda: model.bert.encoder.layer[0](torch.randn(2, 10, 24).double())):
        model, inputs = build("bert")
        assert call_in_hook(model, "bert.encoder.layer.1", action, before=False) == []
        # value zeroing: vmap cannot run every hook; without vmap the last digits differ
        assert torch.allclose(scores(model, inputs, method), expected, rtol=0, atol=1e-12)


@pytest.mark.part
@pytest.mark.parametrize("inner", ["rollout", "gae", "transformer_attribution", "value_zeroing", "lrp_ah_ln"])
@pytest.mark.parametrize("outer", ["rollout", "gae", "transformer_attribution", "value_zeroing", "lrp_ah_ln"])
def test_explanation_in_user_hook_is_independent(outer: str, inner: str) -> None:
    """Both runs, on the same model, give the scores that they give separately."""
    model, inputs = build("bert")
    expected, expected_inner = scores(model, inputs, outer), scores(model, inputs, inner)
    results = call_in_hook(model, "bert.encoder.layer.1", lambda: scores(model, inputs, inner), before=False)
    assert torch.allclose(scores(model, inputs, outer), expected, rtol=0, atol=1e-12)
    assert results and all(torch.equal(inner_scores, expected_inner) for inner_scores in results)


def test_user_hook_that_changes_output_is_explained() -> None:
    """A hook that adds the output of another layer is part of the model, gradients included."""
    model, inputs = build("bert")
    adapter = nn.Linear(24, 24).double()

    class Adapted(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block, self.adapter = block, adapter

        def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            out = self.block(hidden, *args, **kwargs)
            first = out if isinstance(out, Tensor) else out[0]
            first = first + self.adapter(first)
            return first if isinstance(out, Tensor) else (first, *out[1:])

    def steer(_: nn.Module, __: Any, out: Any) -> Any:
        first = out if isinstance(out, Tensor) else out[0]
        first = first + adapter(first)
        return first if isinstance(out, Tensor) else (first, *out[1:])

    model.bert.encoder.layer[1].register_forward_hook(steer)
    reference, _ = build("bert")
    reference.bert.encoder.layer[1] = Adapted(reference.bert.encoder.layer[1])
    layers = nn.ModuleList([Adapted(b) if not isinstance(b, Adapted) else b for b in reference.bert.encoder.layer])
    for i in (0, 2):
        layers[i].adapter = nn.Linear(24, 24).double()
        nn.init.zeros_(layers[i].adapter.weight)
        nn.init.zeros_(layers[i].adapter.bias)
    reference.bert.encoder.layer = layers
    for method in ("input_x_gradient", "transformer_attribution", "rollout"):
        assert torch.allclose(scores(model, inputs, method), scores(reference.eval(), inputs, method), atol=1e-9)


@pytest.mark.parametrize("method", ["rollout", "transformer_attribution", "value_zeroing", "occlusion", "smoothgrad"])
def test_model_that_changes_during_explanation_is_refused(method: str) -> None:
    def changed_in_place(model: nn.Module) -> None:
        with torch.no_grad():
            model.classifier.weight.mul_(1.01)

    def changed_data(model: nn.Module) -> None:
        model.classifier.weight.data = model.classifier.weight.data * 1.01

    def replaced_parameter(model: nn.Module) -> None:
        model.classifier.weight = nn.Parameter(model.classifier.weight.detach() * 1.01)

    for change in (changed_in_place, changed_data, replaced_parameter):
        model, inputs = build("bert")
        call_in_hook(model, "bert.encoder.layer.1", lambda m=model, c=change: c(m), before=False)
        with pytest.raises(ModelError, match=r"changed while it was being explained \(parameter 'classifier\.weight'\)"):
            scores(model, inputs, method)
    model, inputs = build("bert")
    call_in_hook(model, "bert.encoder.layer.1", lambda: model.bert.train(), before=False)
    with pytest.raises(ModelError, match=r"switched to training mode|call model\.eval\(\)"):
        scores(model, inputs, method)


def test_model_that_changes_during_attention_maps_is_refused() -> None:
    model, inputs = build("bert")
    call_in_hook(model, "bert.encoder.layer.1", lambda: model.bert.train(), before=False)
    with pytest.raises(ModelError, match=r"switched to training mode|call model\.eval\(\)"):
        whyformer.attention_maps(model, inputs)


def test_buffer_may_change_in_forward_pass() -> None:
    """For example a growing rotary table or a counter."""
    model, inputs = build("bert")
    model.register_buffer("calls", torch.zeros(()))
    model.bert.register_forward_pre_hook(lambda *_: model.calls.add_(1) and None)
    assert scores(model, inputs, "transformer_attribution").isfinite().all()


def test_offloaded_weights_are_not_a_change() -> None:
    """As with offloading: outside the forward pass the parameter is on the meta device."""
    model, inputs = build("bert")
    expected = scores(model, inputs, "rollout")
    layer, weight = model.classifier, model.classifier.weight

    def load(*_: Any) -> None:
        layer._parameters["weight"] = weight

    def unload(*_: Any) -> None:
        layer._parameters["weight"] = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)

    layer.register_forward_pre_hook(load)
    layer.register_forward_hook(unload)
    unload()
    assert torch.equal(scores(model, inputs, "rollout"), expected)


@pytest.mark.parametrize("once", [True, False])
def test_parameter_added_during_explanation_is_refused(once: bool) -> None:
    """Unless it is added once, as by a model that completes its weights in its first pass; then it is explained with it."""
    model, inputs = build("bert")
    block = model.bert.encoder.layer[1]
    expected = whyformer.explain(model, inputs, "rollout").scores

    def change(*_: Any) -> None:
        if not (once and hasattr(block, "extra")):
            block.extra = nn.Parameter(torch.zeros(3))

    block.register_forward_hook(change)
    if once:
        assert torch.equal(whyformer.explain(model, inputs, "rollout").scores, expected)
        return
    with pytest.raises(ModelError, match=r"changed while it was being explained \(parameter 'bert\.encoder\.layer\.1\.extra'\)"):
        whyformer.explain(model, inputs, "rollout")


def rwkv() -> nn.Module:
    from transformers import RwkvConfig, RwkvForCausalLM

    size = {"hidden_size": 16, "num_hidden_layers": 4, "attention_hidden_size": 16, "intermediate_size": 32, "context_length": 32}
    return randomise(RwkvForCausalLM(RwkvConfig(vocab_size=60, rescale_every=2, **size))).double()


@pytest.mark.parametrize("method", ["input_x_gradient", "attnlrp", "auto", "occlusion"])
def test_model_that_rescales_its_weights_in_its_first_pass(method: str) -> None:
    """RWKV divides weights of later blocks once; the model and the scores are those after a plain pass."""
    used, fresh = rwkv(), rwkv()
    ids, settings = {"input_ids": torch.randint(0, 60, (1, 6))}, {"baseline": 3} if method == "occlusion" else {}
    with torch.no_grad():
        logits = used(**ids).logits
    e = whyformer.explain(fresh, ids, method, 7, **settings)
    assert torch.allclose(e.scores, whyformer.explain(used, ids, method, 7, **settings).scores, atol=1e-12)
    with torch.no_grad():
        assert torch.allclose(fresh(**ids).logits, logits, atol=1e-12)


@pytest.mark.parametrize("call", [
    lambda model, ids: whyformer.record(model, ids).outputs["logits"].tensor,
    lambda model, ids: [unit.shape for unit in whyformer.audit(model, ids, target=3).program],
    lambda model, ids: whyformer.explain_generation(model, ids["input_ids"][0], [4, 5], "attnlrp")[1].scores,
], ids=["record", "audit", "generation"])  # fmt: skip
def test_other_entry_points_take_a_model_that_rescales_its_weights(call: Any) -> None:
    used, ids = rwkv(), {"input_ids": torch.randint(0, 60, (1, 6))}
    with torch.no_grad():
        used(**ids)
    assert str(call(rwkv(), ids)) == str(call(used, ids))

"""A run knows its own hooks: what a user's hook does beside it, and what changes the model meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whyformer
from whyformer.errors import ModelError
from zoo import build, call

METHODS = [
    "rollout", "raw_attention", "gae", "transformer_attribution", "value_zeroing", "norm_attention", "gradcam", "lrp",
    "lrp_ah_ln", "input_x_gradient", "gradcam_attention", "attention_flow",
]  # fmt: skip
PLACES = {
    "bert": {"block": "bert.encoder.layer.1", "inside a block": "bert.encoder.layer.1.attention.self", "before": "bert.embeddings", "behind": "classifier"},
    "timm_vit": {"block": "blocks.1", "inside a block": "blocks.1.attn", "before": "patch_embed", "behind": "norm"},
}  # fmt: skip


def hooked(model: nn.Module, place: str, action: Callable[[], Any], before: bool) -> list[Any]:
    """Calls ``action`` in a forward hook, but not in the forward passes that the action itself makes."""
    seen: list[Any] = []
    busy = False

    def hook(*_: Any) -> None:
        nonlocal busy
        if not busy:
            busy = True
            try:
                seen.append(action())
            finally:
                busy = False

    module = model.get_submodule(place)
    module.register_forward_pre_hook(hook) if before else module.register_forward_hook(hook)
    return seen


def scores(model: nn.Module, inputs: Any, method: str) -> Tensor:
    return whyformer.explain(model, inputs, method=method, target=1).scores


@pytest.mark.part(times=2)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(("name", "place"), [(n, p) for n, places in PLACES.items() for p in places])
def test_a_forward_inside_a_users_hook_changes_nothing(name: str, place: str, before: bool, method: str) -> None:
    model, inputs = build(name)
    wanted = scores(model, inputs, method)
    seen = hooked(model, PLACES[name][place], lambda: call(model, inputs).detach(), before)
    assert torch.equal(scores(model, inputs, method), wanted)
    assert seen


@pytest.mark.parametrize("method", ["rollout", "gae", "transformer_attribution", "value_zeroing"])
def test_nor_does_a_forward_of_a_part_or_of_another_model(method: str) -> None:
    model, inputs = build("bert")
    other, pixels = build("timm_vit")
    wanted = scores(model, inputs, method)
    for action in (lambda: other(pixels), lambda: model.bert(**inputs), lambda: model.bert.encoder.layer[0](torch.randn(2, 10, 24).double())):
        model, inputs = build("bert")
        assert hooked(model, "bert.encoder.layer.1", action, before=False) == []
        # value zeroing: vmap cannot run everything that a hook may do, and without it the last digits differ
        assert torch.allclose(scores(model, inputs, method), wanted, rtol=0, atol=1e-12)


@pytest.mark.part
@pytest.mark.parametrize("inner", ["rollout", "gae", "transformer_attribution", "value_zeroing", "lrp_ah_ln"])
@pytest.mark.parametrize("outer", ["rollout", "gae", "transformer_attribution", "value_zeroing", "lrp_ah_ln"])
def test_an_explanation_inside_a_users_hook(outer: str, inner: str) -> None:
    """Of the same model: both are what they are alone."""
    model, inputs = build("bert")
    wanted, wanted_inside = scores(model, inputs, outer), scores(model, inputs, inner)
    seen = hooked(model, "bert.encoder.layer.1", lambda: scores(model, inputs, inner), before=False)
    assert torch.allclose(scores(model, inputs, outer), wanted, rtol=0, atol=1e-12)
    assert seen and all(torch.equal(found, wanted_inside) for found in seen)


def test_what_a_users_hook_changes_is_still_seen() -> None:
    """A steering vector scaled by another layer is part of the model: its gradient counts."""
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
    written, _ = build("bert")
    written.bert.encoder.layer[1] = Adapted(written.bert.encoder.layer[1])
    layers = nn.ModuleList([Adapted(b) if not isinstance(b, Adapted) else b for b in written.bert.encoder.layer])
    for i in (0, 2):
        layers[i].adapter = nn.Linear(24, 24).double()
        nn.init.zeros_(layers[i].adapter.weight)
        nn.init.zeros_(layers[i].adapter.bias)
    written.bert.encoder.layer = layers
    for method in ("input_x_gradient", "transformer_attribution", "rollout"):
        assert torch.allclose(scores(model, inputs, method), scores(written.eval(), inputs, method), atol=1e-9)


@pytest.mark.parametrize("method", ["rollout", "transformer_attribution", "value_zeroing", "occlusion", "smoothgrad"])
def test_a_model_that_changes_meanwhile_is_refused(method: str) -> None:
    def written(model: nn.Module) -> None:
        with torch.no_grad():
            model.classifier.weight.mul_(1.01)

    def stored(model: nn.Module) -> None:
        model.classifier.weight.data = model.classifier.weight.data * 1.01

    def replaced(model: nn.Module) -> None:
        model.classifier.weight = nn.Parameter(model.classifier.weight.detach() * 1.01)

    for change in (written, stored, replaced):
        model, inputs = build("bert")
        hooked(model, "bert.encoder.layer.1", lambda m=model, c=change: c(m), before=False)
        with pytest.raises(ModelError, match=r"changed while it was being explained \(parameter 'classifier\.weight'\)"):
            scores(model, inputs, method)
    model, inputs = build("bert")
    hooked(model, "bert.encoder.layer.1", lambda: model.bert.train(), before=False)
    with pytest.raises(ModelError, match=r"switched to training mode|call model\.eval\(\)"):
        scores(model, inputs, method)


def test_also_where_the_attention_maps_are_asked_for() -> None:
    model, inputs = build("bert")
    hooked(model, "bert.encoder.layer.1", lambda: model.bert.train(), before=False)
    with pytest.raises(ModelError, match=r"switched to training mode|call model\.eval\(\)"):
        whyformer.attention_maps(model, inputs)


def test_a_buffer_may_change_in_a_forward_pass() -> None:
    """A rotary table that grows, a counter."""
    model, inputs = build("bert")
    model.register_buffer("calls", torch.zeros(()))
    model.bert.register_forward_pre_hook(lambda *_: model.calls.add_(1) and None)
    assert scores(model, inputs, "transformer_attribution").isfinite().all()


def test_weights_that_are_loaded_for_each_pass_are_no_change() -> None:
    """As offloading does it: the parameter is a stand-in without memory outside the forward pass."""
    model, inputs = build("bert")
    wanted = scores(model, inputs, "rollout")
    layer, kept = model.classifier, model.classifier.weight

    def load(*_: Any) -> None:
        layer._parameters["weight"] = kept

    def unload(*_: Any) -> None:
        layer._parameters["weight"] = nn.Parameter(torch.empty_like(kept, device="meta"), requires_grad=False)

    layer.register_forward_pre_hook(load)
    layer.register_forward_hook(unload)
    unload()
    assert torch.equal(scores(model, inputs, "rollout"), wanted)


@pytest.mark.parametrize("goes", [True, False])
def test_a_parameter_that_comes_or_goes_meanwhile(goes: bool) -> None:
    model, inputs = build("bert")
    block = model.bert.encoder.layer[1]
    if goes:
        block.extra = nn.Parameter(torch.zeros(3))

    def change(*_: Any) -> None:
        block.extra = None if goes else nn.Parameter(torch.zeros(3))

    block.register_forward_hook(change)
    with pytest.raises(ModelError, match=r"changed while it was being explained \(parameter 'bert\.encoder\.layer\.1\.extra'\)"):
        whyformer.explain(model, inputs, "rollout")

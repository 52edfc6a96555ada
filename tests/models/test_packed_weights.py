"""Weights in 8 or 4 bits, and weights that are put in place for each pass: the same scores as with ordinary weights, or a refusal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import whyformer
from whyformer.errors import ModelError, UnknownOperation
from zoo import build

METHODS = ("attnlrp", "cp_lrp", "gim", "input_x_gradient", "gae", "transformer_attribution", "lrp", "rollout")


class Packed(nn.Module):
    """A linear layer whose weights are integers with a scale for each row, or for each group of a row."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, layer.bias

    def weight(self) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight(), self.bias)


class Eight(Packed):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer)
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("whole", (layer.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def weight(self) -> Tensor:
        return self.whole.to(self.scale.dtype) * self.scale


class EightBehind(Eight):
    """The scale comes after the product."""

    def forward(self, x: Tensor) -> Tensor:
        y = functional.linear(x, self.whole.to(x.dtype)) * self.scale.mT
        return y if self.bias is None else y + self.bias


class Four(Packed):
    """Two numbers in a byte, groups of four with a scale; a product with the transposed weights."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer)
        groups = layer.weight.detach().reshape(layer.out_features, -1, 4)
        scale = groups.abs().amax(-1, keepdim=True) / 7
        numbers = ((groups / scale).round() + 8).to(torch.uint8).reshape(layer.out_features, -1)
        self.register_buffer("bytes", numbers[:, ::2] | (numbers[:, 1::2] << 4))
        self.register_buffer("scale", scale)

    def weight(self) -> Tensor:
        numbers = torch.stack([self.bytes & 15, self.bytes >> 4], -1).reshape(*self.scale.shape[:2], 4)
        return ((numbers.to(self.scale.dtype) - 8) * self.scale).reshape(self.out_features, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight().t()
        return y if self.bias is None else y + self.bias


def packed(kind: type[Packed]) -> tuple[nn.Module, nn.Module, Any]:
    """(the model with packed weights, the same one with what they are unpacked to, inputs)."""
    plain, inputs = build("llama")
    model = copy.deepcopy(plain)
    for owner, own in zip(list(model.modules()), list(plain.modules()), strict=True):
        for name, layer in list(owner.named_children()):
            if isinstance(layer, nn.Linear):
                made = kind(layer)
                setattr(owner, name, made)
                getattr(own, name).weight = nn.Parameter(made.weight().clone(), requires_grad=False)
    return model, plain, inputs


@pytest.mark.part
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", [Eight, EightBehind, Four])
def test_packed_weights_give_the_scores_of_what_they_are_unpacked_to(kind: type[Packed], method: str) -> None:
    model, plain, inputs = packed(kind)
    before = {n: b.clone() for n, b in model.named_buffers()}
    found, wanted = (whyformer.explain(m, inputs, method, 1).scores for m in (model, plain))
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-9 * float(wanted.abs().max()))
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())


@torch.library.custom_op("whyformer_tests::integer_product", mutates_args=())
def integer_product(x: Tensor, whole: Tensor, scale: Tensor) -> Tensor:
    return x @ (whole.to(scale.dtype) * scale).mT


class Product(torch.autograd.Function):
    """A kernel of integers with a derivative of its own, as bitsandbytes' 8-bit layers have on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, whole: Tensor, scale: Tensor) -> Tensor:
        ctx.weight = whole.to(scale.dtype) * scale
        return integer_product(x, whole, scale)

    @staticmethod
    def backward(ctx: Any, *flows: Tensor) -> Any:
        return flows[0] @ ctx.weight, None, None


class Kernel(Eight):
    def forward(self, x: Tensor) -> Tensor:
        assert self.bias is None
        return Product.apply(x, self.whole, self.scale)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("method", ["attnlrp", "cp_lrp", "lrp_ah_ln"])
def test_the_way_out_of_a_kernel_with_a_derivative_is_exact(method: str) -> None:
    model, plain, inputs = packed(Kernel)
    with pytest.raises(ModelError, match="integer_product"):
        whyformer.explain(model, inputs, method, 1)
    found = whyformer.explain(model, inputs, method, 1, rules={Product: "adjoint"}).scores
    wanted = whyformer.explain(plain, inputs, method, 1).scores
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6 * float(wanted.abs().max()))


def test_methods_of_relevance_name_the_ways_out_of_a_kernel() -> None:
    model, _, inputs = packed(Kernel)
    with pytest.raises(ModelError, match="integer_product"):
        whyformer.explain(model, inputs, "lrp", 1)
    with pytest.raises(UnknownOperation, match=r'register\(Product, like="linear"\).* multipliers.*; or explain the model before'):
        whyformer.explain(model, inputs, "lrp", 1, rules={Product: "adjoint"})


RULES = [("transformer_attribution", {}), ("partial_lrp", {}), *(("lrp", {"rule": rule}) for rule in ("separate", "alpha_beta", "epsilon", "gamma"))]


@pytest.mark.part
@pytest.mark.parametrize(("kind", "declared"), [(Kernel, Product), (EightBehind, EightBehind)], ids=["kernel", "module"])
@pytest.mark.parametrize(("method", "settings"), RULES, ids=[" ".join((m, *s.values())) for m, s in RULES])
def test_the_weights_of_what_is_declared_linear_are_read_off_what_it_does(kind: type[Packed], declared: Any, method: str, settings: dict[str, Any]) -> None:
    """Rules of layers split the weights by sign: the derivative alone gave a ``lrp`` that was 99 % off."""
    model, plain, inputs = packed(kind)
    found = whyformer.explain(model, inputs, method, 1, rules={declared: "linear"}, **settings).scores
    wanted = whyformer.explain(plain, inputs, method, 1, **settings).scores
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6 * float(wanted.abs().max()))


class Rounding(Product):
    """A kernel that rounds what enters it, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, whole: Tensor, scale: Tensor) -> Tensor:
        steps = 7 / x.abs().amax(-1, keepdim=True)
        return Product.forward(ctx, (x * steps).round() / steps, whole, scale)


class RoundingKernel(Eight):
    def forward(self, x: Tensor) -> Tensor:
        return Rounding.apply(x, self.whole, self.scale)  # type: ignore[no-untyped-call]


class Mixing(Eight):
    """Its weights mix the tokens: no rows of a layer."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.1 * super().forward(x).cumsum(-2)


@pytest.mark.parametrize(("kind", "declared"), [(RoundingKernel, Rounding), (Mixing, Mixing)], ids=["rounding", "mixing"])
def test_weights_that_cannot_be_read_off_are_refused_with_what_holds(kind: type[Packed], declared: Any) -> None:
    model, _, inputs = packed(kind)
    for method in ("lrp", "transformer_attribution"):
        with pytest.raises(UnknownOperation, match=rf"'{declared.__name__}' is registered as linear.*like=\"adjoint\" suffices \(attnlrp"):
            whyformer.explain(model, inputs, method, 1, rules={declared: "linear"})
    found, wanted = (whyformer.explain(model, inputs, "attnlrp", 1, rules={declared: like}).scores for like in ("linear", "adjoint"))
    assert torch.equal(found, wanted)


class Wrapped(Tensor):
    """Weights as a class of tensors that unpacks itself where it is used, as torchao and quanto have them."""

    @staticmethod
    def __new__(cls, whole: Tensor, scale: Tensor, rounds: bool) -> Wrapped:
        return Tensor._make_wrapper_subclass(cls, whole.shape, dtype=scale.dtype, device=whole.device)

    def __init__(self, whole: Tensor, scale: Tensor, rounds: bool) -> None:
        self.whole, self.scale, self.rounds = whole, scale, rounds

    def dequantize(self) -> Tensor:
        return self.whole.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            x, weight = args[:2]
            steps = 4 / x.detach().abs().amax() if weight.rounds else None
            x = x if steps is None else (x * steps).round() / steps
            return func(x, weight.dequantize(), *args[2:], **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].whole, args[0].scale, args[0].rounds)
        raise NotImplementedError(f"{func} of packed weights")


def wrapped(rounds: bool) -> tuple[nn.Module, nn.Module, Any]:
    model, plain, inputs = packed(Eight)
    for owner, own in zip(list(model.modules()), list(plain.modules()), strict=False):
        for name, layer in list(owner.named_children()):
            if isinstance(layer, Eight):
                made = copy.deepcopy(getattr(own, name))
                made.weight = nn.Parameter(Wrapped(layer.whole, layer.scale, rounds), requires_grad=False)
                setattr(owner, name, made)
    return model, plain, inputs


@pytest.mark.parametrize("method", ["attnlrp", "cp_lrp", "input_x_gradient", "transformer_attribution", "lrp"])
def test_weights_of_a_class_of_their_own(method: str) -> None:
    model, plain, inputs = wrapped(rounds=False)
    found, wanted = (whyformer.explain(m, inputs, method, 1).scores for m in (model, plain))
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-9 * float(wanted.abs().max()))


def test_rules_are_refused_where_activations_are_rounded_with_the_weights() -> None:
    model, _, inputs = wrapped(rounds=True)
    with pytest.raises(UnknownOperation, match=r"module 'score'.*divisor carries relevance.*or occlusion"):
        whyformer.explain(model, inputs, "lrp", 1)
    assert whyformer.explain(model, inputs, "occlusion", 1).scores.any()


# -- weights that are there for the length of a pass --------------------------------------------------------------------
class Execution:
    """What accelerate leaves at a module, which says where it is run."""

    execution_device = torch.device("cpu")


def offloaded(model: nn.Module, *, by: str) -> Callable[[], bool]:
    """Take all weights out; each module puts its own in for the length of its forward. Returns whether all are out."""
    owners = [m for m in model.modules() if m._parameters]
    kept = {id(m): dict(m._parameters) for m in owners}

    def load(module: nn.Module) -> None:
        module._parameters.update({n: nn.Parameter(p.detach().clone(), False) for n, p in kept[id(module)].items() if p is not None})

    def unload(module: nn.Module) -> None:
        empty = {n: nn.Parameter(torch.empty_like(p, device="meta"), False) for n, p in kept[id(module)].items() if p is not None}
        module._parameters.update(empty)

    def around(module: nn.Module) -> Callable[..., Any]:
        plain = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            load(module)
            try:
                return plain(*args, **kwargs)
            finally:
                unload(module)

        return forward

    for module in owners:
        module._hf_hook = Execution()
        if by == "forward":
            module.forward = around(module)
        else:
            module.register_forward_pre_hook(lambda m, *_: load(m))
            module.register_forward_hook(lambda m, *_: unload(m))
        unload(module)
    return lambda: all(p.is_meta for p in model.parameters())


@pytest.mark.part
@pytest.mark.parametrize("by", ["forward", "hooks"])
@pytest.mark.parametrize("method", METHODS)
def test_weights_that_are_put_in_for_each_pass(method: str, by: str) -> None:
    plain, inputs = build("llama")
    model = copy.deepcopy(plain)
    out = offloaded(model, by=by)
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), m.forward) for m in model.modules()]
    found, wanted = (whyformer.explain(m, inputs, method, 1).scores for m in (model, plain))
    assert torch.equal(found, wanted)
    assert out()
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks), m.forward) for m in model.modules()] == hooks


@pytest.mark.parametrize("method", ["attnlrp", "input_x_gradient"])
def test_blocks_that_are_run_again_have_their_weights_put_in_again(method: str) -> None:
    plain, inputs = build("llama_lm")
    model = copy.deepcopy(plain)
    out = offloaded(model, by="forward")
    found = whyformer.explain(model, inputs, method, 1, checkpoint=True).scores
    assert torch.equal(found, whyformer.explain(plain, inputs, method, 1).scores)
    assert out()


def test_an_answer_of_a_model_whose_weights_are_out() -> None:
    plain, _ = build("llama_lm")
    model = copy.deepcopy(plain)
    out = offloaded(model, by="forward")
    for settings in ({}, {"checkpoint": True}):
        found, wanted = (whyformer.explain_generation(m, [5, 9, 7, 4], max_new_tokens=3, **settings) for m in (model, plain))
        assert found.ids == wanted.ids
        assert torch.equal(found.matrix, wanted.matrix)
    assert out()

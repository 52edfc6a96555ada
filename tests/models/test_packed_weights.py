"""Quantized weights (8 or 4 bits) and offloaded weights have the scores of ordinary weights, or raise."""

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


class QuantizedLinear(nn.Module):
    """A linear layer whose weights are integers with a scale per row, or per group of a row."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, layer.bias

    def weight(self) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight(), self.bias)


class Eight(QuantizedLinear):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer)
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("whole", (layer.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def weight(self) -> Tensor:
        return self.whole.to(self.scale.dtype) * self.scale


class EightBehind(Eight):
    """The scale is applied after the product."""

    def forward(self, x: Tensor) -> Tensor:
        y = functional.linear(x, self.whole.to(x.dtype)) * self.scale.mT
        return y if self.bias is None else y + self.bias


class Four(QuantizedLinear):
    """Two numbers per byte, groups of four with a scale, and a product with the transposed weights."""

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


def quantized(kind: type[QuantizedLinear]) -> tuple[nn.Module, nn.Module, Any]:
    """(quantized model, equal model with dequantized weights, inputs)."""
    plain, inputs = build("llama")
    model = copy.deepcopy(plain)
    for owner, plain_owner in zip(list(model.modules()), list(plain.modules()), strict=True):
        for name, layer in list(owner.named_children()):
            if isinstance(layer, nn.Linear):
                replacement = kind(layer)
                setattr(owner, name, replacement)
                getattr(plain_owner, name).weight = nn.Parameter(replacement.weight().clone(), requires_grad=False)
    return model, plain, inputs


@pytest.mark.part
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", [Eight, EightBehind, Four])
def test_quantized_weights_have_the_scores_of_dequantized_weights(kind: type[QuantizedLinear], method: str) -> None:
    model, plain, inputs = quantized(kind)
    before = {n: b.clone() for n, b in model.named_buffers()}
    actual, expected = (whyformer.explain(m, inputs, method, 1).scores for m in (model, plain))
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-9 * float(expected.abs().max()))
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())


@torch.library.custom_op("whyformer_tests::integer_product", mutates_args=())
def integer_product(x: Tensor, whole: Tensor, scale: Tensor) -> Tensor:
    return x @ (whole.to(scale.dtype) * scale).mT


class IntegerProduct(torch.autograd.Function):
    """An integer kernel with a custom derivative, like the 8-bit layers of bitsandbytes on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, whole: Tensor, scale: Tensor) -> Tensor:
        ctx.weight = whole.to(scale.dtype) * scale
        return integer_product(x, whole, scale)

    @staticmethod
    def backward(ctx: Any, *flows: Tensor) -> Any:
        return flows[0] @ ctx.weight, None, None


class KernelLinear(Eight):
    def forward(self, x: Tensor) -> Tensor:
        assert self.bias is None
        return IntegerProduct.apply(x, self.whole, self.scale)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("method", ["attnlrp", "cp_lrp", "lrp_ah_ln"])
def test_kernel_with_derivative_is_exact_under_adjoint_rule(method: str) -> None:
    model, plain, inputs = quantized(KernelLinear)
    with pytest.raises(ModelError, match="integer_product"):
        whyformer.explain(model, inputs, method, 1)
    actual = whyformer.explain(model, inputs, method, 1, rules={IntegerProduct: "adjoint"}).scores
    expected = whyformer.explain(plain, inputs, method, 1).scores
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


def test_relevance_methods_name_remedies_for_a_kernel() -> None:
    model, _, inputs = quantized(KernelLinear)
    with pytest.raises(ModelError, match="integer_product"):
        whyformer.explain(model, inputs, "lrp", 1)
    with pytest.raises(UnknownOperation, match=r'register\(IntegerProduct, like="linear"\).* multipliers.*; or explain the model before'):
        whyformer.explain(model, inputs, "lrp", 1, rules={IntegerProduct: "adjoint"})


RULES = [("transformer_attribution", {}), ("partial_lrp", {}), *(("lrp", {"rule": rule}) for rule in ("separate", "alpha_beta", "epsilon", "gamma"))]


@pytest.mark.part
@pytest.mark.parametrize(("kind", "declared"), [(KernelLinear, IntegerProduct), (EightBehind, EightBehind)], ids=["kernel", "module"])
@pytest.mark.parametrize(("method", "settings"), RULES, ids=[" ".join((m, *s.values())) for m, s in RULES])
def test_weights_of_declared_linear_operations_are_measured(kind: type[QuantizedLinear], declared: Any, method: str, settings: dict[str, Any]) -> None:
    """Rules of layers split the weights by sign, which the derivative alone does not give."""
    model, plain, inputs = quantized(kind)
    actual = whyformer.explain(model, inputs, method, 1, rules={declared: "linear"}, **settings).scores
    expected = whyformer.explain(plain, inputs, method, 1, **settings).scores
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


class RoundingProduct(IntegerProduct):
    """A kernel that also rounds its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, whole: Tensor, scale: Tensor) -> Tensor:
        steps = 7 / x.abs().amax(-1, keepdim=True)
        return IntegerProduct.forward(ctx, (x * steps).round() / steps, whole, scale)


class RoundingLinear(Eight):
    def forward(self, x: Tensor) -> Tensor:
        return RoundingProduct.apply(x, self.whole, self.scale)  # type: ignore[no-untyped-call]


class TokenMixingLinear(Eight):
    """A layer that mixes the tokens, so that it is not a linear layer on single tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.1 * super().forward(x).cumsum(-2)


@pytest.mark.parametrize(("kind", "declared"), [(RoundingLinear, RoundingProduct), (TokenMixingLinear, TokenMixingLinear)], ids=["rounding", "mixing"])
def test_unmeasurable_weights_of_declared_linear_operations_raise(kind: type[QuantizedLinear], declared: Any) -> None:
    model, _, inputs = quantized(kind)
    for method in ("lrp", "transformer_attribution"):
        with pytest.raises(UnknownOperation, match=rf"'{declared.__name__}' is registered as linear.*like=\"adjoint\" suffices \(attnlrp"):
            whyformer.explain(model, inputs, method, 1, rules={declared: "linear"})
    actual, expected = (whyformer.explain(model, inputs, "attnlrp", 1, rules={declared: like}).scores for like in ("linear", "adjoint"))
    assert torch.equal(actual, expected)


class DequantizedOnUse(Tensor):
    """A tensor subclass of quantized weights that dequantizes on use, as in torchao and quanto."""

    @staticmethod
    def __new__(cls, whole: Tensor, scale: Tensor, rounds: bool) -> DequantizedOnUse:
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


def with_tensor_subclass(rounds: bool) -> tuple[nn.Module, nn.Module, Any]:
    model, plain, inputs = quantized(Eight)
    for owner, plain_owner in zip(list(model.modules()), list(plain.modules()), strict=False):
        for name, layer in list(owner.named_children()):
            if isinstance(layer, Eight):
                replacement = copy.deepcopy(getattr(plain_owner, name))
                replacement.weight = nn.Parameter(DequantizedOnUse(layer.whole, layer.scale, rounds), requires_grad=False)
                setattr(owner, name, replacement)
    return model, plain, inputs


@pytest.mark.parametrize("method", ["attnlrp", "cp_lrp", "input_x_gradient", "transformer_attribution", "lrp"])
def test_tensor_subclass_weights_have_the_scores_of_dequantized_weights(method: str) -> None:
    model, plain, inputs = with_tensor_subclass(rounds=False)
    actual, expected = (whyformer.explain(m, inputs, method, 1).scores for m in (model, plain))
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-9 * float(expected.abs().max()))


def test_relevance_rules_raise_with_quantized_activations() -> None:
    model, _, inputs = with_tensor_subclass(rounds=True)
    with pytest.raises(UnknownOperation, match=r"module 'score'.*divisor carries relevance.*or occlusion"):
        whyformer.explain(model, inputs, "lrp", 1)
    assert whyformer.explain(model, inputs, "occlusion", 1).scores.any()


# -- offloaded weights --------------------------------------------------------------------------------------------------
class Execution:
    """A stub of the hook of accelerate, which has the device of a module."""

    execution_device = torch.device("cpu")


def offloaded(model: nn.Module, *, by: str) -> Callable[[], bool]:
    """Offload all weights; each module loads its weights during its forward. Returns a check that all are offloaded."""
    owners = [m for m in model.modules() if m._parameters]
    weights = {id(m): dict(m._parameters) for m in owners}

    def load(module: nn.Module) -> None:
        module._parameters.update({n: nn.Parameter(p.detach().clone(), False) for n, p in weights[id(module)].items() if p is not None})

    def unload(module: nn.Module) -> None:
        empty = {n: nn.Parameter(torch.empty_like(p, device="meta"), False) for n, p in weights[id(module)].items() if p is not None}
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
def test_offloaded_weights_have_the_scores_of_loaded_weights(method: str, by: str) -> None:
    plain, inputs = build("llama")
    model = copy.deepcopy(plain)
    is_offloaded = offloaded(model, by=by)
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), m.forward) for m in model.modules()]
    actual, expected = (whyformer.explain(m, inputs, method, 1).scores for m in (model, plain))
    assert torch.equal(actual, expected)
    assert is_offloaded()
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks), m.forward) for m in model.modules()] == hooks


@pytest.mark.parametrize("method", ["attnlrp", "input_x_gradient"])
def test_offloaded_weights_with_checkpointing(method: str) -> None:
    plain, inputs = build("llama_lm")
    model = copy.deepcopy(plain)
    is_offloaded = offloaded(model, by="forward")
    actual = whyformer.explain(model, inputs, method, 1, checkpoint=True).scores
    assert torch.equal(actual, whyformer.explain(plain, inputs, method, 1).scores)
    assert is_offloaded()


def test_generation_with_offloaded_weights() -> None:
    plain, _ = build("llama_lm")
    model = copy.deepcopy(plain)
    is_offloaded = offloaded(model, by="forward")
    for settings in ({}, {"checkpoint": True}):
        actual, expected = (whyformer.explain_generation(m, [5, 9, 7, 4], max_new_tokens=3, **settings) for m in (model, plain))
        assert actual.ids == expected.ids
        assert torch.equal(actual.matrix, expected.matrix)
    assert is_offloaded()

"""Rules that users register for custom operations: torch.library operators, autograd functions and modules."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import whyformer
import whyformer.rules
from whyformer.errors import InputError, ModelError, UnknownOperation
from whyformer.rules import registered
from whyformer.rules.core import Call, Rule
from zoo import GeluInNumpy, WrittenGelu, gelu_backward, unseen

WIDTH, TOKENS = 6, 4
MULTIPLIERS = ["lrp_ah_ln", "lrp_ln"]
METHODS = ["transformer_attribution", "lrp", *MULTIPLIERS]
OUTSIDE_TORCH = ["autograd function", "context apart"]  # their forward is computed outside torch


@torch.library.custom_op("whyformer_tests::soft", mutates_args=())
def soft(x: Tensor) -> Tensor:
    return F.gelu(x)


soft.register_autograd(gelu_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


@torch.library.custom_op("whyformer_tests::straight", mutates_args=())
def straight(x: Tensor) -> Tensor:
    return F.gelu(x)


straight.register_autograd(lambda ctx, flow: flow)


@torch.library.custom_op("whyformer_tests::scaled", mutates_args=())
def scaled(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _scaled_backward(ctx: Any, flow: Tensor) -> tuple[Tensor, None, None]:
    x, weight = ctx.saved_tensors
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(F.rms_norm(x, x.shape[-1:], weight, ctx.eps), x, flow)[0], None, None


def _scaled_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.eps = inputs[2]


scaled.register_autograd(_scaled_backward, setup_context=_scaled_context)


class SoftWithSetupContext(torch.autograd.Function):
    """GELU with a separate setup_context."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return unseen(F.gelu(x))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *flows: Tensor) -> Tensor:
        return gelu_backward(ctx, flows[0])


EARLY = GeluInNumpy.apply  # a reference from before any registration


class CustomNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(1 + torch.randn(WIDTH, generator=torch.Generator().manual_seed(5)) / 10)
        self.tiny = 1e-4

    def forward(self, x: Tensor) -> Tensor:
        return scaled(x, self.scale, self.tiny)


class FunctionBlock(nn.Module):
    """An attention block with a function in its MLP branch."""

    def __init__(self, function: Callable[[Tensor], Tensor] | nn.Module) -> None:
        super().__init__()
        self.function = function
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.second(self.function(self.first(x)))


class DecomposedBlock(FunctionBlock):
    """The same block with decomposed attention."""

    def forward(self, x: Tensor) -> Tensor:
        attention = self.attention
        q, k, v = F.linear(x, attention.in_proj_weight, attention.in_proj_bias).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + attention.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.second(self.function(self.first(x)))


class CustomFunctionModel(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor] | nn.Module, block: type[FunctionBlock] = FunctionBlock) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block(function) for _ in range(2)])
        self.head = nn.Linear(WIDTH, 3)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if "function" not in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


X = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def scores(function: Any, method: str, **options: Any) -> Tensor:
    return whyformer.explain(CustomFunctionModel(function), X, method, **options).scores


@pytest.fixture(autouse=True)
def _restore_registry() -> Iterator[None]:
    before = dict(registered._registered)
    yield
    registered._registered.clear()
    registered._registered.update(before)


# name -> (registered key, function that the model calls)
SOFT: dict[str, tuple[Any, Any]] = {
    "name": ("whyformer_tests::soft", soft),
    "packet": (torch.ops.whyformer_tests.soft, torch.ops.whyformer_tests.soft),
    "definition": (soft, soft),
    "autograd function": (GeluInNumpy, EARLY),
    "context apart": (SoftWithSetupContext, lambda x: SoftWithSetupContext.apply(x)),
    "module": (WrittenGelu, WrittenGelu()),
    "torch function": (torch.special.erf, lambda x: 0.5 * x * (1 + torch.special.erf(x / 2**0.5))),
}


@pytest.mark.part(times=2)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("variant", [w for w in SOFT if w != "torch function"])
def test_registered_rule_applies_to_custom_operation(variant: str, method: str) -> None:
    key, function = SOFT[variant]
    expected = scores(F.gelu, method)

    def assert_result_without_rule() -> None:
        if method in MULTIPLIERS and variant not in OUTSIDE_TORCH:  # the derivative is the rule
            assert torch.allclose(scores(function, method), expected, rtol=1e-9, atol=1e-12)
        elif variant != "module":
            with pytest.raises((UnknownOperation, ModelError), match=r"whyformer\.rules\.register"):
                scores(function, method)

    assert_result_without_rule()
    assert torch.allclose(scores(function, method, rules={key: "gelu"}), expected, rtol=1e-9, atol=1e-12)
    assert_result_without_rule()  # the rule applied to that call only
    whyformer.rules.register(key, like="gelu")
    assert torch.allclose(scores(function, method), expected, rtol=1e-9, atol=1e-12)
    assert torch.allclose(scores(function, method, rules={key: "activation"}), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("variant", ["name", "autograd function", "module"])
def test_registered_rule_with_secant(variant: str) -> None:
    key, function = SOFT[variant]
    expected = scores(F.gelu, "lrp_ah_ln", secant=True)
    assert torch.allclose(scores(function, "lrp_ah_ln", secant=True, rules={key: "gelu"}), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("variant", list(SOFT))
def test_gradient_methods_need_no_rule(variant: str) -> None:
    key, function = SOFT[variant]
    expected = scores(F.gelu, "input_x_gradient")
    if variant in OUTSIDE_TORCH:
        with pytest.raises(ModelError, match="outside of torch"):
            scores(function, "input_x_gradient")
    else:
        assert torch.allclose(scores(function, "input_x_gradient"), expected, rtol=1e-9, atol=1e-12)
    assert torch.allclose(scores(function, "input_x_gradient", rules={key: "gelu"}), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("like", ["rms_norm", "layer_norm"])
def test_custom_operation_registered_as_norm(like: str, method: str) -> None:
    module = CustomNorm()
    expected = scores(lambda x: F.rms_norm(x, (WIDTH,), module.scale.detach().double(), module.tiny), method)
    for key in (CustomNorm, "whyformer_tests::scaled"):
        assert torch.allclose(scores(module, method, rules={key: like}), expected, rtol=1e-6, atol=1e-9)


def test_registering_other_function_as_norm_raises() -> None:
    with pytest.raises(ModelError, match="registered as a norm"):
        scores(WrittenGelu(), "lrp_ln", rules={WrittenGelu: "layer_norm"})


@pytest.mark.parametrize("variant", ["name", "autograd function", "module"])
def test_adjoint_rule_applies_to_multipliers_only(variant: str) -> None:
    """For multipliers it is the ordinary derivative; for relevance it is refused."""
    key, function = SOFT[variant]
    assert torch.allclose(scores(function, "lrp_ah", rules={key: "adjoint"}), scores(F.gelu, "lrp_ah"), rtol=1e-9, atol=1e-12)
    with pytest.raises(UnknownOperation):
        scores(function, "lrp", rules={key: "adjoint"})


@pytest.mark.parametrize("variant", ["name", "autograd function", "module"])
def test_user_defined_rule(variant: str) -> None:
    key, function = SOFT[variant]

    def twice(call: Call, flow: Tensor) -> list[Tensor]:
        return [2 * flow]

    def same(call: Call, flow: Tensor) -> list[Tensor]:
        return [flow]

    for method in ("lrp", "transformer_attribution"):
        assert torch.allclose(scores(function, method, rules={key: Rule("mine", same)}), scores(F.gelu, method), rtol=1e-9, atol=1e-12)
        assert not torch.allclose(scores(function, method, rules={key: Rule("mine", twice)}), scores(F.gelu, method))
    expected = scores(straight, "lrp_ah")
    assert torch.allclose(scores(function, "lrp_ah", rules={key: Rule("mine", gradient=same)}), expected, rtol=1e-9, atol=1e-12)
    assert torch.allclose(scores(function, "lrp_ah", rules={key: "identity"}), expected, rtol=1e-9, atol=1e-12)
    for method, rule in {"lrp": Rule("mine", gradient=same), "lrp_ah": Rule("mine", same)}.items():
        with pytest.raises(UnknownOperation):
            scores(function, method, rules={key: rule})


@pytest.mark.parametrize(("composite", "method"), [("ah", "lrp_ah"), ("deep_taylor", "lrp")])
@pytest.mark.parametrize("variant", ["name", "autograd function", "module"])
def test_record_uses_registered_rule(variant: str, composite: str, method: str) -> None:
    key, function = SOFT[variant]
    rule = Rule("mine", lambda call, flow: [3 * flow], lambda call, flow: [2 * flow])
    whyformer.rules.register(key, rule=rule)
    expected = scores(function, method, **({"rule": "shared"} if method == "lrp" else {}))
    record = whyformer.record(CustomFunctionModel(function), X)
    (vectors,) = record.roots
    target = CustomFunctionModel(function)(X).argmax(-1).tolist()
    result = torch.stack([record.relevance(vectors, t, composite)[i] for i, t in enumerate(target)]).sum(-1)
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-10)
    assert not torch.allclose(scores(F.gelu, method, **({"rule": "shared"} if method == "lrp" else {})), result)


def test_like_linear_is_the_z_rule() -> None:
    """For an operation that is linear in the input: R_i = x_i Σ_o W_oi R_o / y_o, as for a weighted sum."""
    constant = torch.randn(TOKENS, TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    class Mix(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.func.vmap(lambda sample: constant @ sample)(x)

    def z(call: Call, flow: Tensor) -> list[Tensor]:
        (x,) = call.operands
        return [x * (constant.mT @ (flow / (constant @ x)))]

    def gradient(call: Call, flow: Tensor) -> list[Tensor]:
        return [constant.mT @ flow]

    for method in METHODS:
        expected = scores(Mix(), method, rules={Mix: Rule("z", z, gradient)})
        assert torch.allclose(scores(Mix(), method, rules={Mix: "linear"}), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_like_linear_with_hidden_weights_equals_layer_rule(method: str, bias: bool) -> None:
    layer = nn.Linear(WIDTH, WIDTH, bias=bias).double().requires_grad_(False)

    class HiddenLinear(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return layer(x)

        @staticmethod
        def backward(ctx: Any, *flows: Tensor) -> Tensor:
            return flows[0] @ layer.weight

    expected = scores(layer, method)
    result = scores(lambda x: HiddenLinear.apply(x), method, rules={HiddenLinear: "linear"})  # type: ignore[no-untyped-call]
    assert torch.allclose(result, expected, rtol=1e-6, atol=1e-9 * float(expected.abs().max()))


class SumOfTwo(nn.Module):
    def __init__(self, sign: int) -> None:
        super().__init__()
        self.sign = sign

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.func.vmap(lambda u, v: u + self.sign * v)(x, y)


class SumWithTanh(nn.Module):
    def __init__(self, sum_of_two: nn.Module) -> None:
        super().__init__()
        self.sum_of_two = sum_of_two

    def forward(self, x: Tensor) -> Tensor:
        return self.sum_of_two(x, x.tanh().roll(1, -1))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("like", "sign"), [("add", 1), ("sub", -1)])
def test_operation_registered_as_sum_of_two_branches(like: str, sign: int, method: str) -> None:
    """Each branch receives the share of the sum rule, not half as for factors."""
    module = SumWithTanh(SumOfTwo(sign))
    expected = scores(lambda x: torch.add(x, x.tanh().roll(1, -1)) if sign == 1 else torch.sub(x, x.tanh().roll(1, -1)), method)
    assert torch.allclose(scores(module, method, rules={SumOfTwo: like}), expected, rtol=1e-9, atol=1e-12)
    wrong = {"add": "sub", "sub": "add"}[like]
    if method in ("lrp", "transformer_attribution"):
        with pytest.raises(ModelError, match=f"registered as {wrong}, but gives other values"):
            scores(module, method, rules={SumOfTwo: wrong})


def test_invalid_registrations_raise() -> None:
    with pytest.raises(InputError, match="Did you mean 'gelu'"):
        scores(F.gelu, "lrp", rules={"i0": "gellu"})
    with pytest.raises(InputError, match="is not an operation"):
        scores(F.gelu, "lrp", rules={3: "gelu"})
    for bad in ({}, {"like": "gelu", "rule": Rule("mine")}, {"like": 3}):
        with pytest.raises(InputError, match="like="):
            whyformer.rules.register("i0", **bad)
    for name in ("relou", "my_ns::missing", F.softsign):
        with pytest.raises(InputError, match="no operator"):
            whyformer.rules.register(name, like="gelu")


def test_python_functions_cannot_be_registered() -> None:
    """A function of the user named like an operator must not change the rule of that operator."""

    def relu(x: Tensor) -> Tensor:
        return x.clamp(min=0)

    for function in (relu, lambda x: x, print, math.exp):
        with pytest.raises(InputError, match="as a module"):
            whyformer.rules.register(function, like="identity")


@pytest.mark.parametrize("variant", ["name", "autograd function", "module"])
def test_audit_lists_registered_operations(variant: str) -> None:
    key, function = SOFT[variant]
    whyformer.rules.register(key, like="gelu")
    operations = whyformer.audit(CustomFunctionModel(function), X).operations
    activations = [o for o in operations if o.kind == "activation"]
    assert [o.count for o in activations] == [2]
    assert set(activations[0].rules.values()) == {"identity", "adjoint"}


def test_rules_of_a_call_do_not_apply_to_other_threads() -> None:
    outcome: list[str] = []

    def explain_in_thread() -> None:
        try:
            scores(soft, "lrp")
            outcome.append("explained")
        except UnknownOperation:
            outcome.append("refused")

    with registered.custom_rules({"whyformer_tests::soft": "gelu"}):
        thread = threading.Thread(target=explain_in_thread)
        thread.start()
        thread.join()
        scores(soft, "lrp")
    assert outcome == ["refused"]


@pytest.mark.parametrize("rule", ["separate", "shared", "alpha_beta", "epsilon", "gamma"])
def test_multihead_attention_has_scores_of_its_parts(rule: str) -> None:
    """The rule of the input layer applies to the projections of the input, not to the output projection."""
    models = [CustomFunctionModel(WrittenGelu(), block) for block in (FunctionBlock, DecomposedBlock)]
    rules = {WrittenGelu: "gelu"}
    fused, decomposed = (whyformer.explain(m, X, "lrp", rules=rules, rule=rule).scores for m in models)
    torch.testing.assert_close(fused, decomposed, rtol=1e-8, atol=1e-10)

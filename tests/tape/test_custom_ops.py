"""Custom operations are recorded as one call each, and their classes stay unchanged."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import whyformer
from whyformer.errors import InputError, ModelError, UnknownOperation
from whyformer.rules.multipliers import COMPOSITES
from whyformer.tape.program import read_program
from whyformer.tape.recording import record_call
from whyformer.tape.values import Tape
from whyformer.tape.walking import GRADIENT, walk_back
from zoo import GeluInNumpy, WrittenGelu, unseen

X = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class SmallNet(nn.Module):
    def __init__(self, middle: Any) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), middle, nn.Linear(4, 2)
        with torch.no_grad():
            for i, p in enumerate((*self.first.parameters(), *self.last.parameters())):
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)).mean(1))


def gradient(model: nn.Module, custom_ops: dict[Any, str]) -> tuple[Tape, list[tuple[str, str]], Tensor]:
    """(tape, (kind, name) of the units, ∂ logit 0 / ∂x)"""
    tape, output = record_call(model, (X,), custom_ops=custom_ops)
    out, root = tape.number(output), tape.number(X)
    program = read_program(tape, [root], out)
    (gradients,) = walk_back(program, tape, [(GRADIENT, {out: torch.eye(2)[[0, 0]].double()})], observed=[root])
    return tape, [(u.kind, u.name) for u in program.units], gradients[root]


@pytest.mark.parametrize("middle", [WrittenGelu(), GeluInNumpy.apply, lambda x: GeluInNumpy.apply(x.clone()).clone()])
def test_custom_op_is_one_unit_with_its_own_derivative(middle: Any) -> None:
    key = WrittenGelu if isinstance(middle, WrittenGelu) else GeluInNumpy
    expected = gradient(SmallNet(nn.GELU()), {})[2]
    _, units, result = gradient(SmallNet(middle), {key: "gelu"})
    assert units.count(("activation", key.__name__)) == 1
    assert [name for kind, name in units if kind == "activation"] == [key.__name__]
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


def test_classes_of_custom_ops_are_restored() -> None:
    before = dict(vars(GeluInNumpy))
    for middle in (GeluInNumpy.apply, lambda x: 1 / 0):
        try:
            gradient(SmallNet(middle), {GeluInNumpy: "gelu"})
        except ZeroDivisionError:
            pass
        assert dict(vars(GeluInNumpy)) == before
    from torch.nn.modules import module

    assert not module._global_forward_hooks
    assert not module._global_forward_pre_hooks


def test_forward_in_other_thread_is_not_recorded() -> None:
    recorded_model, other_model = SmallNet(GeluInNumpy.apply), SmallNet(GeluInNumpy.apply)
    expected, outputs = other_model(X), []

    class Waiting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            thread = threading.Thread(target=lambda: outputs.append(other_model(X)))
            thread.start()
            thread.join()
            return GeluInNumpy.apply(x)

    recorded_model.middle = Waiting()
    _, units, _ = gradient(recorded_model, {GeluInNumpy: "gelu"})
    assert units.count(("activation", "GeluInNumpy")) == 1
    assert torch.equal(outputs[0], expected)


def test_custom_op_that_returns_its_input_keeps_gradient_of_other_readers() -> None:
    class IdentityModule(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    class IdentityTwice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.same = IdentityModule()

        def forward(self, x: Tensor) -> Tensor:
            return self.same(x) * 3 + x

    result = gradient(SmallNet(IdentityTwice()), {IdentityModule: "view"})[2]
    torch.testing.assert_close(result, 4 * gradient(SmallNet(nn.Identity()), {})[2], rtol=1e-12, atol=1e-12)


def test_nested_custom_ops_are_one_unit() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = WrittenGelu()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).tanh()

    _, units, result = gradient(SmallNet(Outer()), {WrittenGelu: "gelu", Outer: "activation"})
    assert [name for kind, name in units if kind == "activation"] == ["Outer"]
    expected = gradient(SmallNet(nn.Sequential(nn.GELU(), nn.Tanh())), {})[2]
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


def test_custom_op_that_reads_other_tensor_is_refused() -> None:
    class Gate(nn.Module):
        other: Tensor

        def forward(self, x: Tensor) -> Tensor:
            return x * self.other

    class GateCaller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = Gate()

        def forward(self, x: Tensor) -> Tensor:
            self.gate.other = x.sigmoid()
            return self.gate(x)

    gradient(SmallNet(GateCaller()), {})
    with pytest.raises(ModelError, match="not one of its arguments"):
        gradient(SmallNet(GateCaller()), {Gate: "gelu"})
    constant = GateCaller()
    constant.forward = lambda x: constant.gate(x)  # type: ignore[method-assign]
    constant.gate.other = torch.full((4,), 2.0, dtype=torch.float64)
    gradient(SmallNet(constant), {Gate: "scale"})


@pytest.mark.parametrize(("change", "words"), [(lambda x: x.mul_(2), "in place"), (lambda x: (x, x), "returns a tuple")])
def test_custom_op_in_place_or_with_tuple_output_is_refused(change: Any, words: str) -> None:
    class ChangingModule(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return change(x)

    class CustomOpCaller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd = ChangingModule()

        def forward(self, x: Tensor) -> Tensor:
            output = self.odd(x)
            return output if isinstance(output, Tensor) else output[0]

    with pytest.raises(ModelError, match=words):
        gradient(SmallNet(CustomOpCaller()), {ChangingModule: "gelu"})


@pytest.mark.parametrize("name", ["cosine_similarity", F.pairwise_distance, F.linear])
def test_composite_torch_functions_are_refused_as_custom_ops(name: Any) -> None:
    model, x = SmallNet(WrittenGelu()), X
    with pytest.raises(InputError, match="name the class of the module"):
        whyformer.explain(model, x, "lrp", rules={name: "gelu"})
    assert whyformer.explain(model, x, "lrp", rules={WrittenGelu: "gelu"}).scores.any()


@pytest.mark.parametrize("name", ["gelu", F.gelu, "aten::gelu", torch.ops.aten.gelu])
@pytest.mark.parametrize("in_place", [False, True])
def test_rule_for_torch_operator_accepts_each_of_its_names(name: Any, in_place: bool) -> None:
    middle = (lambda x: torch.ops.aten.gelu_(x)) if in_place else F.gelu
    scores = whyformer.explain(SmallNet(middle), X, "lrp_ah", rules={name: "identity"}).scores
    gradient_scores = whyformer.explain(SmallNet(F.gelu), X, "input_x_gradient").scores
    assert not torch.allclose(scores, gradient_scores)
    assert torch.allclose(whyformer.explain(SmallNet(middle), X, "input_x_gradient", rules={name: "identity"}).scores, gradient_scores)


def test_composite_applies_rule_of_custom_kind() -> None:
    """A gate with a custom activation has the rule of gates."""

    class GatedActivation(nn.Module):
        def __init__(self, function: Any) -> None:
            super().__init__()
            self.function = function

        def forward(self, x: Tensor) -> Tensor:
            return self.function(x) * x.roll(1, -1)

    custom, plain = SmallNet(GatedActivation(WrittenGelu())), SmallNet(GatedActivation(nn.GELU()))
    expected = whyformer.explain(plain, X, "cp_lrp").scores
    torch.testing.assert_close(whyformer.explain(custom, X, "cp_lrp", rules={WrittenGelu: "gelu"}).scores, expected, rtol=1e-9, atol=1e-10)
    assert "identity" in COMPOSITES["attnlrp"].rules


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("plus_one", [False, True])
def test_custom_norm_has_scores_of_written_norm(bias: bool, centred: bool, plus_one: bool) -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.b, self.tiny = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4)), 1e-5

        def forward(self, x: Tensor) -> Tensor:
            x = x - x.mean(-1, keepdim=True) if centred else x
            x = x / (x.square().mean(-1, keepdim=True) + self.tiny).sqrt() * (self.w + plus_one)
            return x + self.b if bias else x

    class NormFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
            return unseen(norm(x))

        @staticmethod
        def backward(ctx: Any, *flows: Tensor) -> Any:
            raise NotImplementedError

    norm = Norm()
    model = SmallNet(norm)
    expected = whyformer.explain(model, X, "lrp_ln").scores
    function_model = SmallNet(lambda x: NormFunction.apply(x, norm.w, norm.b, norm.tiny))
    for key, net in ((Norm, model), (NormFunction, function_model)):
        result = whyformer.explain(net, X, "lrp_ln", rules={key: "layer_norm" if centred else "rms_norm"}).scores
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-8)


def test_custom_op_of_two_branches_needs_rule_for_two() -> None:
    class VmapProduct(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.func.vmap(torch.mul)(x, y)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixed = VmapProduct()

        def forward(self, x: Tensor) -> Tensor:
            return self.mixed(x, x.roll(1, -1))

    with pytest.raises(UnknownOperation):
        whyformer.explain(SmallNet(Two()), X, "lrp", rules={VmapProduct: "gelu"})
    result = whyformer.explain(SmallNet(Two()), X, "lrp", rules={VmapProduct: "mul"}).scores
    expected = whyformer.explain(SmallNet(lambda x: x * x.roll(1, -1)), X, "lrp").scores
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("like", ["gelu", "layer_norm"])
def test_intervention_on_output_of_custom_op(like: str) -> None:
    middle, key = (WrittenGelu(), WrittenGelu) if like == "gelu" else (nn.LayerNorm(4), nn.LayerNorm)
    model = SmallNet(middle)
    tape, _ = record_call(model, (X,), custom_ops={key: like}, names=True)
    ((number,),) = tape.outputs["middle"]
    changed, output = record_call(model, (X,), custom_ops={key: like}, change={number: lambda t: 2 * t})
    torch.testing.assert_close(output, SmallNet(lambda x: 2 * middle(x))(X))
    torch.testing.assert_close(changed[number], 2 * tape[number])
    assert changed.signature == tape.signature

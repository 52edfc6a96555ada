"""Custom operations count as one call each, and the classes that they belong to are left as they were."""

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


class Net(nn.Module):
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
    (found,) = walk_back(program, tape, [(GRADIENT, {out: torch.eye(2)[[0, 0]].double()})], wanted=[root])
    return tape, [(u.kind, u.name) for u in program.units], found[root]


@pytest.mark.parametrize("middle", [WrittenGelu(), GeluInNumpy.apply, lambda x: GeluInNumpy.apply(x.clone()).clone()])
def test_one_unit_of_the_kind_that_was_said_with_the_derivative_of_its_own(middle: Any) -> None:
    key = WrittenGelu if isinstance(middle, WrittenGelu) else GeluInNumpy
    wanted = gradient(Net(nn.GELU()), {})[2]
    _, units, found = gradient(Net(middle), {key: "gelu"})
    assert units.count(("activation", key.__name__)) == 1
    assert [name for kind, name in units if kind == "activation"] == [key.__name__]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_classes_are_left_as_they_were() -> None:
    before = dict(vars(GeluInNumpy))
    for middle in (GeluInNumpy.apply, lambda x: 1 / 0):
        try:
            gradient(Net(middle), {GeluInNumpy: "gelu"})
        except ZeroDivisionError:
            pass
        assert dict(vars(GeluInNumpy)) == before
    from torch.nn.modules import module

    assert not module._global_forward_hooks
    assert not module._global_forward_pre_hooks


def test_another_thread_that_runs_the_model_meanwhile_is_not_recorded() -> None:
    inside, outside = Net(GeluInNumpy.apply), Net(GeluInNumpy.apply)
    wanted, seen = outside(X), []

    class Waiting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            thread = threading.Thread(target=lambda: seen.append(outside(X)))
            thread.start()
            thread.join()
            return GeluInNumpy.apply(x)

    inside.middle = Waiting()
    _, units, _ = gradient(inside, {GeluInNumpy: "gelu"})
    assert units.count(("activation", "GeluInNumpy")) == 1
    assert torch.equal(seen[0], wanted)


def test_what_hands_on_its_input_takes_nothing_from_others_that_read_it() -> None:
    class Same(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.same = Same()

        def forward(self, x: Tensor) -> Tensor:
            return self.same(x) * 3 + x

    found = gradient(Net(Twice()), {Same: "view"})[2]
    torch.testing.assert_close(found, 4 * gradient(Net(nn.Identity()), {})[2], rtol=1e-12, atol=1e-12)


def test_a_declared_module_within_a_declared_module() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = WrittenGelu()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).tanh()

    _, units, found = gradient(Net(Outer()), {WrittenGelu: "gelu", Outer: "activation"})
    assert [name for kind, name in units if kind == "activation"] == ["Outer"]
    wanted = gradient(Net(nn.Sequential(nn.GELU(), nn.Tanh())), {})[2]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_what_it_reads_without_being_given_it_is_refused() -> None:
    class Gate(nn.Module):
        other: Tensor

        def forward(self, x: Tensor) -> Tensor:
            return x * self.other

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = Gate()

        def forward(self, x: Tensor) -> Tensor:
            self.gate.other = x.sigmoid()
            return self.gate(x)

    gradient(Net(Both()), {})
    with pytest.raises(ModelError, match="not one of its arguments"):
        gradient(Net(Both()), {Gate: "gelu"})
    constant = Both()
    constant.forward = lambda x: constant.gate(x)  # type: ignore[method-assign]
    constant.gate.other = torch.full((4,), 2.0, dtype=torch.float64)
    gradient(Net(constant), {Gate: "scale"})


@pytest.mark.parametrize(("change", "words"), [(lambda x: x.mul_(2), "in place"), (lambda x: (x, x), "returns a tuple")])
def test_what_cannot_be_one_call_is_refused(change: Any, words: str) -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return change(x)

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd = Odd()

        def forward(self, x: Tensor) -> Tensor:
            made = self.odd(x)
            return made if isinstance(made, Tensor) else made[0]

    with pytest.raises(ModelError, match=words):
        gradient(Net(First()), {Odd: "gelu"})


@pytest.mark.parametrize("name", ["cosine_similarity", F.pairwise_distance, F.linear])
def test_what_torch_makes_of_others_is_refused_with_the_way_out(name: Any) -> None:
    model, x = Net(WrittenGelu()), X
    with pytest.raises(InputError, match="name the class of the module"):
        whyformer.explain(model, x, "lrp", rules={name: "gelu"})
    assert whyformer.explain(model, x, "lrp", rules={WrittenGelu: "gelu"}).scores.any()


@pytest.mark.parametrize("name", ["gelu", F.gelu, "aten::gelu", torch.ops.aten.gelu])
@pytest.mark.parametrize("in_place", [False, True])
def test_operators_of_torch_have_many_names(name: Any, in_place: bool) -> None:
    middle = (lambda x: torch.ops.aten.gelu_(x)) if in_place else F.gelu
    scores = whyformer.explain(Net(middle), X, "lrp_ah", rules={name: "identity"}).scores
    straight = whyformer.explain(Net(F.gelu), X, "input_x_gradient").scores
    assert not torch.allclose(scores, straight)
    assert torch.allclose(whyformer.explain(Net(middle), X, "input_x_gradient", rules={name: "identity"}).scores, straight)


def test_a_composite_says_what_it_is_given_by_the_kind() -> None:
    """An activation that is declared opens a gate as any other does."""

    class Gated(nn.Module):
        def __init__(self, function: Any) -> None:
            super().__init__()
            self.function = function

        def forward(self, x: Tensor) -> Tensor:
            return self.function(x) * x.roll(1, -1)

    own, plain = Net(Gated(WrittenGelu())), Net(Gated(nn.GELU()))
    wanted = whyformer.explain(plain, X, "cp_lrp").scores
    torch.testing.assert_close(whyformer.explain(own, X, "cp_lrp", rules={WrittenGelu: "gelu"}).scores, wanted, rtol=1e-9, atol=1e-10)
    assert "identity" in COMPOSITES["attnlrp"].rules


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("plus_one", [False, True])
def test_norms_are_recorded_as_norms(bias: bool, centred: bool, plus_one: bool) -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.b, self.tiny = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4)), 1e-5

        def forward(self, x: Tensor) -> Tensor:
            x = x - x.mean(-1, keepdim=True) if centred else x
            x = x / (x.square().mean(-1, keepdim=True) + self.tiny).sqrt() * (self.w + plus_one)
            return x + self.b if bias else x

    class Apart(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
            return unseen(norm(x))

        @staticmethod
        def backward(ctx: Any, *flows: Tensor) -> Any:
            raise NotImplementedError

    norm = Norm()
    model = Net(norm)
    wanted = whyformer.explain(model, X, "lrp_ln").scores
    apart = Net(lambda x: Apart.apply(x, norm.w, norm.b, norm.tiny))
    for key, net in ((Norm, model), (Apart, apart)):
        found = whyformer.explain(net, X, "lrp_ln", rules={key: "layer_norm" if centred else "rms_norm"}).scores
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)


def test_a_declared_operation_of_two_branches_has_no_rule_of_one() -> None:
    class Mixed(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.func.vmap(torch.mul)(x, y)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixed = Mixed()

        def forward(self, x: Tensor) -> Tensor:
            return self.mixed(x, x.roll(1, -1))

    with pytest.raises(UnknownOperation):
        whyformer.explain(Net(Two()), X, "lrp", rules={Mixed: "gelu"})
    found = whyformer.explain(Net(Two()), X, "lrp", rules={Mixed: "mul"}).scores
    wanted = whyformer.explain(Net(lambda x: x * x.roll(1, -1)), X, "lrp").scores
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("like", ["gelu", "layer_norm"])
def test_an_intervention_at_what_a_declared_operation_returns(like: str) -> None:
    middle, key = (WrittenGelu(), WrittenGelu) if like == "gelu" else (nn.LayerNorm(4), nn.LayerNorm)
    model = Net(middle)
    tape, _ = record_call(model, (X,), custom_ops={key: like}, names=True)
    ((number,),) = tape.outputs["middle"]
    changed, output = record_call(model, (X,), custom_ops={key: like}, change={number: lambda t: 2 * t})
    torch.testing.assert_close(output, Net(lambda x: 2 * middle(x))(X))
    torch.testing.assert_close(changed[number], 2 * tape[number])
    assert changed.signature == tape.signature

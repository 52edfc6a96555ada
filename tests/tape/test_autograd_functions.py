"""Autograd functions are looked into: a model that keeps an activation or a layer in one is explained as any other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import whyformer
from zoo import unseen


class Gelu(torch.autograd.Function):
    """With a derivative of its own that is not that of its forward."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 0.5 * (1 + torch.erf(x / 2**0.5))

    @staticmethod
    def backward(ctx, flow: Tensor) -> Tensor:
        return 3 * flow


class Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        return x @ weight.T + bias, x.sum()

    @staticmethod
    def backward(ctx, flow: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        return flow @ ctx.saved_tensors[1], None, None


class Model(nn.Module):
    def __init__(self, *, hidden: bool, off: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.off = hidden, off
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in ((5, 8), (8, 6), (6, 3)))
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        first, second, last = self.layers
        h = first(x)
        h = Gelu.apply(h) if self.hidden else functional.gelu(h)
        h = Layer.apply(h, second.weight, second.bias)[0] if self.hidden else second(h)
        with torch.set_grad_enabled(not self.off):
            h = h + functional.gelu(h)
        return last(h).mean(1)


METHODS = ["lrp", "lrp_ah_ln", "attnlrp", "cp_lrp", "lrp_ah"]


@pytest.mark.parametrize("method", METHODS)
def test_they_are_explained_by_what_their_forward_computes(method: str) -> None:
    x = torch.randn(2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plain, hidden = (whyformer.explain(Model(hidden=h), x, method=method, target=0) for h in (False, True))
    assert torch.allclose(plain.scores, hidden.scores, rtol=0, atol=1e-12)
    assert plain.scores.abs().max() > 1e-3


def test_a_gradient_is_that_of_the_forward() -> None:
    """Whatever the function's backward says."""
    x = torch.randn(1, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = {hidden: whyformer.explain(Model(hidden=hidden), x, "input_x_gradient", 0).scores for hidden in (True, False)}
    assert torch.allclose(found[True], found[False], rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ["lrp_ah_ln", "input_x_gradient"])
def test_what_a_model_computes_without_gradients_is_explained(method: str) -> None:
    x = torch.randn(1, 4, 5, dtype=torch.float64)
    found = [whyformer.explain(Model(hidden=False, off=off), x, method=method, target=0).scores for off in (True, False)]
    assert torch.equal(*found)


class Partly(torch.autograd.Function):
    """What is added was made by a kernel, of which nothing is known."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x + 2 * unseen(torch.relu(x))

    @staticmethod
    def backward(ctx, flow: Tensor) -> Tensor:
        return flow


class OfWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor) -> Tensor:
        return weight / weight.norm()

    @staticmethod
    def backward(ctx, flow: Tensor) -> Tensor:
        return flow


def test_what_a_kernel_does_within_is_not_taken_for_a_constant() -> None:
    model = Model(hidden=False)
    model.layers[1].forward = lambda x: functional.linear(Partly.apply(x), model.layers[1].weight)
    x = torch.randn(1, 4, 5, dtype=torch.float64)
    for method in ("lrp", "lrp_ah_ln", "input_x_gradient"):
        with pytest.raises(whyformer.errors.ModelError, match="outside of torch"):
            whyformer.explain(model, x, method=method, target=0)


@pytest.mark.parametrize("method", [*METHODS, "input_x_gradient"])
def test_a_function_of_weights_is_a_weight(method: str) -> None:
    plain, hidden = Model(hidden=False), Model(hidden=False)
    weight = plain.layers[1].weight
    plain.layers[1].forward = lambda x: functional.linear(x, (weight / weight.norm()).detach())
    hidden.layers[1].forward = lambda x: functional.linear(x, OfWeights.apply(hidden.layers[1].weight))
    x = torch.randn(2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    one, other = (whyformer.explain(m, x, method=method, target=0).scores for m in (plain, hidden))
    assert torch.allclose(one, other, rtol=0, atol=1e-12)

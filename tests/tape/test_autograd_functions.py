"""Operations inside autograd functions are recorded, so activations and layers in them are explained as any other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import whyformer
from zoo import unseen


class GeluFunction(torch.autograd.Function):
    """GELU with a backward that is not the derivative of its forward."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 0.5 * (1 + torch.erf(x / 2**0.5))

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return 3 * gradient


class LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        return x @ weight.T + bias, x.sum()

    @staticmethod
    def backward(ctx, gradient: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        return gradient @ ctx.saved_tensors[1], None, None


class FunctionModel(nn.Module):
    def __init__(self, *, uses_functions: bool, no_grad: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.uses_functions, self.no_grad = uses_functions, no_grad
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in ((5, 8), (8, 6), (6, 3)))
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        first, second, last = self.layers
        h = first(x)
        h = GeluFunction.apply(h) if self.uses_functions else functional.gelu(h)
        h = LinearFunction.apply(h, second.weight, second.bias)[0] if self.uses_functions else second(h)
        with torch.set_grad_enabled(not self.no_grad):
            h = h + functional.gelu(h)
        return last(h).mean(1)


METHODS = ["lrp", "lrp_ah_ln", "attnlrp", "cp_lrp", "lrp_ah"]


@pytest.mark.parametrize("method", METHODS)
def test_autograd_functions_are_explained_by_their_forward(method: str) -> None:
    x = torch.randn(2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plain, uses_functions = (whyformer.explain(FunctionModel(uses_functions=uses_functions), x, method=method, target=0) for uses_functions in (False, True))
    assert torch.allclose(plain.scores, uses_functions.scores, rtol=0, atol=1e-12)
    assert plain.scores.abs().max() > 1e-3


def test_gradient_ignores_custom_backward() -> None:
    """For any backward of the function."""
    x = torch.randn(1, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    scores = {uses_functions: whyformer.explain(FunctionModel(uses_functions=uses_functions), x, "input_x_gradient", 0).scores for uses_functions in (True, False)}
    assert torch.allclose(scores[True], scores[False], rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ["lrp_ah_ln", "input_x_gradient"])
def test_operations_under_no_grad_are_explained(method: str) -> None:
    x = torch.randn(1, 4, 5, dtype=torch.float64)
    results = [whyformer.explain(FunctionModel(uses_functions=False, no_grad=no_grad), x, method=method, target=0).scores for no_grad in (True, False)]
    assert torch.equal(*results)


class PartlyHiddenFunction(torch.autograd.Function):
    """Adds the result of a kernel that is not recorded."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x + 2 * unseen(torch.relu(x))

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


class NormalisedWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor) -> Tensor:
        return weight / weight.norm()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


def test_unrecorded_kernel_in_function_is_refused() -> None:
    model = FunctionModel(uses_functions=False)
    model.layers[1].forward = lambda x: functional.linear(PartlyHiddenFunction.apply(x), model.layers[1].weight)
    x = torch.randn(1, 4, 5, dtype=torch.float64)
    for method in ("lrp", "lrp_ah_ln", "input_x_gradient"):
        with pytest.raises(whyformer.errors.ModelError, match="outside of torch"):
            whyformer.explain(model, x, method=method, target=0)


@pytest.mark.parametrize("method", [*METHODS, "input_x_gradient"])
def test_function_of_weights_has_same_scores_as_constant_weight(method: str) -> None:
    plain, uses_functions = FunctionModel(uses_functions=False), FunctionModel(uses_functions=False)
    weight = plain.layers[1].weight
    plain.layers[1].forward = lambda x: functional.linear(x, (weight / weight.norm()).detach())
    uses_functions.layers[1].forward = lambda x: functional.linear(x, NormalisedWeight.apply(uses_functions.layers[1].weight))
    x = torch.randn(2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected, result = (whyformer.explain(m, x, method=method, target=0).scores for m in (plain, uses_functions))
    assert torch.allclose(expected, result, rtol=0, atol=1e-12)

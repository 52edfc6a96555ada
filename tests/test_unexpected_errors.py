"""Unexpected errors inside a method: those of a method become MethodNotApplicable, those of user code are passed on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import whyformer
from whyformer.errors import InputError, MethodNotApplicable
from zoo import build


class FailingModel(nn.Module):
    """A model that fails on more than two samples, or always."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.head, self.always = nn.Linear(4, 3), always

    def forward(self, x: Tensor) -> Tensor:
        if self.always or len(x) > 2:
            raise TypeError("no such thing")
        return self.head(x.mean((1, 2)))


def test_error_in_perturbed_batch_is_not_supported_yet() -> None:
    with pytest.raises(MethodNotApplicable, match=r"smoothgrad is not supported yet on this model: .*TypeError: no such thing"):
        whyformer.explain(FailingModel(False).eval(), torch.randn(2, 3, 4, 4), method="smoothgrad")


def test_error_of_model_is_passed_on() -> None:
    with pytest.raises(TypeError, match=r"^no such thing$"):
        whyformer.explain(FailingModel(True).eval(), torch.randn(2, 3, 4, 4), method="input_x_gradient")


def test_error_of_target_is_passed_on() -> None:
    def broken(logits: Tensor) -> Tensor:
        raise KeyError("mine")

    model, inputs = build("hf_vit")
    with pytest.raises((KeyError, InputError), match="mine"):
        whyformer.explain(model, inputs, method="input_x_gradient", target=broken)

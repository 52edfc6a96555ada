"""An error of another kind inside a method: told in a sentence where it is the library's, as it is where it is the user's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import whyformer
from whyformer.errors import InputError, MethodNotApplicable
from zoo import build


class Shy(nn.Module):
    """Fails on more than two samples at once, or always."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.head, self.always = nn.Linear(4, 3), always

    def forward(self, x: Tensor) -> Tensor:
        if self.always or len(x) > 2:
            raise TypeError("no such thing")
        return self.head(x.mean((1, 2)))


def test_it_is_not_supported_yet() -> None:
    with pytest.raises(MethodNotApplicable, match=r"smoothgrad is not supported yet on this model: .*TypeError: no such thing"):
        whyformer.explain(Shy(False).eval(), torch.randn(2, 3, 4, 4), method="smoothgrad")


def test_the_models_own_error_is_its_own() -> None:
    with pytest.raises(TypeError, match=r"^no such thing$"):
        whyformer.explain(Shy(True).eval(), torch.randn(2, 3, 4, 4), method="input_x_gradient")


def test_the_targets_own_error_is_its_own() -> None:
    def broken(logits: Tensor) -> Tensor:
        raise KeyError("mine")

    model, inputs = build("hf_vit")
    with pytest.raises((KeyError, InputError), match="mine"):
        whyformer.explain(model, inputs, method="input_x_gradient", target=broken)

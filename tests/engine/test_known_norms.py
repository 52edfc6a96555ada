"""A norm that is written out by hand is recognised once; afterwards one comparison a run is enough, and it is still made."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import whyformer
from whyformer.engine import canonizers, norms
from zoo import build


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each comparison of two outputs, which is what a GPU has to be waited for."""
    made: list[int] = []
    real = norms.distance

    def counting(a: Tensor, b: Tensor) -> float:
        made.append(1)
        return real(a, b)

    monkeypatch.setattr(norms, "distance", counting)
    return made


def test_each_norm_is_compared_once_from_the_second_run_on(compared: list[int]) -> None:
    model, inputs = build("llama")
    count = sum(type(m).__name__ == "LlamaRMSNorm" for m in model.modules())
    first = whyformer.explain(model, inputs, "lrp_ah_ln", 1)
    several = len(compared)
    again = whyformer.explain(model, inputs, "lrp_ah_ln", 1)
    assert len(compared) - several == count < several
    assert torch.equal(first.scores, again.scores)


class Changing(nn.Module):
    """RMSNorm, or with ``centred`` LayerNorm without its bias."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps, self.centred = nn.Parameter(torch.rand(6, dtype=torch.float64) + 0.5), 1e-6, False

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def test_what_was_known_does_not_outlive_a_change() -> None:
    module, x = Changing(), torch.randn(2, 3, 6, dtype=torch.float64)
    for centred, eps in ((False, 1e-6), (True, 1e-6), (True, 2e-6), (False, 1e-3)):
        module.centred, module.eps = centred, eps
        with torch.no_grad():
            module.weight.mul_(1.5)
            found = canonizers.stands_for(module, x, module(x))
        assert isinstance(found, norms.Norm)
        assert (found.centred, found.eps) == (centred, eps)
        assert found.weight is not None
        assert torch.equal(found.weight, module.weight)

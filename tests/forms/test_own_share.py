"""Norm-based attention with a scale, gate or norm after the output projection equals its definition, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import whyformer
from whyformer.errors import MethodNotApplicable

from .base import EPS, WIDTH, gain, inputs
from .cells import TOLERANCE
from .ends import NORMS_BEHIND, Behind, NormBehind, Stack, own_norms

NAME = "block0"
GAMMA = 0.2 * gain("gamma", WIDTH).abs()
OPTIONS = {"inputs": "ids"}


def centred(part: Tensor) -> Tensor:
    return part - part.mean(-1, keepdim=True)


def through_layer_norm(part: Tensor, whole: Tensor) -> Tensor:
    """LayerNorm of a part, with the deviation of the whole."""
    return centred(part) * (whole.var(-1, keepdim=True, correction=0) + EPS).rsqrt() * gain(f"{NAME}.norm3.weight", WIDTH)


def through_rms_norm(part: Tensor, whole: Tensor) -> Tensor:
    return part * (whole.square().mean(-1, keepdim=True) + EPS).rsqrt() * gain(f"{NAME}.norm3.weight", WIDTH)


Definition = Callable[[Tensor, Tensor], Tensor]
ZERO = torch.tensor([0.01], dtype=torch.float64)
CASES: dict[str, tuple[Callable[[str], nn.Module], Definition]] = {
    "nothing": (partial(Behind, behind=None, scale=None, post=False), lambda part, whole: part),
    "LayerScale in the weight": (partial(Behind, behind=None, scale=GAMMA, post=False), lambda part, whole: GAMMA * part),
    "LayerScale": (partial(Behind, behind=lambda x, y, g: x + g * y, scale=GAMMA, post=False), lambda part, whole: GAMMA * part),
    "LayerScale, addcmul": (partial(Behind, behind=torch.addcmul, scale=GAMMA, post=False), lambda part, whole: GAMMA * part),
    "ReZero": (partial(Behind, behind=lambda x, y, a: x + a * y, scale=ZERO, post=False), lambda part, whole: 0.01 * part),
    "gate of a parameter": (
        partial(Behind, behind=lambda x, y, a: x + torch.tanh(a) * y, scale=ZERO, post=False),
        lambda part, whole: torch.tanh(ZERO) * part,
    ),
    **{f"LayerNorm: {way}": (partial(NormBehind, norm=norm, post=False), through_layer_norm) for way, norm in NORMS_BEHIND["LayerNorm"].items()},
    **{f"RMSNorm: {way}": (partial(NormBehind, norm=norm, post=False), through_rms_norm) for way, norm in NORMS_BEHIND["RMSNorm"].items()},
}


@pytest.mark.parametrize("method", ["norm_attention", "globenc"])
@pytest.mark.parametrize("case", CASES)
def test_norm_based_attention_equals_its_definition_or_is_refused(case: str, method: str) -> None:
    block, behind = CASES[case]
    model = Stack(OPTIONS, block, depth=1).double().eval()
    ids = inputs("ids")
    with torch.no_grad():
        norms = own_norms(NAME, model.embed(ids), behind)[:, 0]
    expected = norms / norms.sum(-1, keepdim=True) if method == "norm_attention" else norms
    try:
        actual = whyformer.explain(model, ids, method, 1).scores
    except MethodNotApplicable:
        return
    assert (actual - expected).abs().max() <= TOLERANCE * expected.abs().max()

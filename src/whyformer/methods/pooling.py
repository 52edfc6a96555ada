"""Pooling over blocks: the products of the blocks' inputs, added up or weighed by how far the blocks agree."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Pool = Literal["sum", "agreement"]
_FLOOR = 1e-4
"""ε beside the mean of |P|: what is much smaller counts as nothing, whatever its sign."""
_FEWEST = 3  # of two tokens all correlations are 1 or −1
_MOST = 2.0  # blocks that hardly agree are noise rather than independent


def pooled(maps: Tensor, pool: Pool) -> Tensor:
    """One score for each token from the products P_bj of the blocks.

    ``"sum"``: S_j = Σ_b P_bj. ``"agreement"``: the logarithmic pool of the blocks, signed,

        S_j = c · sinh(n · mean_b arsinh(P_bj / ε)),   n = B / (1 + (B − 1) ρ),   ε = mean |P| / 10000,

    for large |P| of one sign the geometric mean to the power n: a token counts as far as the blocks agree that it does,
    and the blocks for as many independent ones as the mean correlation ρ of arsinh(P_b / ε) over the tokens leaves
    (Kish's effective number; 1 if all say the same, 2 at most). c: Σ_j |S_j| is that of the sum. Whatever n, the order
    of the tokens is that of the mean. It is not linear in the target.

    Args:
        maps: ``[B, samples, N]``; tokens with nothing but zeros are not counted (padding, what comes later).

    Returns:
        ``[samples, N]``.

    Source: Genest & Zidek 1986 (logarithmic opinion pools, here with arsinh in the place of the logarithm), Kish 1965.
    """
    summed = maps.sum(0)
    if pool == "sum" or len(maps) < 2:
        return summed
    products, blocks = maps.double(), len(maps)
    heard = (products != 0).any(0)
    count = heard.sum(-1, keepdim=True).clamp(min=1)
    tiny = torch.finfo(products.dtype).tiny
    voices = torch.asinh(products / (_FLOOR * products.abs().mean(0).sum(-1, keepdim=True) / count).clamp(min=tiny))
    centred = torch.where(heard, voices - voices.sum(-1, keepdim=True) / count, 0.0)
    directions = centred / centred.norm(dim=-1, keepdim=True).clamp(min=tiny)
    # 1 + (B − 1) ρ = |Σ_b u_b|² / B, for maps u_b of mean 0 and length 1
    number = (blocks**2 / directions.sum(0).square().sum(-1, keepdim=True).clamp(min=tiny)).clamp(1, _MOST)
    voice = torch.where(count < _FEWEST, 1.0, number) * voices.mean(0)
    size = voice.abs()
    # sinh(v) = sign(v) (e^|v| − e^−|v|) / 2, beside the largest: e^|v| alone may be more than a number holds
    sharp = voice.sign() * (size - size.amax(-1, keepdim=True)).exp() * -torch.expm1(-2 * size)
    total = summed.double().abs().sum(-1, keepdim=True)
    return (sharp * (total / sharp.abs().sum(-1, keepdim=True).clamp(min=tiny))).to(maps.dtype)

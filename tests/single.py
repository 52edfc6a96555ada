"""Run one rule by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from whyformer.rules.core import Pass, Rule, Ruled

Run = Callable[..., list[Tensor]]


def run_rule(
    rule: Rule,
    compute: Callable[..., Tensor],
    operands: Sequence[Tensor],
    relevance: Tensor,
    *,
    carrying: Sequence[bool] | None = None,
    info: dict[str, Any] | None = None,
    batch: int | None = None,
    sequence_first: bool = False,
) -> list[Tensor]:
    """What arrives at each carrying operand if ``relevance`` arrives at the output; the forward value is checked too."""
    carrying = carrying or [True] * len(operands)
    leaves = [o.detach().clone().requires_grad_(c) for o, c in zip(operands, carrying, strict=True)]
    run = Pass(relevance=True, batch=batch or relevance.shape[0], sequence_first=sequence_first)
    output = Ruled.apply(rule, run, compute, info or {}, *leaves)
    assert torch.equal(output, compute(*[o.detach() for o in operands]))
    return list(torch.autograd.grad(output, [leaf for leaf in leaves if leaf.requires_grad], relevance))

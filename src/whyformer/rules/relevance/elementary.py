"""Relevance rules for single operations and for operations that join two branches (Chefer et al. 2021, TA)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from whyformer.rules.core import Call, Grads, safe_divide, unbroadcast


def identity(call: Call, relevance: Tensor) -> Grads:
    """R_in = R_out, to the first operand: element-wise nonlinearities, normalisations, softmax, constants' products."""
    first = call.operands[0]
    return [unbroadcast(relevance, first.shape), *(None for _ in call.operands[1:])]


def z_rule(call: Call, relevance: Tensor) -> Grads:
    """R_i = x_i · Σ_o (∂y_o/∂x_i) R_o / y_o (TA Eq. 2): any operation that is linear in each carrying operand.

    The real and the imaginary part of a complex number are two numbers.
    """
    with torch.enable_grad():
        leaves = [o.detach().requires_grad_(n) for o, n in zip(call.operands, call.needs, strict=True)]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        output = call.compute(*leaves)
        found = iter(torch.autograd.grad(output, wanted, _parts(safe_divide, relevance, output.detach())))
    multiplied = partial(_parts, torch.mul)
    return [multiplied(leaf.detach(), next(found)) if n else None for leaf, n in zip(leaves, call.needs, strict=True)]


def z_rule_of(operand: int) -> Callable[[Call, Tensor], Grads]:
    """:func:`z_rule` with the other operands constant."""

    def rule(call: Call, relevance: Tensor) -> Grads:
        needs = tuple(need and i == operand for i, need in enumerate(call.needs))
        return z_rule(replace(call, needs=needs), relevance) if any(needs) else [None] * len(needs)

    return rule


def _parts(function: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    """``function(x, y)``, of complex numbers that of their real parts and that of their imaginary ones."""
    if not y.is_complex():
        return function(x, y)
    return torch.view_as_complex(function(*(torch.view_as_real(v.contiguous().resolve_conj()) for v in (x.to(y), y))))


def _shifted(call: Call, relevance: Tensor) -> Grads | None:
    """R to what carries, where the other operand is a constant that is the same for all rows: a bias, written
    ``[1, 1, D]`` or ``[D]`` alike, or what attention adds to the scores of a key whoever looks (ALiBi, which a
    longer text moves by a number that softmax does not see). None where it is none."""
    for i, (operand, constant) in enumerate(zip(call.operands, call.constant, strict=False)):
        if constant and relevance.dim() > 1 < relevance.shape[-2] and (operand.dim() < 2 or operand.shape[-2] == 1):
            return [None if i == j else unbroadcast(relevance, o.shape) for j, o in enumerate(call.operands)]
    return None


def add_plain(call: Call, relevance: Tensor) -> Grads:
    """R_u = u ⊙ R / (u + v): conserves, but single values may explode where u and v cancel (TA Eq. 8–9). A shift that
    is the same for all rows takes nothing."""
    shifted = _shifted(call, relevance)
    if shifted is not None:
        return shifted
    s = safe_divide(relevance, call.compute(*call.operands))
    live = s != 0  # a mask's −inf must not meet a zero
    signs = call.info.get("signs", (1, 1))
    return [
        unbroadcast(torch.where(live, sign * o * s, 0), o.shape) if need else None
        for o, sign, need in zip(call.operands, signs, call.needs, strict=True)
    ]


def add_normalised(call: Call, relevance: Tensor) -> Grads:
    """R̄_u = R_u · |ΣR_u| / (|ΣR_u| + |ΣR_v|) · ΣR / ΣR_u, sums per sample (TA Eq. 9–10, Lemma 2). A
    shift that is the same for all rows takes nothing."""
    shifted = _shifted(call, relevance)
    if shifted is not None:
        return shifted
    s = safe_divide(relevance, call.compute(*call.operands))
    live = s != 0
    signs = call.info.get("signs", (1, 1))
    parts = [torch.where(live, sign * o * s, 0) for o, sign in zip(call.operands, signs, strict=True)]
    sums = [call.run.per_sample(p) for p in parts]
    total = call.run.per_sample(relevance)
    bulk = sums[0].abs() + sums[1].abs()
    factors = [safe_divide(safe_divide(own.abs(), bulk) * total, own) for own in sums]
    return [
        unbroadcast(p * call.run.spread(f, p), o.shape) if need else None
        for p, f, o, need in zip(parts, factors, call.operands, call.needs, strict=True)
    ]


def product_halved(call: Call, relevance: Tensor) -> Grads:
    """z-rule of a product of two carrying branches, each part halved: TA Eq. 9–10 for equal sums."""
    return [None if part is None else part / 2 for part in z_rule(call, relevance)]


def multiply_halved(call: Call, relevance: Tensor) -> Grads:
    """Element-wise product of two carrying branches: R/2 to each."""
    return [unbroadcast(relevance / 2, o.shape) for o in call.operands]


def add_gradient(call: Call, flow: Tensor) -> Grads:
    """± flow to each operand."""
    signs = call.info.get("signs", (1, 1))
    return [
        unbroadcast(flow if sign == 1 else -flow, o.shape) if need else None
        for o, sign, need in zip(call.operands, signs, call.needs, strict=True)
    ]


def gelu_gradient(call: Call, flow: Tensor) -> Grads:
    """g'(x) · flow of GELU, in closed form."""
    return [torch.ops.aten.gelu_backward(flow, call.operands[0], approximate=call.info["approximate"])]

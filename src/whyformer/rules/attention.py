"""Attention as one operation: its map is recomputed in the backward pass, observed, and never kept."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from whyformer.rules.core import Call, Grads, safe_divide
from whyformer.rules.elementary import add_normalised


def attention_scores(call: Call) -> tuple[Tensor, Tensor]:
    """(qkᵀ · scale, A): scores before the mask, and the attention map, ``[B, H, Q, K]``."""
    q, k = call.operands[:2]
    scores = (q @ k.transpose(-2, -1)) * call.info["scale"]
    return scores, masked_softmax(scores, call.info["mask"])


def masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(scores + mask) over keys; a boolean mask says where a query may look."""
    if mask is None:
        return scores.softmax(-1)
    if mask.dtype != torch.bool:
        return (scores + mask).softmax(-1)
    # a query whose keys are all masked attends to nothing (what the fused kernels return)
    return scores.masked_fill(~mask, float("-inf")).softmax(-1).nan_to_num(0.0)


def attention_gradient(call: Call, flow: Tensor) -> Grads:
    """Gradients of softmax(qkᵀ)v, with A recomputed instead of kept; the observer sees (A, ∂f/∂A)."""
    q, k, v, *anchor = call.operands
    scale = call.info["scale"]
    weights = attention_scores(call)[1]
    d_weights = flow @ v.transpose(-2, -1)
    call.info["observe"](weights, d_weights)
    nothing: Grads = [torch.zeros_like(a) for a in anchor]
    if not any(call.needs[:3]):
        return [None, None, None, *nothing]
    d_v = weights.transpose(-2, -1) @ flow if call.needs[2] else None
    if not any(call.needs[:2]):
        return [None, None, d_v, *nothing]
    d_scores = torch.ops.aten._softmax_backward_data(d_weights, weights, -1, weights.dtype).mul_(scale)
    return [d_scores @ k, d_scores.transpose(-2, -1) @ q, d_v, *nothing]


def attention_relevance(
    add: Callable[[Call, Tensor], Grads] = add_normalised,
) -> Callable[[Call, Tensor], Grads]:
    """TA's rules for attention: A·V halved, softmax identity, mask by the add rule, QKᵀ halved (methods.md §1.2–1.3).

    The observer sees (A, R of A), R taken after the halving and before the softmax.
    """

    def rule(call: Call, relevance: Tensor) -> Grads:
        q, k, v, *anchor = call.operands
        scores, weights = attention_scores(call)
        output = call.output
        if output is None:
            raise ValueError("the attention rule reads the output")
        s = safe_divide(relevance, output) / 2
        r_weights = weights * (s @ v.transpose(-2, -1))
        call.info["observe"](weights, r_weights)
        nothing: Grads = [torch.zeros_like(a) for a in anchor]
        r_v = v * (weights.transpose(-2, -1) @ s) if call.needs[2] else None
        if not any(call.needs[:2]):
            return [None, None, r_v, *nothing]
        bias = additive_bias(call.info["mask"])
        if bias is not None:
            masked = Call((scores, bias), None, (True, False), torch.add, call.run, {})
            passed = add(masked, r_weights)[0]
            assert passed is not None
            r_weights = passed
        s = safe_divide(r_weights, scores) * (call.info["scale"] / 2)
        return [q * (s @ k), k * (s.transpose(-2, -1) @ q), r_v, *nothing]

    return rule


def additive_bias(mask: Tensor | None) -> Tensor | None:
    """The mask where it holds more than "allowed" (0) and "forbidden" (≤ −10⁴): a relative-position bias, say."""
    if mask is None or mask.dtype == torch.bool:
        return None
    plain = (mask == 0) | (mask <= -1e4)
    return None if bool(plain.all()) else mask

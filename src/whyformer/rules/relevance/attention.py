"""Attention as one operation: its map is recomputed in the backward pass, observed, and never kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from whyformer.rules.core import Call, Grads, safe_divide
from whyformer.rules.relevance.elementary import add_normalised


def masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(scores + mask) over keys; a query whose keys are all masked attends to nothing, as in fused kernels."""
    found = masked(scores, mask).softmax(-1)
    return found if mask is None or mask.dtype != torch.bool else found.nan_to_num(0.0)


def masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    """scores + mask; a boolean mask says where a query may look."""
    if mask is None:
        return scores
    return scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask


def causal_mask(query: Tensor, key: Tensor) -> Tensor:
    """True where a query may look: the lower triangle, as ``is_causal`` of the fused kernels."""
    return torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()


_AT_ONCE = 2**19
"""Entries of a map observed head by head that are there at a time: 2 MB of float32 each for A, ∂f/∂A, a product."""


def warmer(probabilities: Tensor, temperature: float, axis: int = -1) -> Tensor:
    """softmax(x / T) from softmax(x): the T-th root, scaled to sum 1."""
    if temperature == 1:
        return probabilities
    root = probabilities.pow(1 / temperature)
    return root.div_(root.sum(axis, keepdim=True).clamp(min=torch.finfo(root.dtype).tiny))


def attention_gradient(call: Call, flow: Tensor, *, temperature: float = 1.0) -> Grads:
    """Gradients of softmax(qkᵀ)v, with A recomputed instead of kept; the observer sees (A, ∂f/∂A). With another
    temperature softmax's derivative is that at softmax(qkᵀ / T).

    With ``info["by_heads"]`` long inputs go a few heads at a time, and the observer is called once for each part.
    """
    return _joined(call, [_gradient_of_heads(call, part, flow, temperature) for part in _head_parts(call, flow)])


def _head_parts(call: Call, flow: Tensor) -> list[slice]:
    q, k = call.operands[:2]
    if not call.info.get("by_heads") or q.dim() != 4:
        return [slice(None)]
    heads, size = q.shape[1], q.shape[0] * q.shape[2] * k.shape[2]
    step = max(1, min(heads, _AT_ONCE // size))
    return [slice(i, i + step) for i in range(0, heads, step)] if step < heads else [slice(None)]


def _of_heads(call: Call, part: slice, *like: Tensor) -> list[Any]:
    """Of some heads: q, k, v, the mask, and tensors like q."""
    mask, given = call.info["mask"], [*call.operands[:3], *like]
    if part != slice(None):
        given = [o[:, part] for o in given]
        mask = mask[..., part, :, :] if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1 else mask
    return [*given[:3], mask, *given[3:]]


def _joined(call: Call, parts: Sequence[Grads]) -> Grads:
    """What flows to q, k, v from what does of some heads each, and nothing to what else there is."""
    nothing = [torch.zeros_like(a) for a in call.operands[3:]]
    if len(parts) == 1:
        return [*parts[0], *nothing]
    columns: Any = zip(*parts, strict=True)
    return [*(None if one[0] is None else torch.cat(one, 1) for one in columns), *nothing]


def _gradient_of_heads(call: Call, part: slice, flow: Tensor, temperature: float) -> Grads:
    q, k, v, mask, flow = _of_heads(call, part, flow)
    scale = call.info["scale"]
    weights = masked_softmax((q @ k.transpose(-2, -1)).mul_(scale), mask)
    d_weights = flow @ v.transpose(-2, -1)
    call.info["observe"](weights, d_weights)
    if not any(call.needs[:3]):
        return [None, None, None]
    d_v = weights.transpose(-2, -1) @ flow if call.needs[2] else None
    if not any(call.needs[:2]):
        return [None, None, d_v]
    warm = warmer(weights, temperature)
    d_scores = torch.ops.aten._softmax_backward_data(d_weights, warm, -1, warm.dtype).mul_(scale)
    return [d_scores @ k, d_scores.transpose(-2, -1) @ q, d_v]


def attention_relevance(
    add: Callable[[Call, Tensor], Grads] = add_normalised,
) -> Callable[[Call, Tensor], Grads]:
    """TA's rules for attention: A·V halved, softmax identity, mask by the add rule, QKᵀ halved.

    The observer sees (A, R of A), R taken after the halving and before the softmax; of some heads each, with
    ``info["by_heads"]``, where no bias makes the add rule see all of them.
    """

    def rule(call: Call, relevance: Tensor) -> Grads:
        if call.output is None:
            raise ValueError("the attention rule reads the output")
        bias = additive_bias(call.info["mask"])
        parts = _head_parts(call, relevance) if bias is None else [slice(None)]
        return _joined(call, [of_heads(call, part, relevance, bias) for part in parts])

    def of_heads(call: Call, part: slice, relevance: Tensor, bias: Tensor | None) -> Grads:
        assert call.output is not None
        q, k, v, mask, relevance, output = _of_heads(call, part, relevance, call.output)
        scores = (q @ k.transpose(-2, -1)) * call.info["scale"]
        weights = masked_softmax(scores, mask)
        s = safe_divide(relevance, output) / 2
        r_weights = weights * (s @ v.transpose(-2, -1))
        call.info["observe"](weights, r_weights)
        r_v = v * (weights.transpose(-2, -1) @ s) if call.needs[2] else None
        if not any(call.needs[:2]):
            return [None, None, r_v]
        if bias is not None:
            masked = Call((scores, bias), None, (True, False), torch.add, call.run, {}, (False, True))
            passed = add(masked, r_weights)[0]
            assert passed is not None
            r_weights = passed
        s = safe_divide(r_weights, scores) * (call.info["scale"] / 2)
        return [q * (s @ k), k * (s.transpose(-2, -1) @ q), r_v]

    return rule


def additive_bias(mask: Tensor | None) -> Tensor | None:
    """The mask where it holds more than "allowed" (0) and "forbidden" (≤ −10⁴): a relative-position bias, say."""
    if mask is None or mask.dtype == torch.bool:
        return None
    plain = (mask == 0) | (mask <= -1e4)
    return None if bool(plain.all()) else mask

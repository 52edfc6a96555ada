"""Record fused calls as the calls of which they consist, so that rules apply to their parts.

:data:`DECOMPOSED` maps the name of a fused call to a function of

- ``step(name, function, operands, result, *constants, dtype=None)``, which records a part as a separate call and
  returns the number of its result (:meth:`whyformer.tape.recording.Recorder.step`),
- the tape,
- ``named``, the arguments of the fused call by name, with tensors as slots into ``operands``, and ``out``, its output.

It returns False if the call must be recorded as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from whyformer.tape.calls import Slot
from whyformer.tape.tables import name_set
from whyformer.tape.units import is_diagonal
from whyformer.tape.values import Tape

__all__ = ["DECOMPOSED", "FUSED_ATTENTION"]

aten = torch.ops.aten

Step = Callable[..., int]
Named = Mapping[str, Any]

FUSED_ATTENTION = name_set(
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_fused_attention_overrideable"
)
_LARGEST_BIAS = 1  # an addend of addmm with more axes than this is a branch, not a bias


def decompose_sum(step: Step, tape: Tape, named: Named, operands: Sequence[int], out: Tensor) -> bool:
    """Record addmm and baddbmm, β x + α a b, as a product and a sum, if x is a branch and not a bias, or if a or b is
    diagonal."""
    number = lambda key: operands[named[key].index]  # noqa: E731
    a, b = (number(k) for k in (("mat1", "mat2") if "mat1" in named else ("batch1", "batch2")))
    if len(tape.shapes[operands[0]]) <= _LARGEST_BIAS and not any(is_diagonal(tape, n) for n in (a, b)):
        return False
    alpha, beta = named.get("alpha", 1), named.get("beta", 1)
    steps = 1 + (alpha != 1) + (beta != 0)
    left = iter([out.shape] * (steps - 1) + [out])
    y = step("matmul", torch.matmul, [a, b], next(left))
    if alpha != 1:
        y = step("mul", torch.mul, [y], next(left), alpha)
    if beta != 0:
        x = number("self")
        if beta != 1:
            x = step("mul", torch.mul, [x], tape.shapes[x], beta)
        step("add", torch.add, [x, y], next(left))
    return True


def decompose_attention(step: Step, tape: Tape, named: Named, operands: Sequence[int], out: Tensor) -> bool:
    """Record a fused attention as softmax(s q kᵀ + mask) v. The scores and the map are values that are computed only
    when read; the output is that of the kernel that the model used. Attention with dropout is recorded as it is."""
    if named.get("dropout_p", 0.0):
        return False
    number = lambda key: operands[named[key].index] if isinstance(named.get(key), Slot) else None  # noqa: E731
    q, k, v = number("query"), number("key"), number("value")
    mask = number("attn_mask") if "attn_mask" in named else number("attn_bias")
    assert q is not None
    assert k is not None
    assert v is not None
    half = tape.dtypes[q].itemsize < 4
    if half:  # the kernel accumulates in float32
        q, k, v = (
            step("_to_copy", partial(_cast, dtype=torch.float32), [o], tape.shapes[o], dtype=torch.float32)
            for o in (q, k, v)
        )
    *rest, heads, queries, width = tape.shapes[q]
    keys, groups = tape.shapes[k][-2], tape.shapes[k][-3]
    scale = named.get("scale")
    scale = width**-0.5 if scale is None else scale
    if heads != groups:  # grouped queries: several query heads share keys and values
        times = heads // groups
        k, v = (
            step(
                "repeat_interleave",
                partial(_repeat_heads, times=times),
                [o],
                (*rest, heads, *tape.shapes[o][-2:]),
                times,
                -3,
            )
            for o in (k, v)
        )
    square = (*rest, heads, queries, keys)
    scaled = step("mul", torch.mul, [q], tape.shapes[q], scale)
    turned = step("transpose", torch.transpose, [k], (*rest, heads, width, keys), -2, -1)
    scores = step("matmul", torch.matmul, [scaled, turned], square)
    if mask is not None and tape.dtypes[mask] == torch.bool:
        hidden = step("logical_not", torch.logical_not, [mask], tape.shapes[mask])
        scores = step("masked_fill", torch.masked_fill, [scores, hidden], square, -math.inf)
    elif mask is not None:
        scores = step("add", torch.add, [scores, mask], square)
    if named.get("is_causal"):
        hidden = step("causal_mask", _causal_mask, [scores], (queries, keys), dtype=torch.bool)
        scores = step("masked_fill", torch.masked_fill, [scores, hidden], square, -math.inf)
    name, function = ("_softmax", torch.softmax) if mask is None else ("_safe_softmax", aten._safe_softmax)
    weights = step(name, function, [scores], square, -1)
    if half:
        mixed = step("matmul", torch.matmul, [weights, v], out.shape)
        step("_to_copy", partial(_cast, dtype=out.dtype), [mixed], out)
    else:
        step("matmul", torch.matmul, [weights, v], out)
    # the other results of the kernel (log-sum-exp, random state) get no numbers: no forward pass reads them
    return True


def decompose_glu(step: Step, tape: Tape, named: Named, operands: Sequence[int], out: Tensor) -> bool:
    """Record GLU as the product of one half of its operand and the sigmoid of the other half."""
    (x,), axis, half = operands, named.get("dim", -1), list(out.shape)
    count = half[axis]
    a = step("slice", aten.slice.Tensor, [x], half, axis, 0, count)
    b = step("slice", aten.slice.Tensor, [x], half, axis, count, 2 * count)
    step("mul", torch.mul, [a, step("sigmoid", torch.sigmoid, [b], half)], out)
    return True


def decompose_addcmul(step: Step, tape: Tape, named: Named, operands: Sequence[int], out: Tensor) -> bool:
    """Record x + v a b as a product and a sum."""
    x, a, b = (operands[named[key].index] for key in ("self", "tensor1", "tensor2"))
    value, shape = named.get("value", 1), torch.broadcast_shapes(tape.shapes[a], tape.shapes[b])
    y = step("mul", torch.mul, [a, b], shape)
    if value != 1:
        y = step("mul", torch.mul, [y], shape, value)
    step("add", torch.add, [x, y], out)
    return True


def decompose_product(step: Step, tape: Tape, named: Named, operands: Sequence[int], out: Tensor) -> bool:
    """Record ``prod`` along an axis of size 2 as a product of two values."""
    (x,), axis = operands, named.get("dim")
    if axis is None or tape.shapes[x][axis] != 2:
        return False
    half = [1 if i == axis % len(tape.shapes[x]) else n for i, n in enumerate(tape.shapes[x])]
    a, b = (step("slice", aten.slice.Tensor, [x], half, axis, i, i + 1) for i in range(2))
    if named.get("keepdim"):
        step("mul", torch.mul, [a, b], out)
    else:
        step("squeeze", aten.squeeze.dim, [step("mul", torch.mul, [a, b], half)], out, axis)
    return True


def decompose_distances(step: Step, tape: Tape, named: Named, operands: Sequence[int], out: Tensor) -> bool:
    """Record the distances of all pairs of rows as norms of their differences; for p = 1, as sums of their absolute
    values."""
    a, b = (operands[named[key].index] for key in ("x1", "x2"))
    left, right = (*tape.shapes[a][:-1], 1, tape.shapes[a][-1]), (*tape.shapes[b][:-2], 1, *tape.shapes[b][-2:])
    a, b = step("unsqueeze", torch.unsqueeze, [a], left, -2), step("unsqueeze", torch.unsqueeze, [b], right, -3)
    difference = step("sub", torch.sub, [a, b], torch.broadcast_shapes(left, right))
    if named.get("p", 2.0) == 1:
        step("sum", torch.sum, [step("abs", torch.abs, [difference], tape.shapes[difference])], out, [-1])
    else:
        step("linalg_vector_norm", aten.linalg_vector_norm.default, [difference], out, named.get("p", 2.0), [-1])
    return True


DECOMPOSED: Mapping[str, Callable[..., bool]] = {
    **dict.fromkeys(FUSED_ATTENTION, decompose_attention),
    "addmm": decompose_sum,
    "baddbmm": decompose_sum,
    "prod": decompose_product,
    "glu": decompose_glu,
    "addcmul": decompose_addcmul,
    "_cdist_forward": decompose_distances,
    "_euclidean_dist": decompose_distances,
}


def _cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t.to(dtype)


def _repeat_heads(t: Tensor, *_: Any, times: int) -> Tensor:
    return t.repeat_interleave(times, -3)


def _causal_mask(scores: Tensor) -> Tensor:
    return torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)

"""Record fused calls as the calls of which they consist, so that rules apply to their parts.

:data:`DECOMPOSED` maps the name of a fused call to a function of

- ``step(name, function, operands, *constants, result=None)``, which records a part as a separate call and returns the
  number of its result (:meth:`whyformer.tape.recording.Recorder.add_part`),
- the tape,
- ``named``, the arguments of the fused call by name, with tensors as slots into ``operands``, and ``out``, its output.

It returns False if the call must be recorded as a single call.
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
    y = step("matmul", torch.matmul, [a, b], result=out if (alpha, beta) == (1, 0) else None)
    if alpha != 1:
        y = step("mul", torch.mul, [y], alpha, result=None if beta else out)
    if beta != 0:
        x = number("self")
        if beta != 1:
            x = step("mul", torch.mul, [x], beta)
        step("add", torch.add, [x, y], result=out)
    return True


def decompose_attention(step: Step, tape: Tape, named: Named, operands: Sequence[int], out: Tensor) -> bool:
    """Record a fused attention as softmax(s q kᵀ + mask) v. The scores and the map are values that are computed only
    when read; the output is that of the kernel that the model used. Attention with dropout is not decomposed."""
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
        q, k, v = (step("_to_copy", _TO_FLOAT32, [o]) for o in (q, k, v))
    heads, groups, width = tape.shapes[q][-3], tape.shapes[k][-3], tape.shapes[q][-1]
    if heads != groups:  # grouped queries: several query heads share keys and values
        k, v = (step("repeat_interleave", torch.repeat_interleave, [o], heads // groups, -3) for o in (k, v))
    scale = named.get("scale")
    scaled = step("mul", torch.mul, [q], width**-0.5 if scale is None else scale)
    scores = step("matmul", torch.matmul, [scaled, step("transpose", torch.transpose, [k], -2, -1)])
    if mask is not None and tape.dtypes[mask] == torch.bool:
        hidden = step("logical_not", torch.logical_not, [mask])
        scores = step("masked_fill", torch.masked_fill, [scores, hidden], -math.inf)
    elif mask is not None:
        scores = step("add", torch.add, [scores, mask])
    if named.get("is_causal"):
        hidden = step("causal_mask", _causal_mask, [scores])
        scores = step("masked_fill", torch.masked_fill, [scores, hidden], -math.inf)
    name, function = ("_softmax", torch.softmax) if mask is None else ("_safe_softmax", aten._safe_softmax)
    weights = step(name, function, [scores], -1)
    mixed = step("matmul", torch.matmul, [weights, v], result=None if half else out)
    if half:
        step("_to_copy", partial(_cast, dtype=out.dtype), [mixed], result=out)
    # the other results of the kernel (log-sum-exp, random state) get no numbers: no forward pass reads them
    return True


def decompose_glu(step: Step, tape: Tape, named: Named, operands: Sequence[int], out: Tensor) -> bool:
    """Record GLU as the product of one half of its operand and the sigmoid of the other half."""
    (x,), axis = operands, named.get("dim", -1)
    count = out.shape[axis]
    a, b = (step("slice", aten.slice.Tensor, [x], axis, i, i + count) for i in (0, count))
    step("mul", torch.mul, [a, step("sigmoid", torch.sigmoid, [b])], result=out)
    return True


def decompose_addcmul(step: Step, tape: Tape, named: Named, operands: Sequence[int], out: Tensor) -> bool:
    """Record x + v a b as a product and a sum."""
    x, a, b = (operands[named[key].index] for key in ("self", "tensor1", "tensor2"))
    y, value = step("mul", torch.mul, [a, b]), named.get("value", 1)
    if value != 1:
        y = step("mul", torch.mul, [y], value)
    step("add", torch.add, [x, y], result=out)
    return True


def decompose_product(step: Step, tape: Tape, named: Named, operands: Sequence[int], out: Tensor) -> bool:
    """Record ``prod`` along an axis of size 2 as a product of two values."""
    (x,), axis = operands, named.get("dim")
    if axis is None or tape.shapes[x][axis] != 2:
        return False
    a, b = (step("slice", aten.slice.Tensor, [x], axis, i, i + 1) for i in range(2))
    if named.get("keepdim"):
        step("mul", torch.mul, [a, b], result=out)
    else:
        step("squeeze", aten.squeeze.dim, [step("mul", torch.mul, [a, b])], axis, result=out)
    return True


def decompose_distances(step: Step, tape: Tape, named: Named, operands: Sequence[int], out: Tensor) -> bool:
    """Record the distances of all pairs of rows as norms of their differences; for p = 1, as sums of their absolute
    values."""
    a, b = (operands[named[key].index] for key in ("x1", "x2"))
    a, b = step("unsqueeze", torch.unsqueeze, [a], -2), step("unsqueeze", torch.unsqueeze, [b], -3)
    difference, p = step("sub", torch.sub, [a, b]), named.get("p", 2.0)
    if p == 1:
        step("sum", torch.sum, [step("abs", torch.abs, [difference])], [-1], result=out)
    else:
        step("linalg_vector_norm", aten.linalg_vector_norm.default, [difference], p, [-1], result=out)
    return True


def decompose_bilinear(step: Step, tape: Tape, named: Named, operands: Sequence[int], out: Tensor) -> bool:
    """Record the bilinear form y_k = Σ_ij a_i W_kij b_j of ``nn.Bilinear`` as a linear layer of a, and the product of
    its outputs with b."""
    if [named[key] for key in ("expand1", "expand2", "expand3", "sumdim")] != [[1, 3], [0], [1, 2], [2, 3]]:
        return False
    a, weight, b = (operands[named[key].index] for key in ("i1", "i2", "i3"))
    count, _, width = tape.shapes[weight]
    rows = step("flatten", torch.flatten, [step("transpose", torch.transpose, [weight], 1, 2)], 0, 1)
    layer = step("linear", torch.nn.functional.linear, [a, rows])
    layer = step("view", aten.view.default, [layer], [-1, count, width])
    y = step("matmul", torch.matmul, [layer, step("unsqueeze", torch.unsqueeze, [b], -1)])
    step("squeeze", aten.squeeze.dim, [y], -1, result=out)
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
    "_trilinear": decompose_bilinear,
}


def _cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t.to(dtype)


_TO_FLOAT32 = partial(_cast, dtype=torch.float32)


def _causal_mask(scores: Tensor) -> Tensor:
    return torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)

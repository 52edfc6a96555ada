"""Composite operations, written out in the operations that have rules. Run with the interception on."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import string
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from whyformer.engine.readings import is_map, is_parameter, tensors
from whyformer.errors import UnknownOperation


def multi_head_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """``torch.nn.functional.multi_head_attention_forward`` as linear, scaled_dot_product_attention, linear.

    Inputs are ``[N, B, E]`` (or ``[N, E]``) as ``nn.MultiheadAttention`` hands them over.
    """
    bound = _MULTI_HEAD.bind(*args, **kwargs)
    bound.apply_defaults()
    a = SimpleNamespace(**bound.arguments)
    if a.add_zero_attn or any(extra is not None for extra in (a.bias_k, a.bias_v, a.static_k, a.static_v)):
        raise UnknownOperation(
            "nn.MultiheadAttention with add_bias_kv, add_zero_attn or static keys has extra keys that are no tokens; "
            "whyformer cannot lay out its attention map"
        )
    batched = a.query.dim() == 3
    inputs = [x.transpose(0, 1) if batched else x.unsqueeze(0) for x in (a.query, a.key, a.value)]
    separate = (a.q_proj_weight, a.k_proj_weight, a.v_proj_weight)
    weights = separate if a.use_separate_proj_weight else a.in_proj_weight.chunk(3)
    biases = [None] * 3 if a.in_proj_bias is None else a.in_proj_bias.chunk(3)
    q, k, v = (
        functional.linear(x, w, b).unflatten(-1, (a.num_heads, -1)).transpose(1, 2)
        for x, w, b in zip(inputs, weights, biases, strict=True)
    )
    mask = _merge_masks(a.attn_mask, a.key_padding_mask, q, a.num_heads)
    if a.need_weights:
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
        maps = functional.softmax(scores if mask is None else scores + mask, dim=-1)
        mixed = maps @ v
    else:
        maps = None
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    joined = functional.linear(mixed.transpose(1, 2).flatten(-2), a.out_proj_weight, a.out_proj_bias)
    joined = joined.transpose(0, 1) if batched else joined.squeeze(0)
    if maps is None:
        return joined, None
    maps = maps.mean(1) if a.average_attn_weights else maps
    return joined, maps if batched else maps.squeeze(0)


_MULTI_HEAD = inspect.signature(functional.multi_head_attention_forward)


def _merge_masks(mask: Tensor | None, padding: Tensor | None, query: Tensor, heads: int) -> Tensor | None:
    """Both masks as one additive ``[B, H, Q, K]`` mask."""

    def additive(m: Tensor) -> Tensor:
        if m.dtype != torch.bool:
            return m.to(query.dtype)
        return torch.zeros_like(m, dtype=query.dtype).masked_fill(m, float("-inf"))

    merged = None
    if mask is not None:
        merged = additive(mask)
        if merged.dim() == 3:
            merged = merged.reshape(-1, heads, *merged.shape[1:]) if merged.shape[0] != 1 else merged[None]
    if padding is not None:
        columns = additive(padding)[..., None, None, :] if padding.dim() == 2 else additive(padding)
        merged = columns if merged is None else merged + columns
    return merged


def affine_addmm(bias: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """``addmm`` of a layer (GPT-2's Conv1D) as the linear operation it is."""
    if (beta, alpha) != (1, 1):
        return beta * bias + alpha * (mat1 @ mat2)
    if bias.dim() == 1 and not mat2.requires_grad:
        return functional.linear(mat1, mat2.T, bias)
    return mat1 @ mat2 + bias


def batched_addition(x: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """``baddbmm`` as a product and a sum."""
    return (batch1 @ batch2) * alpha + x * beta


def grouped_layers(mat_a: Tensor, mat_b: Tensor, offs: Tensor | None = None, **_: Any) -> Tensor:
    """``grouped_mm``: each group of rows (the tokens of an expert) through a layer of its own."""
    if offs is None or mat_a.dim() != 2 or mat_b.dim() != 3:
        raise UnknownOperation("grouped_mm is known for rows in groups and one weight matrix a group only")
    ends = offs.tolist()
    groups = zip([0, *ends], [*ends, len(mat_a)], strict=True)
    rows = [mat_a[start:end] for start, end in groups]
    layers = [functional.linear(own, mat_b[i].mT) for i, own in enumerate(rows[:-1])]
    return torch.cat([*layers, rows[-1].new_zeros(len(rows[-1]), mat_b.shape[-1])])


def moments(deviation: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """``var_mean`` and ``std_mean`` as the two operations that they are."""

    def both(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        axes = args[0] if args and not isinstance(args[0], bool) else kwargs.get("dim")
        keepdim = bool(kwargs.get("keepdim", args[2] if len(args) > 2 else False))
        return deviation(x, *args, **kwargs), x.mean() if axes is None else x.mean(axes, keepdim)

    return both


def normalize(x: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, **_: Any) -> Tensor:
    """``torch.nn.functional.normalize`` as a quotient by the norm."""
    return x / x.norm(p, dim, keepdim=True).clamp_min(eps)


def einsum(equation: str, *operands: Any) -> Any:
    """An einsum of two tensors as matmul or linear, so that it gets their rules and its attention is found."""
    found = tensors(operands)
    if len(found) != 2:
        return NotImplemented
    equation = _explicit(equation)
    first, _, second = equation.partition("->")[0].partition(",")
    if is_map(found[1]) or is_parameter(found[0]):
        found, equation = found[::-1], f"{second},{first}->{equation.partition('->')[2]}"
    product = einsum_product(equation, *found)
    return NotImplemented if product is None else product()


def einsum_product(equation: str, a: Tensor, b: Tensor) -> Callable[[], Tensor] | None:
    """``torch.einsum`` of two operands as permutations around one matmul, or one linear where ``b`` is a parameter.

    None where it is no such product: a letter twice in one operand, a letter summed in one operand alone, nothing
    contracted, no explicit output.
    """
    letters = _letters(equation, a, b)
    if letters is None:
        return None
    left, right, out = letters
    batch = [c for c in out if c in left and c in right]
    shared = [c for c in left if c in right and c not in out]
    own = ([c for c in left if c not in right], [c for c in right if c not in left])
    whole = all(len(set(x)) == len(x) for x in letters) and set(out) == {*batch, *own[0], *own[1]}
    if not whole or not shared:
        return None
    sizes = {**dict(zip(left, a.shape, strict=True)), **dict(zip(right, b.shape, strict=True))}

    def arranged(x: Tensor, names: str, *groups: list[str]) -> Tensor:
        """``x`` with its axes in the order of the groups, each group after the batch axes as one axis."""
        order = [names.index(c) for c in itertools.chain(batch, *groups)]
        x = x if order == sorted(order) else x.permute(order)
        wanted = [sizes[c] for c in batch] + [math.prod(sizes[c] for c in group) for group in groups]
        return x if list(x.shape) == wanted else x.reshape(wanted)

    def run() -> Tensor:
        if is_parameter(b) and not batch:
            product = functional.linear(arranged(a, left, own[0], shared), arranged(b, right, own[1], shared))
        else:
            product = arranged(a, left, own[0], shared) @ arranged(b, right, shared, own[1])
        made = [*batch, *own[0], *own[1]]
        shape = [sizes[c] for c in made]
        product = product if list(product.shape) == shape else product.reshape(shape)
        order = [made.index(c) for c in out]
        return product if order == sorted(order) else product.permute(order)

    return run


def inner(x: Tensor, y: Tensor) -> Any:
    """``inner``: a linear layer where the second has rows."""
    return functional.linear(x, y) if y.dim() == 2 else NotImplemented


def _explicit(equation: str) -> str:
    """With the output that torch takes where none is said: the letters that stand once, in order."""
    equation = equation.replace(" ", "")
    if "->" in equation:
        return equation
    once = "".join(sorted(c for c in set(equation) - {",", "."} if equation.count(c) == 1))
    return f"{equation}->{'...' if '...' in equation else ''}{once}"


def _letters(equation: str, a: Tensor, b: Tensor) -> tuple[str, str, str] | None:
    """(axes of a, of b, of the result) with the dots written out as letters."""
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    operands = inputs.split(",")
    if not arrow or len(operands) != 2:
        return None
    free = "".join(c for c in string.ascii_letters if c not in equation)
    hidden = {
        x.dim() - len(names.replace("...", "")) for x, names in zip((a, b), operands, strict=True) if "..." in names
    }
    if len(hidden) > 1 or ("..." in out and not hidden):
        return None
    dots = free[: hidden.pop()] if hidden else ""
    left, right, made = (names.replace("...", dots) for names in (*operands, out))
    return (left, right, made) if (len(left), len(right)) == (a.dim(), b.dim()) else None


def written_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """softmax(q kᵀ · scale + mask) v, for a mask that the fused operation would hide: one computed from the input."""
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    return torch.softmax(scores + attn_mask, -1) @ value


def gated(x: Tensor, dim: int = -1) -> Tensor:
    """``glu``: one half times the sigmoid of the other."""
    half, gate = x.chunk(2, dim)
    return half * torch.sigmoid(gate)


def group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *_: Any
) -> Tensor:
    """``group_norm`` as a ``layer_norm`` of all that a group of channels holds, and what each channel is scaled by."""
    groups = x.reshape(x.shape[0], num_groups, -1)
    return _by_channel(functional.layer_norm(groups, groups.shape[-1:], eps=eps).reshape(x.shape), weight, bias)


def instance_norm(
    x: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, weight: Tensor | None = None,
    bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5, *_: Any,
) -> Any:  # fmt: skip
    """``instance_norm`` as a ``layer_norm`` of each channel; one by statistics that are kept is linear."""
    if not use_input_stats or running_mean is not None:
        return NotImplemented
    rows = x.flatten(2)
    return _by_channel(functional.layer_norm(rows, rows.shape[-1:], eps=eps).reshape(x.shape), weight, bias)


def batch_norm(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5, *_: Any,
) -> Any:  # fmt: skip
    """``batch_norm`` by the statistics of what it is given, as a ``layer_norm`` of each channel."""
    if not training or running_mean is not None:
        return NotImplemented
    rows = x.transpose(0, 1)
    flat = rows.flatten(1)
    normed = functional.layer_norm(flat, flat.shape[-1:], eps=eps).reshape(rows.shape).transpose(0, 1)
    return _by_channel(normed, weight, bias)


def _by_channel(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    shape = (-1, *(1,) * (x.dim() - 2))
    x = x if weight is None else x * weight.reshape(shape)
    return x if bias is None else x + bias.reshape(shape)


def native_layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``native_layer_norm``: the norm, and the statistics that it was made with."""
    axes = tuple(range(-len(shape), 0))
    plain = x.detach()
    deviation = (plain.var(axes, unbiased=False, keepdim=True) + eps).rsqrt()
    return functional.layer_norm(x, tuple(shape), weight, bias, eps), plain.mean(axes, keepdim=True), deviation


# Always, since attention lies in them.
DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    "multi_head_attention_forward": multi_head_attention,
}
# Where they carry and rules are asked for; NotImplemented where the call is no such thing.
NORMS: dict[str, Callable[..., Any]] = {
    "group_norm": group_norm, "instance_norm": instance_norm, "batch_norm": batch_norm,
    "native_layer_norm": native_layer_norm,
}  # fmt: skip
# Where they carry, or mix by an attention map; NotImplemented where the call is no such thing.
PRODUCTS: dict[str, Callable[..., Any]] = {
    "einsum": einsum,
    "inner": inner,
    "linalg_multi_dot": lambda factors: functools.reduce(torch.matmul, factors),
    "chain_matmul": lambda *factors: functools.reduce(torch.matmul, factors),
}
# Where the composite has no row for the operation itself.
PARTS: dict[str, Callable[..., Any]] = {
    "addmm": affine_addmm,
    "baddbmm": batched_addition,
    "rmatmul": lambda x, y: torch.matmul(y, x),
    "rsub": lambda x, y: -x + y,
    "rdiv": lambda x, y: torch.mul(torch.reciprocal(x), y),
    "addcmul": lambda x, tensor1, tensor2, *, value=1: x + value * tensor1 * tensor2,
    "_grouped_mm": grouped_layers,
    "glu": gated,
    "lerp": lambda x, end, weight: x + weight * (end - x),
    "normalize": normalize,
    "std_mean": moments(torch.std),
    "var_mean": moments(torch.var),
}

"""How one call of an operation is read: the row of a composite it goes by, and the tensors among which it shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from whyformer.rules.relevance.attention import causal_mask, masked


@dataclass
class Reading:
    """One call as a rule sees it.

    Attributes:
        role: the composite's row; mostly the operation's name.
        kind: the row where there is none of that name.
        operands: the tensors that the rule gets.
        compute: operands -> value.
        info: what else a rule may read.
        instead: where the rules know the call's parts only: the same written out in these.
    """

    role: str
    kind: str
    operands: Sequence[Any]
    compute: Callable[..., Any]
    info: dict[str, Any] = field(default_factory=dict)
    instead: Callable[[], Any] | None = None


Arguments = tuple[Any, ...]
Named = dict[str, Any]
# (row of the operation, function, arguments by position, by name) -> reading
Reader = Callable[[Any, Callable[..., Any], Arguments, Named], Reading]


def bind(names: str, args: Arguments, kwargs: Named, **defaults: Any) -> Named:
    """Arguments by name, positional ones in the order of ``names``."""
    order = names.split()
    return {**defaults, **dict(zip(order, args, strict=False)), **kwargs}


def tensors(values: Sequence[Any]) -> list[Tensor]:
    """The tensors among arguments, and in lists and tuples among them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):  # of a union it takes twice as long
            found.extend([v for v in value if isinstance(v, Tensor)])
    return found


def carries(value: Any) -> bool:
    """Whether relevance reaches it: foreign leaves are detached before a call is read."""
    return isinstance(value, Tensor) and value.requires_grad


def is_parameter(value: Any) -> bool:
    """A parameter, or a view of one."""
    known = getattr(value, "_whyformer_parameter", False)
    return known or (type(value) is not Tensor and isinstance(value, nn.Parameter))


def is_view(value: Tensor, others: Sequence[Tensor]) -> bool:
    """Whether it lies in the memory of another tensor."""
    own = value.untyped_storage().data_ptr()
    return any(own == other.untyped_storage().data_ptr() for other in others)


def is_map(value: Any) -> bool:
    """An attention map that the model computed itself."""
    return isinstance(value, Tensor) and getattr(value, "_whyformer_map", False)


def is_statistic(value: Any) -> bool:
    """What a written-out norm divides by, or what was computed from such things alone."""
    return getattr(value, "_whyformer_statistic", False)


def is_activated(value: Any) -> bool:
    """What an activation gave."""
    return getattr(value, "_whyformer_activated", False)


def first(row: Any, function: Callable[..., Any], args: Arguments, kwargs: Named) -> Reading:
    """An operation on its first argument."""
    return Reading(row.name, row.kind, args[:1], lambda x: function(x, *args[1:], **kwargs))


def layer(row: Any, function: Callable[..., Any], args: Arguments, kwargs: Named) -> Reading:
    """``linear``; weights that were computed from the input make it a product of two branches."""
    a = bind("input weight bias", args, kwargs, bias=None)
    x, weight, bias = a["input"], a["weight"], a["bias"]
    operands = [x, weight] if bias is None else [x, weight, bias]
    reading = Reading("layer", row.kind, operands, function)
    if carries(weight) or carries(bias):
        reading.instead = lambda: x @ weight.mT if bias is None else x @ weight.mT + bias
    return reading


def convolution(row: Any, function: Callable[..., Any], args: Arguments, kwargs: Named) -> Reading:
    """A convolution is a linear layer."""
    names = "input weight bias stride padding dilation groups"
    a = bind(names, args, kwargs, bias=None, stride=1, padding=0, dilation=1, groups=1)
    x, weight, bias = a["input"], a["weight"], a["bias"]
    info = {k: a[k] for k in ("stride", "padding", "dilation", "groups")}
    operands = [x, weight] if bias is None else [x, weight, bias]
    return Reading(
        "layer",
        row.kind,
        operands,
        lambda x, w, b=None: function(x, w, b, **info),
        info,
    )


def transposed(row: Any, function: Callable[..., Any], args: Arguments, kwargs: Named) -> Reading:
    """A transposed convolution with a constant kernel: a linear layer too."""
    names = "input weight bias stride padding output_padding groups dilation"
    a = bind(names, args, kwargs, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1)
    x, weight, bias = a["input"], a["weight"], a["bias"]
    info = {k: a[k] for k in ("stride", "padding", "output_padding", "groups", "dilation")}
    operands = [x, weight] if bias is None else [x, weight, bias]
    return Reading("layer", row.kind, operands, lambda x, w, b=None: function(x, w, b, **info), info)


def sampled(row: Any, function: Callable[..., Any], args: Arguments, kwargs: Named) -> Reading:
    """``grid_sample``: linear in what is sampled; where that is done says as little as an index does."""
    a = bind("input grid mode padding_mode align_corners", args, kwargs)
    x, grid = a.pop("input"), a.pop("grid")
    return Reading(row.name, row.kind, (x, grid), lambda x, g: function(x, g, **a))


def transform(row: Any, function: Callable[..., Any], args: Arguments, kwargs: Named) -> Reading:
    """A Fourier transform: a weighted sum for the real and one for the imaginary part."""
    reading = first(row, function, args, kwargs)
    reading.role = "transform"
    return reading


def system(row: Any, function: Callable[..., Any], args: Arguments, kwargs: Named) -> Reading:
    """``solve_triangular(A, B)``: linear in B; A divides, and is constant as other denominators are."""
    a = bind("A B", args, kwargs)
    matrix, values = a.pop("A"), a.pop("B")
    return Reading(row.name, row.kind, (matrix, values), lambda m, v: function(m, v, **a))


def matmul(row: Any, function: Callable[..., Any], args: Arguments, kwargs: Named) -> Reading:
    """A product with weights is a linear layer, one with another constant a weighted sum."""
    x, y = args[:2]
    if carries(x) and is_parameter(y) and y.dim() == 2:
        return Reading("layer", row.kind, (x, y.mT), lambda x, w: function(x, w.mT))
    reading = Reading("product" if carries(x) and carries(y) else "weighted sum", row.kind, (x, y), function)
    if carries(x) and is_parameter(y) and y.dim() > 2:
        reading.instead = lambda: _layers(x, y)
    elif carries(y) and is_parameter(x) and x.dim() > 1:
        turned = y[:, None] if y.dim() == 1 else y
        reading.instead = lambda: _layers(turned.mT, x.mT).mT.reshape(_shape(x, y))
    return reading


def _shape(x: Tensor, y: Tensor) -> list[int]:
    """Of x @ y."""
    if y.dim() == 1:
        return list(x.shape[:-1])
    return [*torch.broadcast_shapes(x.shape[:-2], y.shape[:-2]), x.shape[-2], y.shape[-1]]


def _layers(x: Tensor, weights: Tensor) -> Tensor:
    """x @ weights, ``[..., N, I]`` and ``[..., I, O]``, as one linear layer, or as one for each matrix."""
    first = weights.flatten(0, -3)[0] if weights.dim() > 2 else weights
    if weights.dim() == 2 or bool((weights == first).all()):
        made = functional.linear(x, first.mT)
        return made if weights.dim() - x.dim() < 1 else made.expand(_shape(x, weights))
    lead = torch.broadcast_shapes(x.shape[:-2], weights.shape[:-2])
    rows, each = (t.expand(*lead, *t.shape[-2:]).flatten(0, -3) for t in (x, weights))
    return torch.stack([functional.linear(own, w.mT) for own, w in zip(rows, each, strict=True)]).unflatten(0, lead)


def einsum(row: Any, function: Callable[..., Any], args: Arguments, kwargs: Named) -> Reading:
    """What no matmul says: linear in each operand."""
    operands = tensors(args[1:])
    role = {1: "weighted sum", 2: "product"}.get(sum(map(carries, operands)), row.name)
    return Reading(role, row.kind, operands, lambda *operands: function(args[0], *operands))


def addition(row: Any, function: Callable[..., Any], args: Arguments, kwargs: Named) -> Reading:
    """A number or a bias vector takes no relevance: a shift; nor does max x in x − max x."""
    a = bind("input other alpha", args, kwargs, alpha=1)
    left, right, alpha = a["input"], a["other"], a["alpha"]
    signs = (1, -1 if row.name == "sub" else 1)
    reading = Reading("add", row.kind, (left, right), lambda u, v: function(u, v), {"signs": signs})
    if row.name == "sub" and getattr(right, "_whyformer_largest", False) and carries(left):
        reading.role = "normalised"
    elif alpha != 1:
        reading.instead = lambda: function(left, right * alpha)
    elif _shifts(right, left):
        reading = Reading("shift", row.kind, (left,), lambda x: function(x, right), {"signs": signs[:1]})
    elif _shifts(left, right):
        reading = Reading("shift", row.kind, (right,), lambda x: function(left, x), {"signs": signs[1:]})
    return reading


def _shifts(value: Any, other: Any) -> bool:
    """Whether it is a bias: a number, or weights that differ along one axis."""
    if not isinstance(value, Tensor):
        return True
    if value.requires_grad or not isinstance(other, Tensor):
        return False
    axes = sum(n > 1 and step != 0 for n, step in zip(value.shape, value.stride(), strict=True))
    if other.dim() > 1 >= value.dim() or (is_parameter(value) and axes <= 1 and other.numel() > value.numel()):
        return True
    return other.dim() == 2 and getattr(value, "_whyformer_picked", False)  # that of each row's expert


def multiplication(row: Any, function: Callable[..., Any], args: Arguments, kwargs: Named) -> Reading:
    """A gate is a product of two branches; a constant factor takes no relevance, nor does the statistic of a norm."""
    x, y = args[:2]
    if all(isinstance(v, Tensor) for v in (x, y)) and (x.is_complex() or y.is_complex()):
        return Reading(row.name, row.kind, args, function, instead=lambda: _complex_product(x, y))
    if carries(x) and carries(y):
        if is_statistic(x) != is_statistic(y):
            return Reading("normalised", row.kind, (y, x) if is_statistic(x) else (x, y), function)
        if is_activated(x) != is_activated(y):
            return Reading("activated gate", "gate", (x, y) if is_activated(x) else (y, x), function)
        return Reading("gate", row.kind, (x, y), function)
    if carries(y):
        return Reading(row.name, row.kind, (y,), lambda y: function(x, y, **kwargs))
    return first(row, function, args, kwargs)


def _complex_product(x: Any, y: Any) -> Tensor:
    (a, b), (c, d) = (torch.view_as_real(v).unbind(-1) if v.is_complex() else (v, torch.zeros_like(v)) for v in (x, y))
    return torch.view_as_complex(torch.stack([a * c - b * d, a * d + b * c], -1))


def division(row: Any, function: Callable[..., Any], args: Arguments, kwargs: Named) -> Reading:
    """By a constant, by what scales (a norm's statistic, one number for many values), or a quotient of what carries."""
    x, y = args[:2]
    if carries(y):
        scales = carries(x) and ((is_statistic(y) and not is_statistic(x)) or y.numel() < x.numel())
        return Reading("normalised" if scales else "quotient", row.kind, (x, y), lambda x, y: function(x, y, **kwargs))
    return first(row, function, args, kwargs)


def largest(row: Any, function: Callable[..., Any], args: Arguments, kwargs: Named) -> Reading:
    """The largest value of each row, or the larger of two tensors."""
    return Reading(row.name, row.kind, tensors((*args, *kwargs.values())), function)


def bounded(row: Any, function: Callable[..., Any], args: Arguments, kwargs: Named) -> Reading:
    """Between bounds, which may be computed from the input too: the larger or smaller is chosen."""
    operands = tensors((*args, *kwargs.values()))
    if sum(map(carries, operands)) > 1:
        return Reading(row.name, "selection", operands, function)
    return first(row, function, args, kwargs)


def gathered(row: Any, function: Callable[..., Any], args: Arguments, kwargs: Named) -> Reading:
    """x with the rows of another tensor added at their places: a sum with as many parts as there are."""
    word = "src" if row.name == "scatter_add" else "source"
    a = bind(f"input dim index {word}", args, kwargs)
    rest = {k: v for k, v in a.items() if k not in ("input", word)}
    return Reading("weighted sum", row.kind, (a["input"], a[word]), lambda x, s: function(x, **{word: s}, **rest))


def scattered(row: Any, function: Callable[..., Any], args: Arguments, kwargs: Named) -> Reading:
    """``scatter_reduce``: sums and means are linear, the largest and smallest a selection."""
    a = bind("input dim index src reduce", args, kwargs)
    kind = {"sum": "linear", "mean": "linear", "amax": row.kind, "amin": row.kind}.get(a["reduce"], "")
    rest = {k: v for k, v in a.items() if k not in ("input", "src")}
    role = "weighted sum" if kind == "linear" else row.name
    return Reading(role, kind, (a["input"], a["src"]), lambda x, s: function(x, src=s, **rest))


def softmax(row: Any, function: Callable[..., Any], args: Arguments, kwargs: Named) -> Reading:
    """Over one axis."""
    reading = first(row, function, args, kwargs)
    axis = bind("input dim", args, kwargs, dim=None)["dim"]
    reading.info["axis"] = -1 if axis is None else axis
    return reading


def gelu(row: Any, function: Callable[..., Any], args: Arguments, kwargs: Named) -> Reading:
    """Its closed-form gradient wants to know which GELU."""
    reading = first(row, function, args, kwargs)
    reading.info["approximate"] = kwargs.get("approximate", "none")
    return reading


def norm(row: Any, function: Callable[..., Any], args: Arguments, kwargs: Named) -> Reading:
    """A normalisation over trailing axes; scales that were computed from the input are a gate behind it."""
    centred = row.name == "layer_norm"
    names = "input normalized_shape weight bias eps" if centred else "input normalized_shape weight eps"
    a = bind(names, args, kwargs, weight=None, bias=None, eps=1e-5 if centred else None)
    x, shape, weight, bias = a["input"], tuple(a["normalized_shape"]), a["weight"], a["bias"]
    eps = torch.finfo(x.dtype).eps if a["eps"] is None else a["eps"]
    info = {"weight": weight, "eps": eps, "axes": len(shape), "centred": centred}
    reading = Reading(row.name, row.kind, (x,), lambda x: function(x, *args[1:], **kwargs), info)
    if carries(weight) or carries(bias):

        def instead() -> Tensor:
            y = function(x, shape, eps=eps)
            y = y if weight is None else y * weight
            return y if bias is None else y + bias

        reading.instead = instead
    return reading


def power(row: Any, function: Callable[..., Any], args: Arguments, kwargs: Named) -> Reading:
    """x^a; with a = ±½ it is sqrt or rsqrt, with a whole number from 1 on an activation like square."""
    exponent = bind("input exponent", args, kwargs)["exponent"]
    reading = first(row, function, args, kwargs)
    if isinstance(exponent, int | float) and exponent >= 1 and exponent == int(exponent):
        reading.role, reading.kind = "square" if exponent == 2 else reading.role, "activation"
    elif not carries(exponent) and bool((torch.as_tensor(exponent).abs() == 0.5).all()):
        reading.kind = "statistic"
    return reading


def attention_scores(args: Arguments, kwargs: Named) -> tuple[Callable[[], Tensor], Tensor, int]:
    """(what gives the scores of a fused attention, masked; its values; how often each head of these is used)"""
    names = "query key value attn_mask dropout_p is_causal scale enable_gqa"
    a = bind(names, args, kwargs, attn_mask=None, is_causal=False, scale=None)
    q, k = a["query"].detach(), a["key"].detach()
    mask = causal_mask(q, k) if a["is_causal"] else a["attn_mask"]
    scale = q.shape[-1] ** -0.5 if a["scale"] is None else float(a["scale"])
    repeats = 1 if q.dim() < 4 else q.shape[-3] // k.shape[-3]
    k = k.repeat_interleave(repeats, -3) if repeats > 1 else k
    return lambda: masked(q @ k.transpose(-2, -1) * scale, mask), a["value"], repeats

"""Layers of a last block: what comes back to them stands at the few rows that the target reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from whyformer.engine.readings import bind

_FEWEST = 16
"""Rows from which on it is worth the look."""


def layer_of_rows(name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A ``linear`` or ``addmm`` of constant weights, whose gradient is computed at the rows alone at which something
    arrives; NotImplemented for any other call."""
    if name == "linear":
        given, turned = bind("input weight bias", tuple(args), dict(kwargs), bias=None), False
        x, weight, bias = given["input"], given["weight"], given["bias"]
    elif name == "addmm" and len(args) == 3 and not kwargs:
        (bias, x, weight), turned = args, True
    else:
        return NotImplemented
    plain = type(x) is Tensor and type(weight) in (Tensor, nn.Parameter) and weight.dim() == 2
    constant = x.requires_grad and not weight.requires_grad and (bias is None or not bias.requires_grad)
    if not plain or not constant or not x.is_cpu or x.dtype != weight.dtype or x.numel() < _FEWEST * x.shape[-1]:
        return NotImplemented  # on a GPU to ask takes longer than to compute it all
    if torch._C._is_any_autocast_enabled() or torch._C._are_functorch_transforms_active():
        return NotImplemented

    def compute(value: Tensor) -> Tensor:
        result: Tensor = func(bias, value, weight) if turned else func(value, weight, bias)
        return result

    return LayerOfRows.apply(compute, weight.T if turned else weight, x)


class LayerOfRows(torch.autograd.Function):
    """y = x Wᵀ + b; on the way back g W, 0 at the rows where g is 0."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[[Tensor], Tensor], weight: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        output = compute(x)
        return output.detach() if output._is_view() else output  # a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, *flows: Tensor) -> Any:
        (weight,), flow = ctx.saved_tensors, flows[0]
        flat = flow.reshape(-1, flow.shape[-1])
        rows = _reached(flat)
        if rows is None:
            found = flat @ weight
        else:
            found = flat.new_zeros(len(flat), weight.shape[1])
            found[rows] = flat[rows] @ weight
        return None, None, found.view(*flow.shape[:-1], -1)


def _reached(flat: Tensor) -> Tensor | None:
    """The numbers of the rows that are not 0; None where these are the half or more."""
    if 2 * int(flat[:, 0].count_nonzero()) >= len(flat):  # as a rule that is all there is to ask
        return None
    rows = flat.any(1).nonzero()[:, 0]
    return rows if 2 * len(rows) < len(flat) else None

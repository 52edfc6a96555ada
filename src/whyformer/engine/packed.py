"""Weights kept in 8 or 4 bits: what they are unpacked to is a weight, whichever way the model does it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from whyformer.engine.readings import is_parameter, tensors
from whyformer.errors import ModelError
from whyformer.models.walking import modules

PACKED = (torch.int8, torch.uint8, torch.int16, torch.int32)
ROUNDING = 1e-3


def kept(model: nn.Module) -> set[int]:
    """The ids of its parameters and buffers; none where no matrix among them is in integers."""
    held = (own for m in modules(model) for own in (*m._parameters.values(), *m._buffers.values()))
    listed = [t for t in held if t is not None]
    return {id(t) for t in listed} if any(t.dtype in PACKED and t.dim() > 1 for t in listed) else set()


def note(known: set[int], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
    """What is computed from integer matrices of the model, and from nothing but parameters and buffers, counts as a
    parameter: x @ (q · scale) is a linear layer."""
    given = tensors((*args, *kwargs.values()))
    if not any(_opened(t) or (t.dtype in PACKED and t.dim() > 1 and id(t) in known) for t in given):
        return
    if all(_opened(t) or id(t) in known or is_parameter(t) for t in given):
        for tensor in tensors((result,)):
            tensor._whyformer_unpacked = tensor._whyformer_parameter = True  # type: ignore[attr-defined]


def _opened(value: Tensor) -> bool:
    return getattr(value, "_whyformer_unpacked", False)


def is_wrapped(value: Any) -> bool:
    """Whether this is a tensor of a class of its own that packs its numbers (torchao, quanto)."""
    return (
        isinstance(value, Tensor)
        and type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__
        and type(value).dequantize is not Tensor.dequantize
    )


def unwrapped(name: str, func: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with packed weights as ordinary ones, which rules of relevance need.

    Raises:
        ModelError: that gives another result, for what they are multiplied with is rounded, too.
    """
    plain = []
    for value in args:
        if is_wrapped(value):
            value = value.dequantize().detach()
            value._whyformer_parameter = True
        plain.append(value)
    with torch.no_grad():
        theirs, ours = func(*args), func(*plain)
    if float((theirs - ours).abs().max()) > ROUNDING * float(ours.abs().max()):
        raise ModelError(
            f"what enters '{name}' is rounded to integers with the weights, so the rules cannot follow it: explain the "
            "model before it was quantised, or use occlusion"
        )
    return tuple(plain)

"""Recognize padding masks by their effect: tokens at the marked positions do not change the output."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from whyformer.errors import FOREIGN_ERRORS
from whyformer.inputs import Inputs
from whyformer.inputs.feed import argument_name, mask_name
from whyformer.methods.padding import float_outputs
from whyformer.models.cache import once
from whyformer.models.ends import forward

__all__ = ["with_padding_mask"]


def with_padding_mask(model: nn.Module, inputs: Inputs) -> Inputs:
    """Return inputs with :attr:`Inputs.mask` set from an argument that marks padding under another name than
    ``attention_mask``, by 0 or by 1, such as ``src_key_padding_mask``.

    An argument ``[B, N]`` marks padding if the output changes without the marks, but not if the tokens or vectors at
    the marks are replaced. This is measured once for a model and an argument, with up to five forward passes.
    """
    values: dict[str | int, Any] = dict([*enumerate(inputs.args), *inputs.kwargs.items()])
    if inputs.mask is not None or mask_name(inputs.name) in inputs.kwargs or inputs.modality not in ("text", "tensor"):
        return inputs
    for place, value in values.items():
        name = argument_name(model, place) if isinstance(place, int) else place
        if "mask" not in name or not isinstance(value, Tensor) or value.shape != inputs.tensor.shape[:2]:
            continue
        for mark in (0, 1):
            marked = value == mark
            partly = bool(marked.any()) and not bool(marked.all(1).any()) and bool((marked | (value == 1 - mark)).all())
            measure = partial(_is_padding, model, inputs, values, place, marked)
            if partly and once(model, ("padding mask", name, mark), measure):
                return replace(inputs, mask=~marked)
    return inputs


def _is_padding(
    model: nn.Module, inputs: Inputs, values: dict[str | int, Any], place: str | int, marked: Tensor
) -> bool:
    """Return True if the outputs at other positions depend on the marks, but not on the values at marked positions."""
    tensor, mask = inputs.tensor, values[place]
    low, high = tensor.min(), tensor.max()
    other = 1 - 2 * tensor if tensor.is_floating_point() else torch.where(tensor == low, high, low)
    unmarked = torch.where(marked, mask.logical_not().to(mask), mask)
    hidden = marked if tensor.dim() == 2 else marked[..., None]

    def outputs(changes: dict[str | int, Tensor]) -> list[Tensor]:
        fed = {**values, **changes}
        args = tuple(fed.pop(i) for i in range(len(inputs.args)))
        output = forward(model, args, {str(n): v for n, v in fed.items()})
        return [t[~marked] if t.shape[:2] == marked.shape else t for t in float_outputs(output).values()]

    def same(first: list[Tensor], second: list[Tensor]) -> bool:
        pairs = zip(first, second, strict=True)
        return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5 * float(a.abs().max())) for a, b in pairs)

    try:
        plain = outputs({})
        changed = outputs({inputs.scored: torch.where(hidden, other, tensor)})
        return bool(low < high) and same(plain, changed) and not same(plain, outputs({place: unmarked}))
    except FOREIGN_ERRORS:  # the model fails again later, where the error is reported
        return False

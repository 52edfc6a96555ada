"""Recognize padding masks by their effect: tokens at the marked positions do not change the output."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from whyformer.errors import FOREIGN_ERRORS
from whyformer.inputs import Inputs
from whyformer.inputs.feed import argument_name
from whyformer.methods.padding import float_outputs
from whyformer.models.cache import once
from whyformer.models.ends import forward

__all__ = ["with_padding_mask"]


def with_padding_mask(model: nn.Module, inputs: Inputs) -> Inputs:
    """Set :attr:`Inputs.mask` of each text and sequence of vectors whose padding an argument marks by 0 or by 1 under
    another name than ``attention_mask``, such as ``src_key_padding_mask``.

    An argument ``[B, N]`` marks padding if the output changes without the marks, but not if the tokens or vectors at
    the marks are replaced. This is measured once for a model and an argument, with up to seven forward passes.
    """
    sides, masks = inputs.sides, dict[str, Tensor]()
    used = {side.masked_by for side in sides.values()}
    for name, side in sides.items():
        if side.mask is None and side.masked_by is None and side.modality in ("text", "tensor"):
            place, mask = next(_padding_masks(model, side, used), (None, None))
            used.add(place)
            masks |= {} if mask is None else {name: mask}
    masked = {name: replace(side, mask=masks.get(name, side.mask)) for name, side in sides.items()}
    return inputs.with_sides(masked) if masks else inputs


def _padding_masks(
    model: nn.Module, side: Inputs, used: set[str | int | None]
) -> Iterator[tuple[str | int, Tensor]]:
    """Yield (position or name, mask) of the arguments, except the used ones, that mark the padding of an input."""
    values: dict[str | int, Any] = dict([*enumerate(side.args), *side.kwargs.items()])
    for place, value in values.items():
        name = argument_name(model, place) if isinstance(place, int) else place
        if "mask" not in name or place in used:
            continue
        if not isinstance(value, Tensor) or value.shape != side.tensor.shape[:2]:
            continue
        for mark in (0, 1):
            marked = value == mark
            partly = bool(marked.any()) and not bool(marked.all(1).any()) and bool((marked | (value == 1 - mark)).all())
            measure = partial(_is_padding, model, side, values, place, marked)
            if partly and once(model, ("padding mask", side.name, name, mark), measure):
                yield place, ~marked


def _is_padding(
    model: nn.Module, inputs: Inputs, values: dict[str | int, Any], place: str | int, marked: Tensor
) -> bool:
    """Return True if the outputs at other positions depend on the marks, but not on the values at marked positions."""
    tensor, mask = inputs.tensor, values[place]
    low, high = tensor.min(), tensor.max()
    # all ids equal, since a model may not depend on their order
    others = [1 - 2 * tensor] if tensor.is_floating_point() else [low.expand_as(tensor), high.expand_as(tensor)]
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
        changed = (outputs({inputs.scored: torch.where(hidden, other, tensor)}) for other in others)
        unread = bool(low < high) and all(same(plain, values) for values in changed)
        return unread and not same(plain, outputs({place: unmarked}))
    except FOREIGN_ERRORS:  # the model fails again later, where the error is reported
        return False

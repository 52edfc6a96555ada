"""Which arguments of a model have a batch axis: those that have not are the same for all samples and all copies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from whyformer.inputs import Inputs, called, stands_beside
from whyformer.models.readout import anything, plain_logits

__all__ = ["with_batch_axes"]

Place = str | int
_MOST = 4


def with_batch_axes(model: nn.Module, inputs: Inputs) -> Inputs:
    """The inputs with the arguments that have no batch axis, ``whole``.

    An argument with as many rows as there are samples, or a multiple of it, has rows for each sample. Where that may be
    by chance, it is tried: the model has to say of one sample alone what it says of all, with it cut or whole.
    """
    given: list[tuple[Place, Any]] = [*enumerate(inputs.args), *inputs.kwargs.items()]
    scored = {inputs.scored, *(one.scored for one in inputs.others.values())}
    tensors = [(p, v) for p, v in given if isinstance(v, Tensor) and v.dim() and p not in scored]
    whole = {p for p, v in tensors if len(v) % inputs.batch}
    doubtful = [p for p, v in tensors if p not in whole and _is_doubtful(_name(model, p), v, inputs.batch)]
    inputs = replace(inputs, whole=frozenset(whole))
    if not doubtful:
        return inputs
    # a model that fails on these inputs does so again where that is reported
    with contextlib.suppress(ValueError, RuntimeError, IndexError, TypeError, KeyError):
        says = plain_logits(model, *inputs.feed, anything)
        for some in _choices(doubtful):
            tried = replace(inputs, whole=frozenset((*whole, *some)))
            if _agrees(model, tried, says):
                return tried
    return inputs


def _name(model: nn.Module, place: Place) -> str:
    return place if isinstance(place, str) else called(model, place)


def _is_doubtful(name: str, value: Tensor, batch: int) -> bool:
    """Whether its length alone does not say that an argument has rows for each sample."""
    if batch == len(value) == 1:
        return False
    fits = len(value) == batch or "position" not in name
    return not (fits and stands_beside(name)) and (len(value) != batch or value.is_floating_point())


def _choices(doubtful: list[Place]) -> Iterator[tuple[Place, ...]]:
    """Which of them may be left whole: none, one of them, two ..."""
    few = doubtful[:_MOST]
    for count in range(len(few) + 1):
        yield from combinations(few, count)


def _agrees(model: nn.Module, inputs: Inputs, says: Tensor) -> bool:
    """Whether the model says of one sample alone, or of a copy of the only one, what it says of all."""
    alone = inputs.select(slice(0, 1))
    tried = alone if inputs.batch > 1 else alone.with_tensor(alone.tensor.repeat_interleave(2, 0))
    with contextlib.suppress(ValueError, RuntimeError, IndexError, TypeError, KeyError):
        found = plain_logits(model, *tried.feed, anything)
        wanted = says[:1].expand(len(found), *says.shape[1:])
        tolerance = 1e-3 if says.dtype not in (torch.float16, torch.bfloat16) else 0.1
        return found.shape == wanted.shape and bool(((found - wanted).abs() <= tolerance * (1 + wanted.abs())).all())
    return False

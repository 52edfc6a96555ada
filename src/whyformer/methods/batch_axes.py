"""Find out which arguments of a model have a batch axis; the others are the same for all samples and copies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from whyformer.inputs import Inputs, argument_name, is_auxiliary
from whyformer.inputs.feed import is_table
from whyformer.models.readout import any_tensor, plain_logits

__all__ = ["with_batch_axes"]

Place = str | int
_MOST = 4


def with_batch_axes(model: nn.Module, inputs: Inputs) -> Inputs:
    """Set ``unbatched`` of the inputs to the arguments without a batch axis.

    An argument whose number of rows is a multiple of the number of samples has rows for each sample. If this may be a
    coincidence, it is tested: the model's output for one sample must equal that in the batch, with the argument
    sliced or whole.
    """
    arguments: list[tuple[Place, Any]] = [*enumerate(inputs.args), *inputs.kwargs.items()]
    others = {other.scored for other in inputs.others.values()}
    tensors = [(p, v) for p, v in arguments if isinstance(v, Tensor) and v.dim() and p != inputs.scored]
    tensors = [(p, v) for p, v in tensors if p not in others or is_table(v, inputs.batch)]
    unbatched = {p for p, v in tensors if len(v) % inputs.batch}
    ambiguous = [p for p, v in tensors if p not in unbatched and _is_ambiguous(_name(model, p), v, inputs.batch)]
    inputs = _with_unbatched(inputs, unbatched)
    if not ambiguous:
        return inputs
    # a model that fails on these inputs fails again later, where the error is reported
    with contextlib.suppress(ValueError, RuntimeError, IndexError, TypeError, KeyError):
        outputs = plain_logits(model, *inputs.feed, any_tensor)
        for some in _choices(ambiguous):
            candidate = _with_unbatched(inputs, unbatched.union(some))
            if _agrees(model, candidate, outputs):
                return candidate
    return inputs


def _with_unbatched(inputs: Inputs, places: set[Place]) -> Inputs:
    """Set the arguments without a batch axis. They get no scores, because scores belong to samples."""
    others = {name: other for name, other in inputs.others.items() if other.scored not in places}
    return replace(inputs, unbatched=frozenset(places), others=others)


def _name(model: nn.Module, place: Place) -> str:
    return place if isinstance(place, str) else argument_name(model, place)


def _is_ambiguous(name: str, value: Tensor, batch: int) -> bool:
    """Return whether an argument may lack a batch axis although its length is a multiple of the number of samples."""
    if batch == len(value) == 1:
        return False
    fits = len(value) == batch or "position" not in name
    return not (fits and is_auxiliary(name)) and (len(value) != batch or value.is_floating_point())


def _choices(ambiguous: list[Place]) -> Iterator[tuple[Place, ...]]:
    """Yield the subsets that may have no batch axis, by size."""
    few = ambiguous[:_MOST]
    for count in range(len(few) + 1):
        yield from combinations(few, count)


def _agrees(model: nn.Module, inputs: Inputs, outputs: Tensor) -> bool:
    """Return whether the model's output for the first sample alone (or for two copies of the only one) equals that in
    the batch."""
    first = inputs.select(slice(0, 1))
    candidate = first if inputs.batch > 1 else first.with_tensor(first.tensor.repeat_interleave(2, 0))
    with contextlib.suppress(ValueError, RuntimeError, IndexError, TypeError, KeyError):
        actual = plain_logits(model, *candidate.feed, any_tensor)
        expected = outputs[:1].expand(len(actual), *outputs.shape[1:])
        tolerance = 1e-3 if outputs.dtype not in (torch.float16, torch.bfloat16) else 0.1
        return actual.shape == expected.shape and bool(
            ((actual - expected).abs() <= tolerance * (1 + expected.abs())).all()
        )
    return False

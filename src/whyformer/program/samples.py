"""Samples of a program: whether the leading axes of an attention hold samples, then heads, or heads, then samples."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from whyformer.program.attentions import Mixing
from whyformer.program.operations import kind_of, plain_name
from whyformer.program.record import Program, Value


def undecided(program: Program, attentions: Iterable[Mixing], samples: int) -> frozenset[int]:
    """The calls of attentions whose shape leaves open which it is: ``[B·H, N, d]`` or ``[H·B, N, d]``,
    ``[B, H, N, d]`` or ``[H, B, N, d]``."""
    found = set()
    for attention in attentions:
        call, shape = attention.call, program.values[attention.call.results[0]].shape
        known = kind_of(call.name) == "attention" or (attention.weights == 0 and plain_name(call.name) in _PRODUCTS)
        if known and ((len(shape) == 3 and shape[0] != samples) or (len(shape) == 4 and shape[1] == samples)):
            found.add(call.number)
    return frozenset(found)


_PRODUCTS = ("matmul", "bmm")


def leading(program: Program, rolled: Program, calls: Iterable[int], samples: int) -> dict[int, str]:
    """Of each of these calls, what its leading axes hold first: "samples", "heads" or "" (neither). It shows in equal
    samples too, for heads are not equal.

    Args:
        rolled: the program of the same samples, the last of them first.
    """
    if [c.name for c in program.calls] != [c.name for c in rolled.calls]:
        return dict.fromkeys(calls, "")
    found = {}
    for number in calls:
        before, after = (p.values[p.calls[number].results[0]] for p in (program, rolled))
        fits = [name for place, name in enumerate(("samples", "heads")) if _as_rolled(before, after, samples, place)]
        found[number] = fits[0] if fits else ""
    return found


def _as_rolled(before: Value, after: Value, samples: int, place: int) -> bool:
    """Whether the later value is the earlier one with samples rolled, where these are the first or second of its
    leading axes."""
    axis = place if len(before.shape) == 4 else 0
    if before.shape != after.shape or before.shape[axis] % samples or axis not in before.rows:
        return False
    rows, others = before.rows[axis], (samples, -1) if place == 0 else (-1, samples)
    expected = rows.movedim(axis, 0)
    expected = expected.unflatten(0, others).roll(1, place).flatten(0, 1).movedim(0, axis)
    return _close(expected, after.rows[axis])


def _close(a: Tensor, b: Tensor) -> bool:
    return bool(torch.isfinite(b).all()) and float((a - b).abs().max()) <= 1e-3 * float(b.abs().max())

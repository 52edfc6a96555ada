"""Diagnostics that have one entry for each sample: cut to one sample, and joined to a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

PER_SAMPLE = frozenset(
    ["completeness", "conservation", "input", "masks", "precision", "samples", "shares", "target", "token_deletion"]
) | {"trust", "warnings"}
"""Names of diagnostics whose lists and tensors have one entry for each sample, also inside of mappings. Whatever has
another name is of the whole batch. A method's own figures of each sample have their place under ``"samples"``."""


def of_sample(diagnostics: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Those of one sample, again with one entry each; what it has none of is left out."""
    own = _entries({name: value for name, value in diagnostics.items() if name in PER_SAMPLE}, index)
    return {**{name: value for name, value in diagnostics.items() if name not in PER_SAMPLE}, **own}


def of_batch(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Those of a batch, from those of each sample, which have one entry each; None for a sample that has none, and no
    sentences where it has no notes or warnings.

    What is of the whole batch is one value where all say the same, else a list of what they say.
    """
    made: dict[str, Any] = {}
    for name in dict.fromkeys(name for own in samples for name in own):
        empty: list[Any] = [[]] if name in ("input", "warnings") else [None]
        if name in PER_SAMPLE:
            made[name] = _joined([own.get(name, empty) for own in samples])
        else:
            made[name] = _same([own[name] for own in samples if name in own])
    return made


def _entries(values: Mapping[str, Any], index: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found[name] = _entries(value, index)
        elif not isinstance(value, list | tuple | Tensor):
            found[name] = value
        elif not (len(own := value[index : index + 1]) == 1 and own[0] is None):
            found[name] = own
    return found


def _joined(values: list[Any]) -> Any:
    """The entries of all samples in order, also inside of mappings."""
    there = [value for value in values if isinstance(value, Mapping)]
    if there:
        names = dict.fromkeys(name for value in there for name in value)
        return {n: _joined([v.get(n, [None]) if isinstance(v, Mapping) else [None] for v in values]) for n in names}
    if all(isinstance(value, Tensor) for value in values) and len({value.shape[1:] for value in values}) == 1:
        return torch.cat(values)
    if all(isinstance(value, list | tuple | Tensor) for value in values):
        return [one for value in values for one in value]
    return _same([value for value in values if value != [None]])


def _same(values: list[Any]) -> Any:
    """One value where all are equal, else all of them."""
    first = values[0]
    return first if all(not isinstance(value, Tensor) and value == first for value in values) else values

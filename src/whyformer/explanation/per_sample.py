"""Slice diagnostics that have an entry for each sample, and join them into those of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

PER_SAMPLE = frozenset(
    ["completeness", "conservation", "input", "masks", "precision", "samples", "shares", "target", "token_deletion"]
) | {"trust", "warnings"}
"""Names of diagnostics whose lists and tensors, also inside mappings, have an entry for each sample. All other
diagnostics describe the whole batch. Methods store their own figures for each sample under ``"samples"``."""


def of_sample(diagnostics: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return the diagnostics of one sample as a batch of one; entries that are None are left out."""
    entries = _entries({name: value for name, value in diagnostics.items() if name in PER_SAMPLE}, index)
    return {**{name: value for name, value in diagnostics.items() if name not in PER_SAMPLE}, **entries}


def of_batch(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the diagnostics of samples, each a batch of one, into those of a batch.

    A sample without an entry has None, or an empty list for notes and warnings. A diagnostic of the whole batch is one
    value if it is equal for all samples, otherwise a list of the values.
    """
    joined: dict[str, Any] = {}
    for name in dict.fromkeys(name for diagnostics in samples for name in diagnostics):
        empty: list[Any] = [[]] if name in ("input", "warnings") else [None]
        if name in PER_SAMPLE:
            joined[name] = _joined([diagnostics.get(name, empty) for diagnostics in samples])
        else:
            joined[name] = _same([diagnostics[name] for diagnostics in samples if name in diagnostics])
    return joined


def _entries(values: Mapping[str, Any], index: int) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            entries[name] = _entries(value, index)
        elif not isinstance(value, list | tuple | Tensor):
            entries[name] = value
        elif not (len(entry := value[index : index + 1]) == 1 and entry[0] is None):
            entries[name] = entry
    return entries


def _joined(values: list[Any]) -> Any:
    """Concatenate the entries of all samples, also inside mappings."""
    mappings = [value for value in values if isinstance(value, Mapping)]
    if mappings:
        names = dict.fromkeys(name for value in mappings for name in value)
        return {n: _joined([v.get(n, [None]) if isinstance(v, Mapping) else [None] for v in values]) for n in names}
    if all(isinstance(value, Tensor) for value in values) and len({value.shape[1:] for value in values}) == 1:
        return torch.cat(values)
    if all(isinstance(value, list | tuple | Tensor) for value in values):
        return [entry for value in values for entry in value]
    return _same([value for value in values if value != [None]])


def _same(values: list[Any]) -> Any:
    """Return the common value if all values are equal, otherwise all values."""
    first = values[0]
    return first if all(not isinstance(value, Tensor) and value == first for value in values) else values

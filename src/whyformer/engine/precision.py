"""Relevance is propagated in float32 or wider: where rules divide by sums that may cancel, half precision is noise."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from whyformer.errors import ModelError

HALF = (torch.float16, torch.bfloat16)
T = TypeVar("T")


def half_precision(model: nn.Module) -> str | None:
    """ "float16" or "bfloat16" where the model has such parameters, else None."""
    return next((str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.dtype in HALF), None)


def single(model: nn.Module, blocks: list[nn.Module]) -> tuple[nn.Module, list[nn.Module]]:
    """A float32 copy of a model of half precision and the copies of its blocks; the model itself is not touched.

    Raises:
        ModelError: the model cannot be copied.
    """
    seen: dict[int, Any] = {}
    try:
        with torch.no_grad():
            wide = copy.deepcopy(model, seen).float()
    except (RuntimeError, TypeError) as error:
        raise ModelError(
            "relevance needs float32, and this model of half precision cannot be copied into it "
            f"({error}). Load it in float32: dtype='float32'"
        ) from error
    return wide, [seen[id(block)] for block in blocks]


def widened(values: T) -> T:
    """Floating tensors of half precision as float32, also in lists, tuples and mappings."""
    made: Any = values
    if isinstance(values, Tensor):
        made = values.float() if values.dtype in HALF else values
    elif type(values) in (list, tuple):
        made = type(values)(widened(v) for v in values)  # type: ignore[call-arg, attr-defined]
    elif isinstance(values, Mapping):
        made = {k: widened(v) for k, v in values.items()}
    return made

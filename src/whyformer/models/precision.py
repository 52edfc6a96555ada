"""Propagate relevance in float32 or wider, because rules divide by sums that may cancel, which amplifies rounding."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

from whyformer.errors import ModelError
from whyformer.models.output import with_tensors
from whyformer.models.readout import without_excluded

HALF = (torch.float16, torch.bfloat16)
T = TypeVar("T")


def agreement(half: torch.dtype, logits: Tensor, wide: Tensor) -> dict[str, object]:
    """Compare a model in half precision with its float32 copy, in which relevance was propagated.

    Returns:
        ``model``, ``relevance``: the two types; per sample: ``logits_moved``, max |l_half − l_float32| / (max l_float32
        − min l_float32), and ``same_class``, whether the class with the largest logit is the same.
    """
    logits, wide = (without_excluded(z.detach().double()) for z in (logits, wide))
    spread = wide.amax(-1) - wide.amin(-1) if wide.shape[-1] > 1 else wide.abs().amax(-1)
    moved = (logits - wide).abs().amax(-1) / spread.clamp(min=1e-12)
    same = logits.argmax(-1) == wide.argmax(-1)
    name = str(half).removeprefix("torch.")
    return {"model": name, "relevance": "float32", "logits_moved": moved.tolist(), "same_class": same.tolist()}


def float32_copy(model: nn.Module) -> nn.Module:
    """Return a float32 copy of a model in half precision.

    Raises:
        ModelError: the model cannot be copied.
    """
    try:
        with torch.no_grad():
            return copy.deepcopy(model).float()
    except (RuntimeError, TypeError) as error:
        raise ModelError(
            "relevance needs float32, and this model in half precision cannot be copied to float32 "
            f"({error}). Load it in float32: dtype='float32'"
        ) from error


def in_float32(arguments: T) -> T:
    """Convert half-precision tensors to float32, also in lists, tuples, mappings and caches."""
    return with_tensors(arguments, lambda t: t.float() if t.dtype in HALF else t, deep=True)

"""Assign concatenated pictures, tiles and packed patches to their samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from whyformer.errors import InputError
from whyformer.inputs.feed import channels
from whyformer.inputs.inputs import Inputs
from whyformer.inputs.prompts import places_in


def is_evenly_packed(tensor: Tensor, samples: int, kwargs: dict[str, Any]) -> bool:
    """Return whether the rows of a ``[P, D]`` tensor are packed patches, equally many per sample."""
    grids = [v for k, v in kwargs.items() if "grid" in k and isinstance(v, Tensor) and v.dim() == 2]
    if not grids or any(len(t) % samples for t in (tensor, *grids)):
        return False
    counts = torch.stack([grid.prod(-1).unflatten(0, (samples, -1)).sum(1) for grid in grids])  # [grids, samples]
    return bool((counts == counts[:, :1]).all())


def channels_last(pixels: Tensor, model: nn.Module) -> bool:
    """Return whether the channels of pixels seem to be the last axis."""
    return pixels.shape[-1] in (1, 3, 4) and min(pixels.shape[-3:-1]) > 4 and channels(model) != pixels.shape[-3]


def are_patches(pixels: Tensor, ids: Tensor, model: nn.Module) -> bool:
    """Return whether pixels are packed patches of the pictures of prompts, each stored as a small picture with its
    channels last, equally many per prompt (Inkling)."""
    return channels_last(pixels, model) and places_in(model, ids) > 0 and len(pixels) % len(ids) == 0


def has_several_pictures(pictures: Tensor, ids: Tensor, model: nn.Module) -> bool:
    """Return whether each prompt holds several of the pictures or tiles, with placeholders for them among its ids.

    Raises:
        InputError: the prompts have different numbers of placeholders, so the pictures cannot be assigned.
    """
    counts = [places_in(model, row) for row in ids]
    # equally many pictures and prompts, but a prompt without a picture: another prompt has two
    unequal = len(pictures) == len(ids) and 0 in counts
    if not any(counts) or (len(pictures) <= len(ids) and not unequal):
        return False
    if unequal or len(set(counts)) > 1 or len(pictures) % len(ids):
        raise InputError(
            f"these {len(ids)} prompts have placeholders for {', '.join(map(str, counts[:8]))} rows of pictures, and "
            f"{len(pictures)} pictures or tiles cannot be assigned to them: explain the prompts one at a time"
        )
    return True


def check_assigned(inputs: Inputs, samples: int) -> Inputs:
    """Return the inputs of prompts unchanged, if their pictures can be assigned to them.

    Raises:
        InputError: they cannot.
    """
    pixels = [n for n, t in inputs.kwargs.items() if "pixel" in n and isinstance(t, Tensor) and t.is_floating_point()]
    unscored = bool(pixels) and {inputs.name, *inputs.others}.isdisjoint(pixels)
    if samples > 1 and (unscored or inputs.batch != samples):
        raise InputError(
            "the rows of the pictures cannot be assigned to the prompts: explain the prompts one at a time"
        )
    return inputs

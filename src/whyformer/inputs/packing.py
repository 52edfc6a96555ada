"""Pictures, tiles and packed patches that stand one behind another: which are whose."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from whyformer.errors import InputError
from whyformer.inputs.feed import channels
from whyformer.inputs.inputs import Inputs
from whyformer.inputs.prompts import places_in


def alike(tensor: Tensor, samples: int, kwargs: dict[str, Any]) -> bool:
    """Whether each sample has as many rows of a ``[P, D]`` tensor: packed patches of as many pictures."""
    grids = [v for k, v in kwargs.items() if "grid" in k and isinstance(v, Tensor) and v.dim() == 2]
    return (
        bool(grids)
        and len(tensor) % samples == 0
        and all(len(g) % samples == 0 and _as_many(g.unflatten(0, (samples, -1))) for g in grids)
    )


def _as_many(grids: Tensor) -> bool:
    """Whether the grids ``[B, k, 3]`` of each sample have as many patches."""
    counts = grids.prod(-1).sum(1)
    return bool((counts == counts[0]).all())


def channels_last(pixels: Tensor, model: nn.Module) -> bool:
    """Whether the channels of pixels seem to come last."""
    return pixels.shape[-1] in (1, 3, 4) and min(pixels.shape[-3:-1]) > 4 and channels(model) != pixels.shape[-3]


def small_pictures(pixels: Tensor, ids: Tensor, model: nn.Module) -> bool:
    """Whether these are packed patches of the pictures of prompts, each a picture of its own with its channels last, as
    many of each prompt (Inkling)."""
    return channels_last(pixels, model) and places_in(model, ids) > 0 and len(pixels) % len(ids) == 0


def several_each(pictures: Tensor, ids: Tensor, model: nn.Module) -> bool:
    """Whether each prompt holds several of the pictures or tiles: more of them, and places for them among its ids.

    Raises:
        InputError: the prompts have places for unlike numbers of rows, so that which are whose is unknown.
    """
    counts = [places_in(model, row) for row in ids]
    # as many pictures as prompts, and a prompt without one: another has two
    unlike = len(pictures) == len(ids) and 0 in counts
    if not any(counts) or (len(pictures) <= len(ids) and not unlike):
        return False
    if unlike or len(set(counts)) > 1 or len(pictures) % len(ids):
        raise InputError(
            f"these {len(ids)} prompts have places for {', '.join(map(str, counts[:8]))} rows of pictures, so which of "
            f"the {len(pictures)} pictures or tiles are whose is unknown: explain them one at a time"
        )
    return True


def each_its_own(made: Inputs, samples: int) -> Inputs:
    """The inputs of prompts.

    Raises:
        InputError: it cannot be told what was made of the pictures of each.
    """
    pixels = [n for n, t in made.kwargs.items() if "pixel" in n and isinstance(t, Tensor) and t.is_floating_point()]
    lost = bool(pixels) and {made.name, *made.others}.isdisjoint(pixels)
    if samples > 1 and (lost or made.batch != samples):
        raise InputError(
            "which rows of the pictures of several prompts are whose is unknown: explain them one at a time"
        )
    return made
